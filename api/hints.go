package api

import (
	"context"
	"errors"
	"slices"
	"time"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
	"quarry/store/trace"
)

const (
	// hintTimeout is how long a start waits for its list: what comes later is of no
	// use to it.
	hintTimeout = 5 * time.Second
	// hintWindow is how many chunks of a list are read at once: enough that
	// neighbours in a pack are one read, and few enough that the first to be
	// touched come first. The first window is of firstWindow, as the sandbox cannot be
	// configured before its passwd is there, and each is twice the one before.
	hintWindow  = 64
	firstWindow = 8
)

// hinted is what a start has to say beyond the image.
type hinted struct {
	id     chunk.Digest
	st     image.Statement
	repo   string
	chunks bool // send the first chunks too
}

// writeHints ends an answer of version 2 with the trace stream. All that came
// before is sent first. What goes wrong here ends the stream and is no error of
// the image; only a client that is gone is one.
func (h *Handler) writeHints(ctx context.Context, w *response, sw *StartWriter, q hinted) error {
	rest, err := sw.Rest()
	if err == nil {
		err = w.flush()
	}
	if err != nil {
		return err
	}
	tw := trace.NewWriter(rest)
	blob, list := h.hints(ctx, q)
	if len(list) == 0 {
		return tw.Close()
	}
	coming := 0
	if q.chunks {
		coming = len(trace.Cut(list, len(list), trace.MaxComing, sizeIn(blob)))
	}
	if err := tw.List(list, coming); err != nil {
		return err
	}
	if err := h.writeChunks(ctx, w, tw, blob, list[:coming]); err != nil {
		return err
	}
	return tw.Close()
}

func sizeIn(blob *rafs.Blob) func(uint32) int64 {
	return func(n uint32) int64 { return int64(blob.Chunks[n].Len) }
}

// hints returns the list of an image, its own or another's, within its bounds, and
// the chunks that its numbers are of.
func (h *Handler) hints(ctx context.Context, q hinted) (*rafs.Blob, []uint32) {
	if q.st.Blob == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, hintTimeout)
	defer cancel()
	list, _, err := h.traces.list(ctx, q.id)
	kind := "own"
	if err == nil && len(list) == 0 {
		kind = "sibling"
		list, err = h.siblings.list(ctx, q.id, q.st, func() map[chunk.Digest]bool { return h.sourcesOf(q.repo) })
	}
	var blob *rafs.Blob
	if err == nil && len(list) > 0 {
		blob, err = h.blobs.get(ctx, h.cfg.Bucket, *q.st.Blob)
	}
	if err != nil {
		h.log.WarnContext(ctx, "start goes without a prefetch list", "image_id", q.id, "error", err)
	}
	if err != nil || len(list) == 0 {
		h.metrics.hints.WithLabelValues("none").Inc()
		return nil, nil
	}
	// Records are checked when they come, and the statement decides what the numbers
	// are of: only a damaged record has one beyond them.
	if slices.ContainsFunc(list, func(n uint32) bool { return int64(n) >= int64(len(blob.Chunks)) }) {
		list = slices.DeleteFunc(slices.Clone(list), func(n uint32) bool { return int64(n) >= int64(len(blob.Chunks)) })
	}
	h.metrics.hints.WithLabelValues(kind).Inc()
	return blob, trace.Cut(list, trace.MaxNumbers, trace.MaxPlain, sizeIn(blob))
}

// sourcesOf returns what the tags of a repository name.
func (h *Handler) sourcesOf(repo string) map[chunk.Digest]bool {
	near := map[chunk.Digest]bool{}
	tags := h.cfg.Names.Tags(repo)
	for _, tag := range tags[:min(len(tags), MaxNames)] {
		if n, ok := h.cfg.Names.Name(repo, tag); ok {
			near[n.Source] = true
		}
	}
	return near
}

// writeChunks sends chunks of a list, window by window. One that cannot be read is
// left out, and the first window that the store does not give in time ends it.
func (h *Handler) writeChunks(ctx context.Context, w *response, tw *trace.Writer, blob *rafs.Blob, numbers []uint32) error {
	for size := firstWindow; len(numbers) > 0; size = min(2*size, hintWindow) {
		if err := w.flush(); err != nil {
			return err
		}
		window := numbers[:min(size, len(numbers))]
		numbers = numbers[len(window):]
		byDigest := make(map[chunk.Digest]uint32, len(window))
		var ds []chunk.Digest
		for _, n := range window {
			c := blob.Chunks[n]
			byDigest[c.Digest] = n
			ds = append(ds, c.Digest)
		}
		var writeErr error
		reading, cancel := context.WithTimeout(ctx, h.cfg.ChunkTimeout)
		err := h.cfg.Chunks.StoredBatch(reading, ds, func(d chunk.Digest, s packed.Stored, err error) error {
			n, asked := byDigest[d]
			if err != nil || !asked || s.Len != blob.Chunks[n].Len {
				return nil
			}
			writeErr = tw.Chunk(trace.Chunk{Number: n, Codec: s.Codec, Len: s.Len, Stored: s.Bytes})
			return writeErr
		})
		cancel()
		if writeErr != nil || ctx.Err() != nil {
			return errors.Join(writeErr, ctx.Err())
		}
		if err != nil {
			h.log.WarnContext(ctx, "start goes without chunks", "error", err)
			return nil
		}
	}
	return nil
}
