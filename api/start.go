package api

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/klauspost/compress/zstd"

	"quarry/rafs"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
)

// maxHeld bounds the compressed bootstrap that one start keeps in memory: more
// than most have, and 64 starts at once hold 256 MiB at worst. A larger one is
// compressed a second time while it is sent.
const maxHeld = 4 << 20

// serveStart answers with all that a cold start needs. Everything that can fail
// but the client's connection fails before the first byte, so that it has its
// proper status.
func (h *Handler) serveStart(ctx context.Context, w *response, r *http.Request, rt route) error {
	s, err := h.signed(ctx, rt)
	if err != nil {
		return err
	}
	hinting := accepts(r.Header.Values("Accept"), TypeStart2)
	known := rt.have != nil && *rt.have == image.ID(s.payload)
	if known && !hinting {
		sw := startWriter(w, hinting)
		if err := s.writeTo(sw); err != nil {
			return err
		}
		return sw.Close()
	}
	st, err := image.DecodeStatement(s.payload)
	if err != nil {
		return fmt.Errorf("%w: %s: %w (convert the image again to heal it)", ErrObjectCorrupt, image.StatementKey(s.source, s.platform), err)
	}
	q := hinted{id: image.ID(s.payload), st: st, repo: rt.ref.Repo, chunks: !known}
	if hinting && h.traces.enough(q.id) {
		w.Header().Set(HeaderTrace, TraceEnough)
	}
	if known {
		// Most of the chunks are there too: the list alone is worth its bytes.
		sw := startWriter(w, hinting)
		if err := s.writeTo(sw); err != nil {
			return err
		}
		return h.writeHints(ctx, w, sw, q)
	}
	leave, err := h.reads.Enter(ctx, bulkReads)
	if err != nil {
		return err
	}
	defer leave()
	config, err := readVerified(ctx, h.cfg.Bucket, image.ConfigKey(st.Config), st.Config, image.MaxConfig)
	if err != nil {
		return fmt.Errorf("config of %s: %w", rt.ref, promised(err))
	}
	boot, err := h.prepareBootstrap(ctx, st)
	if err != nil {
		return fmt.Errorf("bootstrap of %s: %w", rt.ref, promised(err))
	}
	sw := startWriter(w, hinting)
	if err := s.writeTo(sw); err != nil {
		return err
	}
	if err := sw.raw(PartConfig, config); err != nil {
		return err
	}
	if err := boot.writeTo(ctx, sw); err != nil {
		return err
	}
	if hinting {
		return h.writeHints(ctx, w, sw, q)
	}
	return sw.Close()
}

// startWriter begins an answer. What a name is may change at any time.
func startWriter(w *response, hinting bool) *StartWriter {
	w.Header().Set("Cache-Control", "no-store")
	if hinting {
		w.Header().Set("Content-Type", TypeStart2)
		return NewStartWriter2(w)
	}
	w.Header().Set("Content-Type", TypeStart)
	return NewStartWriter(w)
}

// accepts reads Accept: a version but the first must be named, whatever its weight.
func accepts(headers []string, media string) bool {
	for _, list := range headers {
		for item := range strings.SplitSeq(list, ",") {
			kind, _, _ := strings.Cut(item, ";")
			if strings.EqualFold(strings.TrimSpace(kind), media) {
				return true
			}
		}
	}
	return false
}

// writeTo writes the envelopes' parts.
func (s *signedImage) writeTo(sw *StartWriter) error {
	if len(s.name) > 0 {
		if err := sw.raw(PartName, s.name); err != nil {
			return err
		}
	}
	return sw.raw(PartImage, s.image)
}

// sendable is a bootstrap that was verified, and how it is best sent.
type sendable struct {
	bucket bucket.Bucket
	obj    bucket.Object
	digest chunk.Digest
	codec  pack.Codec
	size   int64  // as sent
	held   []byte // all of it compressed, or nil when that is not the way or too much to keep
}

// prepareBootstrap returns the bootstrap, read unless it was sent before: once for all
// who start the image now. Reading it outlives a caller who goes away, since others may
// wait for it.
func (h *Handler) prepareBootstrap(ctx context.Context, st image.Statement) (*sendable, error) {
	known := func() *sendable {
		if s := h.boots.get(st.Bootstrap); s != nil && s.obj.Size == st.BootstrapSize {
			return s
		}
		return nil
	}
	if s := known(); s != nil {
		return s, nil
	}
	done := h.boots.flight.DoChan(fmt.Sprint(st.Bootstrap, st.BootstrapSize), func() (any, error) {
		if s := known(); s != nil { // since it was looked for
			return s, nil
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), blobLoadTimeout)
		defer cancel()
		return h.readBootstrap(ctx, st)
	})
	select {
	case res := <-done:
		if res.Err != nil {
			return nil, res.Err
		}
		return res.Val.(*sendable), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// readBootstrap reads the bootstrap once, to verify it and to learn what it has
// compressed.
func (h *Handler) readBootstrap(ctx context.Context, st image.Statement) (*sendable, error) {
	key := image.BootstrapKey(st.Bootstrap)
	obj, err := h.cfg.Bucket.Stat(ctx, key)
	if err != nil {
		return nil, unlessNone(fmt.Errorf("read %s: %w", key, err))
	}
	if obj.Size != st.BootstrapSize || obj.Size > rafs.MaxBootstrap {
		return nil, fmt.Errorf("%w: %s has %d bytes, the image statement says %d and at most %d are allowed",
			ErrObjectCorrupt, key, obj.Size, st.BootstrapSize, int64(rafs.MaxBootstrap))
	}
	var out holder
	if err := compressObject(ctx, &out, h.cfg.Bucket, obj, st.Bootstrap); err != nil {
		return nil, err
	}
	s := &sendable{bucket: h.cfg.Bucket, obj: obj, digest: st.Bootstrap, codec: pack.Zstd, size: out.size}
	switch {
	case out.size >= obj.Size:
		s.codec, s.size = pack.Raw, obj.Size
	case out.size <= maxHeld:
		s.held = bytes.Clone(out.buf.Bytes()) // without the room that the buffer grew by
		h.boots.add(s)
	}
	return s, nil
}

// writeTo sends the bootstrap. Equal bytes compress equally, so the size that
// the header says holds; the writer fails when it does not.
func (s *sendable) writeTo(ctx context.Context, sw *StartWriter) error {
	err := sw.Begin(StartPart{Type: PartBootstrap, Codec: s.codec, Size: s.size, Plain: s.obj.Size})
	switch {
	case err != nil:
	case s.codec == pack.Raw:
		err = copyObject(ctx, sw, s.bucket, s.obj, s.digest)
	case s.held != nil:
		_, err = sw.Write(s.held)
	default:
		err = compressObject(ctx, sw, s.bucket, s.obj, s.digest)
	}
	return err
}

// holder counts what is written to it and keeps the first maxHeld bytes.
type holder struct {
	buf  bytes.Buffer
	size int64
}

func (o *holder) Write(p []byte) (int, error) {
	o.size += int64(len(p))
	o.buf.Write(p[:min(len(p), maxHeld-o.buf.Len())])
	return len(p), nil
}

// compressObject is copyObject through zstd, in one goroutine so that the
// output depends on the input alone.
func compressObject(ctx context.Context, w io.Writer, b bucket.Bucket, obj bucket.Object, want chunk.Digest) error {
	enc, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(BootstrapWindow))
	if err != nil {
		return fmt.Errorf("zstd encoder: %w", err)
	}
	if err := copyObject(ctx, enc, b, obj, want); err != nil {
		return err
	}
	return enc.Close()
}
