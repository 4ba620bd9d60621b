package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"

	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

// unpacker turns a tar stream into entries, and file content into chunks.
type unpacker struct {
	putter    store.Putter
	chunkSize int64
	limits    Limits
	buf       []byte // one chunk
	zero      *chunk.Digest

	entries  []image.Entry
	fileSum  int64 // lengths of all files
	metadata int64 // bytes of names, links and xattrs
}

// run reads r to its end. The tar reader stops at the end marker; what follows
// must be zeros, and is read so that the diffID covers it.
func (u *unpacker) run(ctx context.Context, r io.Reader) error {
	tr := tar.NewReader(r)
	last := "" // what the next error came after
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("tar header after %s: %w", orStart(last), explain(err))
		}
		last = fmt.Sprintf("entry %q", h.Name)
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue // speaks of all later entries, as a comment or a default, and docker and containerd ignore it
		}
		if err := u.add(ctx, tr, h); err != nil {
			return fmt.Errorf("%s: %w", last, err)
		}
	}
	if err := drainZeros(r); err != nil {
		return fmt.Errorf("after the tar's end marker: %w", err)
	}
	return nil
}

func orStart(last string) string {
	if last == "" {
		return "the start"
	}
	return last
}

// explain says what archive/tar's bare errors mean in a layer.
func explain(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("layer is truncated: %w", err)
	case errors.Is(err, tar.ErrHeader):
		// Also what a lone zero block with more entries after it gives; going on
		// would shorten the tree in silence.
		return fmt.Errorf("%w (damaged, out of range, or an end marker with entries after it)", err)
	}
	return err
}

func (u *unpacker) add(ctx context.Context, r io.Reader, h *tar.Header) error {
	if len(u.entries) >= u.limits.MaxEntries {
		return fmt.Errorf("layer has more than %d entries (limit MaxEntries)", u.limits.MaxEntries)
	}
	e, err := normalise(h)
	if err != nil {
		return err
	}
	u.metadata += metadataSize(&e)
	if u.metadata > u.limits.MaxMetadata {
		return fmt.Errorf("names, links and xattrs of the layer exceed %d bytes (limit MaxMetadata)", u.limits.MaxMetadata)
	}
	if e.Type == image.TypeReg {
		if e.Size > u.limits.MaxBytes-u.fileSum {
			return fmt.Errorf("file of %d bytes: files of the layer exceed %d bytes (limit MaxBytes)", e.Size, u.limits.MaxBytes)
		}
		u.fileSum += e.Size
		if e.Chunks, err = u.split(ctx, r, e.Size); err != nil {
			return err
		}
	}
	u.entries = append(u.entries, e)
	return nil
}

func metadataSize(e *image.Entry) int64 {
	n := len(e.Name) + len(e.Link)
	for _, x := range e.Xattrs {
		n += len(x.Name) + len(x.Value)
	}
	return int64(n)
}

// split puts the chunks of a file of the given length and returns their
// digests. The length is a claim of the header: memory grows only with bytes
// that are really there, or with the holes that MaxBytes has let through.
func (u *unpacker) split(ctx context.Context, r io.Reader, size int64) ([]chunk.Digest, error) {
	if size == 0 {
		return nil, nil
	}
	count := chunk.Count(size, u.chunkSize)
	digests := make([]chunk.Digest, 0, min(count, 1024))
	for k := range count {
		p := u.buf[:chunk.Len(k, size, u.chunkSize)]
		if n, err := io.ReadFull(r, p); err != nil {
			return nil, fmt.Errorf("content at %d of %d: %w", k*u.chunkSize+int64(n), size, explain(noEOF(err)))
		}
		d, err := u.put(ctx, p)
		if err != nil {
			return nil, err
		}
		digests = append(digests, d)
	}
	return digests, nil
}

// put stores one chunk. Whole chunks of zeros, all that most holes consist of,
// are digested and stored once a layer.
func (u *unpacker) put(ctx context.Context, p []byte) (chunk.Digest, error) {
	whole := int64(len(p)) == u.chunkSize && isZero(p)
	if whole && u.zero != nil {
		return *u.zero, ctx.Err()
	}
	d, err := u.putter.Put(ctx, p)
	if err != nil {
		return d, &StoreError{err}
	}
	if whole {
		u.zero = &d
	}
	return d, nil
}

// StoreError is an error of the Putter: not the layer's fault.
type StoreError struct{ Err error }

func (e *StoreError) Error() string { return "store chunk: " + e.Err.Error() }

// Unwrap returns the Putter's error.
func (e *StoreError) Unwrap() error { return e.Err }
