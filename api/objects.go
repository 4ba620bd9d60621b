package api

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"quarry/rafs"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

// copyStep is the size of one read from the bucket and one write to a client.
const copyStep = 256 << 10

// readObject is bucket.ReadObject, with what is no object, or larger than what its
// key stands for, reported as damaged.
func readObject(ctx context.Context, b bucket.Bucket, key string, limit int64) ([]byte, error) {
	p, err := bucket.ReadObject(ctx, b, key, limit)
	return p, unlessNone(err)
}

// unlessNone makes of an error that says of something that it is there, and no
// whole object, the one of a damaged object.
func unlessNone(err error) error {
	if bucket.IsDamage(err) && !errors.Is(err, bucket.ErrNotFound) {
		return fmt.Errorf("%w: %w (convert the image again to heal it)", ErrObjectCorrupt, err)
	}
	return err
}

// promised is unlessNone for what a statement or a name promises: that it is not
// there is damage too.
func promised(err error) error {
	if errors.Is(err, bucket.ErrNotFound) {
		return fmt.Errorf("%w: %w (convert the image again to heal it)", ErrObjectCorrupt, err)
	}
	return err
}

// readVerified reads an object whose digest is known.
func readVerified(ctx context.Context, b bucket.Bucket, key string, want chunk.Digest, limit int64) ([]byte, error) {
	p, err := readObject(ctx, b, key, limit)
	if err != nil {
		return nil, err
	}
	if got := chunk.Sum(p); got != want {
		return nil, damagedObject(key, want, got)
	}
	return p, nil
}

// copyObject writes an object to w and fails at the end when its bytes are not
// those of want.
func copyObject(ctx context.Context, w io.Writer, b bucket.Bucket, obj bucket.Object, want chunk.Digest) error {
	hash := sha256.New()
	buf := make([]byte, min(copyStep, obj.Size))
	for off := int64(0); off < obj.Size; {
		p := buf[:min(int64(len(buf)), obj.Size-off)]
		if err := b.ReadAt(ctx, obj.Key, p, off); err != nil {
			return unlessNone(fmt.Errorf("read %s at %d: %w", obj.Key, off, err))
		}
		hash.Write(p)
		if _, err := w.Write(p); err != nil {
			return err
		}
		off += int64(len(p))
	}
	if got := chunk.Digest(hash.Sum(nil)); got != want {
		return damagedObject(obj.Key, want, got)
	}
	return nil
}

// serveBootstrap reads the object twice: once to verify it, so that damage is
// an error and not a broken download, once to send it. Bootstraps are too large
// to hold in memory for every client.
func (h *Handler) serveBootstrap(ctx context.Context, w *response, r *http.Request, d chunk.Digest) error {
	key := image.BootstrapKey(d)
	obj, err := h.cfg.Bucket.Stat(ctx, key)
	if err != nil {
		return unlessNone(fmt.Errorf("bootstrap %s: %w", d, err))
	}
	if obj.Size > rafs.MaxBootstrap {
		return fmt.Errorf("%w: %s has %d bytes, a bootstrap has at most %d", ErrObjectCorrupt, key, obj.Size, int64(rafs.MaxBootstrap))
	}
	w.Header().Set("Vary", "Accept-Encoding")
	compress := acceptsZstd(r.Header.Values("Accept-Encoding"))
	tag := `"` + d.String() + `"`
	if compress {
		tag = `"` + d.String() + `+zstd"`
	}
	if immutable(w, r, tag) {
		return nil
	}
	leave, err := h.reads.Enter(ctx, bulkReads)
	if err != nil {
		return err
	}
	defer leave()
	if err := copyObject(ctx, io.Discard, h.cfg.Bucket, obj, d); err != nil {
		return err
	}
	w.Header().Set("Content-Type", TypeBytes)
	if !compress {
		w.Header().Set("Content-Length", strconv.FormatInt(obj.Size, 10))
		return copyObject(ctx, w, h.cfg.Bucket, obj, d)
	}
	w.Header().Set("Content-Encoding", "zstd")
	return compressObject(ctx, w, h.cfg.Bucket, obj, d)
}

func (h *Handler) serveConfig(ctx context.Context, w *response, r *http.Request, d chunk.Digest) error {
	p, err := readVerified(ctx, h.cfg.Bucket, image.ConfigKey(d), d, image.MaxConfig)
	if err != nil {
		return err
	}
	if immutable(w, r, `"`+d.String()+`"`) {
		return nil
	}
	w.Header().Set("Content-Type", "application/vnd.oci.image.config.v1+json")
	return writeBytes(w, p)
}

// immutable sets the headers of an answer that never changes, and answers 304
// when the client has it already.
func immutable(w *response, r *http.Request, tag string) bool {
	w.Header().Set("ETag", tag)
	w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	for _, list := range r.Header.Values("If-None-Match") {
		for t := range strings.SplitSeq(list, ",") {
			if t = strings.TrimPrefix(strings.TrimSpace(t), "W/"); t == tag || t == "*" {
				w.WriteHeader(http.StatusNotModified)
				return true
			}
		}
	}
	return false
}

func writeBytes(w http.ResponseWriter, p []byte) error {
	w.Header().Set("Content-Length", strconv.Itoa(len(p)))
	_, err := w.Write(p)
	return err
}

// acceptsZstd reads Accept-Encoding: zstd must be named, and not with q=0.
func acceptsZstd(headers []string) bool {
	for _, list := range headers {
		for item := range strings.SplitSeq(list, ",") {
			coding, params, _ := strings.Cut(item, ";")
			if !strings.EqualFold(strings.TrimSpace(coding), "zstd") {
				continue
			}
			q, ok := strings.CutPrefix(strings.ReplaceAll(params, " ", ""), "q=")
			weight, err := strconv.ParseFloat(q, 64)
			return !ok || (err == nil && weight > 0)
		}
	}
	return false
}
