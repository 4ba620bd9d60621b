package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/packed"
)

// recordChunks are Chunks of which many can be sent as they lie in files.
type recordChunks interface {
	Chunks
	StoredRecords(ctx context.Context, ds []chunk.Digest, send func(*packed.Records) error, fn func(chunk.Digest, packed.Stored, error) error) error
}

// stored asks the store for the chunks of a batch.
func (b *batch) stored(ctx context.Context) error {
	chunks, ok := b.h.cfg.Chunks.(recordChunks)
	if !ok || !b.records {
		return b.h.cfg.Chunks.StoredBatch(ctx, b.expect(), b.answer)
	}
	return chunks.StoredRecords(ctx, slices.Clone(b.ds), b.send, b.answer)
}

// send answers a batch in version 2: what is missing, and the records of all other
// chunks, which the kernel sends from files where the connection lets it. The length of
// the answer is known, so whatever cuts it off is seen.
func (b *batch) send(r *packed.Records) error {
	b.stalled.Stop() // from here on it is the client who is waited for
	size := int64(preambleLen + 2*headerLen + r.Size)
	frames := make([]Frame, len(r.Missing))
	for i, d := range r.Missing {
		frames[i] = Frame{Digest: d, Status: StatusNotFound, Reason: fmt.Sprintf("%s: %v", d, store.ErrNotFound)}
		size += headerLen + int64(len(frames[i].Reason))
	}
	head := b.w.Header()
	head.Set("Content-Type", TypeFrames2)
	head.Set("Content-Length", strconv.FormatInt(size, 10))
	head.Set(HeaderBucketBytes, strconv.FormatInt(b.meter.Read(), 10))
	head.Del("Trailer")
	b.w.WriteHeader(http.StatusOK)
	b.fw = NewFrameWriter2(b.out)
	b.sent = true
	b.writeErr = b.sendAll(frames, r)
	return b.writeErr
}

func (b *batch) sendAll(frames []Frame, r *packed.Records) error {
	for _, f := range frames {
		b.h.metrics.frame(f.Status)
		if err := b.fw.Write(f); err != nil {
			return err
		}
	}
	if err := b.fw.Records(uint32(r.Count), uint64(r.Size)); err != nil {
		return err
	}
	if err := b.out.flush(); err != nil {
		return err
	}
	for _, e := range r.Extents {
		if err := b.w.sendFile(&fileRange{e.File, e.Off, e.Off + e.Size}); err != nil {
			return err
		}
	}
	b.h.metrics.records(r.Count)
	if err := b.fw.Close(); err != nil {
		return err
	}
	return b.out.flush()
}
