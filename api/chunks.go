package api

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"time"

	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/packed"
)

// maxBatchBody bounds a batchGet request: MaxBatch digests of 71 characters in
// quotes, a comma and some space each.
const maxBatchBody = MaxBatch*96 + 1024

func (h *Handler) serveChunk(ctx context.Context, w *response, r *http.Request, d chunk.Digest) error {
	leave, err := h.reads.Enter(ctx, 1)
	if err != nil {
		return err
	}
	defer leave()
	p, err := h.cfg.Chunks.Get(ctx, d, nil)
	if err != nil {
		return err
	}
	if immutable(w, r, `"`+d.String()+`"`) {
		return nil
	}
	w.Header().Set("Content-Type", TypeBytes)
	return writeBytes(w, p)
}

// serveBatch answers in frames, each sent as soon as its chunk is read. Once
// the first frame is out, errors of chunks are frames; a batch that cannot go
// on gives its unanswered digests error frames and ends properly.
func (h *Handler) serveBatch(ctx context.Context, w *response, r *http.Request) error {
	ds, err := readDigests(w, r)
	if err != nil {
		return err
	}
	leave, err := h.reads.Enter(ctx, 1)
	if err != nil {
		return err
	}
	defer leave()
	w.Header().Set("Content-Type", TypeFrames)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Trailer", HeaderBucketBytes)
	b := &batch{h: h, w: w, ds: ds, records: accepts(r.Header.Values("Accept"), TypeFrames2)}
	ctx, cancel := context.WithCancelCause(bucket.WithMeter(ctx, &b.meter))
	defer cancel(nil)
	b.stalled = time.AfterFunc(h.cfg.ChunkTimeout, func() { cancel(errStalled) })
	defer b.stalled.Stop()
	b.out = newFrameBuffer(b)
	defer b.out.release()
	b.fw = NewFrameWriter(b.out)
	err = b.run(ctx)
	w.Header().Set(HeaderBucketBytes, strconv.FormatInt(b.meter.Read(), 10))
	return err
}

// errStalled ends a batch whose store gives no chunk any more.
var errStalled = errors.New("the store gave no chunk in time")

// batch is one batchGet being answered. StoredBatch calls back one at a time, so
// nothing here needs a lock.
type batch struct {
	h        *Handler
	stalled  *time.Timer // fires when the store is silent; stopped while the client is sent to
	w        *response
	out      *frameBuffer
	fw       *FrameWriter
	meter    bucket.Meter
	ds       []chunk.Digest        // asked for
	open     map[chunk.Digest]bool // no answer yet; made by expect
	records  bool                  // the client reads version 2
	sent     bool                  // and was answered in it
	writeErr error                 // the client is gone
}

// expect returns the digests, each once.
func (b *batch) expect() []chunk.Digest {
	if b.open == nil {
		b.open = make(map[chunk.Digest]bool, len(b.ds))
		unique := b.ds[:0]
		for _, d := range b.ds {
			if !b.open[d] {
				b.open[d] = true
				unique = append(unique, d)
			}
		}
		b.ds = unique
	}
	return b.ds
}

// run asks the store and makes sure that every digest is answered.
func (b *batch) run(ctx context.Context) error {
	err := b.stored(ctx)
	if b.sent {
		return b.writeErr
	}
	ds := b.expect()
	switch {
	case b.writeErr != nil:
		return b.writeErr
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), errStalled):
		return ctx.Err()
	case ctx.Err() != nil:
		err = errStalled
	case err == nil && len(b.open) > 0:
		err = errors.New("the store left chunks of the batch out")
	}
	if err != nil {
		b.h.log.ErrorContext(ctx, "batch read stopped", "unanswered", len(b.open), "error", err)
	}
	for _, d := range ds {
		if b.open[d] {
			b.write(Frame{Digest: d, Status: StatusError, Reason: err.Error()}, true)
		}
	}
	if b.writeErr != nil {
		return b.writeErr
	}
	return errors.Join(b.fw.Close(), b.out.flush())
}

// answer writes the frame of one chunk.
func (b *batch) answer(d chunk.Digest, s packed.Stored, err error) error {
	b.expect()
	if !b.open[d] {
		return fmt.Errorf("store answered chunk %s twice or unasked", d)
	}
	if err != nil {
		return b.write(Frame{Digest: d, Status: statusOf(err), Reason: err.Error()}, false)
	}
	return b.write(Frame{
		Digest: d, Status: StatusOK, Codec: s.Codec, Len: s.Len, CRC: s.CRC, Stored: s.Bytes,
	}, s.More)
}

// Write sends gathered frames. As long as the client takes, the store is not silent.
func (b *batch) Write(p []byte) (int, error) {
	b.stalled.Stop()
	defer b.stalled.Reset(b.h.cfg.ChunkTimeout)
	return b.w.Write(p)
}

// write sends one frame, with those held back before, unless more of the same read
// follow at once: the next chunk may be slow. After a client is gone it does nothing.
func (b *batch) write(f Frame, more bool) error {
	if b.writeErr != nil {
		return b.writeErr
	}
	delete(b.open, f.Digest)
	b.h.metrics.frame(f.Status)
	b.writeErr = b.fw.Write(f)
	if b.writeErr == nil && !more {
		b.writeErr = b.out.flush()
	}
	if b.writeErr == nil && !more {
		b.stalled.Stop()
		b.writeErr = b.w.flush()
		b.stalled.Reset(b.h.cfg.ChunkTimeout)
	}
	return b.writeErr
}

func statusOf(err error) Status {
	switch {
	case errors.Is(err, store.ErrNotFound):
		return StatusNotFound
	case asCorrupt(err):
		return StatusCorrupt
	}
	return StatusError
}

// readDigests reads the request body of batchGet in either form.
func readDigests(w *response, r *http.Request) ([]chunk.Digest, error) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, fmt.Errorf("%w: Content-Type: %w", ErrBadRequest, err)
	}
	body, err := readBody(w, r, maxBatchBody)
	if err != nil {
		return nil, err
	}
	var ds []chunk.Digest
	switch kind {
	case TypeJSON:
		ds, err = digestsFromJSON(body)
	case TypeDigests:
		ds, err = digestsFromBinary(body)
	default:
		err = fmt.Errorf("%w: Content-Type %q, want %s or %s", ErrBadRequest, kind, TypeDigests, TypeJSON)
	}
	if err != nil {
		return nil, err
	}
	if len(ds) == 0 {
		return nil, fmt.Errorf("%w: no digests", ErrBadRequest)
	}
	if len(ds) > MaxBatch {
		return nil, fmt.Errorf("%w: %d, at most %d are allowed", ErrTooManyDigests, len(ds), MaxBatch)
	}
	return ds, nil
}

func digestsFromJSON(body []byte) ([]chunk.Digest, error) {
	var req batchRequest
	if err := strictJSON(body, &req); err != nil {
		return nil, fmt.Errorf("%w: request body: %w", ErrBadRequest, err)
	}
	return req.Digests, nil
}

func digestsFromBinary(body []byte) ([]chunk.Digest, error) {
	const size = len(chunk.Digest{})
	if len(body)%size != 0 {
		return nil, fmt.Errorf("%w: request body of %d bytes is no list of %d-byte digests", ErrBadRequest, len(body), size)
	}
	ds := make([]chunk.Digest, len(body)/size)
	for i := range ds {
		copy(ds[i][:], body[i*size:])
	}
	return ds, nil
}

// EncodeDigests returns the binary request body of batchGet.
func EncodeDigests(ds []chunk.Digest) []byte {
	body := make([]byte, 0, len(ds)*len(chunk.Digest{}))
	for _, d := range ds {
		body = append(body, d[:]...)
	}
	return body
}
