package api

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net/http"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/trace"
)

// serveTrace takes the record of one run. Whoever may read an image may send one:
// it is held against the image it names, and is a hint even then.
func (h *Handler) serveTrace(ctx context.Context, w *response, r *http.Request, id chunk.Digest) error {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != TypeTrace {
		return fmt.Errorf("%w: Content-Type %q, want %s", ErrBadRequest, r.Header.Get("Content-Type"), TypeTrace)
	}
	if err := h.traces.admit(); err != nil {
		return err
	}
	body, err := readBody(w, r, trace.MaxRecord)
	if err != nil {
		return err
	}
	rec, err := trace.Decode(body)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBadTrace, err)
	}
	if rec.Image != id {
		return fmt.Errorf("%w: it is of image %s, sent for %s", ErrBadTrace, rec.Image, id)
	}
	st, err := h.statementOf(ctx, rec.Image, rec.Source, rec.Platform)
	if err != nil {
		return err
	}
	if err := h.checkNumbers(ctx, st, rec.Numbers); err != nil {
		return err
	}
	if err := h.traces.add(ctx, rec, body); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// statementOf returns the statement of the image with that id. Errors:
// ErrImageUnknown when source and platform have none, or another one by now.
func (h *shared) statementOf(ctx context.Context, id, source chunk.Digest, p image.Platform) (image.Statement, error) {
	payload, err := readObject(ctx, h.cfg.Bucket, image.StatementKey(source, p), image.MaxStatement)
	if err != nil && !errors.Is(err, bucket.ErrNotFound) {
		return image.Statement{}, err
	}
	if err != nil || image.ID(payload) != id {
		return image.Statement{}, fmt.Errorf("%w: source %s for %s has no image %s", ErrImageUnknown, source, p, id)
	}
	st, err := image.DecodeStatement(payload)
	if err != nil {
		return st, fmt.Errorf("%w: %s: %w (convert the image again to heal it)", ErrObjectCorrupt, image.StatementKey(source, p), err)
	}
	return st, nil
}

// checkNumbers holds the numbers of a record against the image's chunk table.
func (h *Handler) checkNumbers(ctx context.Context, st image.Statement, numbers []uint32) error {
	if st.Blob == nil {
		return fmt.Errorf("%w: the image has no chunks", ErrBadTrace)
	}
	blob, err := h.blobs.get(ctx, h.cfg.Bucket, *st.Blob)
	if err != nil {
		return err
	}
	left := int64(trace.MaxPlain)
	for _, n := range numbers {
		if int64(n) >= int64(len(blob.Chunks)) {
			return fmt.Errorf("%w: chunk %d of an image that has %d", ErrBadTrace, n, len(blob.Chunks))
		}
		if left -= int64(blob.Chunks[n].Len); left < 0 {
			return fmt.Errorf("%w: its chunks have more than %d bytes", ErrBadTrace, int64(trace.MaxPlain))
		}
	}
	return nil
}
