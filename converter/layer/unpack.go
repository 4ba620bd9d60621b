package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"unsafe"

	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

// unpacker turns a tar stream into entries, and file content into chunks.
type unpacker struct {
	putter    store.Putter
	chunkSize int64
	limits    Limits
	charge    func(bytes int64) error
	buf       []byte // one chunk
	zero      *chunk.Digest

	entries  []image.Entry
	metadata int64 // bytes of names, links and xattrs
	chunks   int64 // of all files, holes included
	put      int64 // bytes of chunks that were looked at
}

// run reads r to its end. The tar reader stops at the end marker; what follows
// must be zeros, and is read so that the diffID covers it.
func (u *unpacker) run(ctx context.Context, r io.Reader) error {
	s := newTarStream(r, u.limits)
	last := "" // what the next error came after
	for {
		h, data, err := s.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("tar header after %s: %w", orStart(last), explain(err))
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue // speaks of all later entries, as a comment or a default, and docker and containerd ignore it
		}
		last = "entry " + image.Quote(h.Name)
		if err := u.add(ctx, s, h, data); err != nil {
			return &image.EntryError{Entry: h.Name, Err: err}
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
	case errors.Is(err, tar.ErrFieldTooLong):
		return fmt.Errorf("%w: a long name or the PAX records of the next entry have more than 1 MiB, the most that is read, whatever MaxHeader is", err)
	case strings.HasSuffix(err.Error(), "sparse map too long"): // archive/tar has no name for it
		return fmt.Errorf("%w: that of the next entry has more than 1 MiB, the most that is read, whatever MaxHeader is", err)
	case errors.Is(err, tar.ErrHeader):
		// Also what a lone zero block with more entries after it gives; going on
		// would shorten the tree in silence.
		return fmt.Errorf("%w (damaged, out of range, or an end marker with entries after it)", err)
	}
	return err
}

func (u *unpacker) add(ctx context.Context, s *tarStream, h *tar.Header, data []extent) error {
	if len(u.entries) >= u.limits.MaxEntries {
		return fmt.Errorf("layer has more than %d entries (limit MaxEntries)", u.limits.MaxEntries)
	}
	if len(h.PAXRecords) > u.limits.MaxRecords {
		return fmt.Errorf("%d PAX records, at most %d are read (limit MaxRecords)", len(h.PAXRecords), u.limits.MaxRecords)
	}
	e, err := normalise(h)
	if err != nil {
		return err
	}
	u.metadata += metadataSize(&e)
	if u.metadata > u.limits.MaxMetadata {
		return fmt.Errorf("names, links and xattrs of the layer exceed %d bytes (limit MaxMetadata)", u.limits.MaxMetadata)
	}
	if e.Type == image.TypeReg && e.Size > 0 {
		if e.Chunks, err = u.split(ctx, s, &content{r: s, data: data}, &e); err != nil {
			return err
		}
	}
	if e.Chunks == nil { // split has not
		if err := u.charge(EntryBytes(&e, 0)); err != nil {
			return err
		}
	}
	u.entries = append(u.entries, e)
	return nil
}

// EntryBytes returns what an entry with so many chunks takes in memory.
func EntryBytes(e *image.Entry, chunks int64) int64 {
	// Strings and slices have their lengths and pointers in the fixed part.
	fixed := int64(unsafe.Sizeof(*e)) + int64(len(e.Xattrs))*int64(unsafe.Sizeof(rafs.Xattr{}))
	return fixed + metadataSize(e) + chunks*int64(len(chunk.Digest{}))
}

func metadataSize(e *image.Entry) int64 {
	n := len(e.Name) + len(e.Link)
	for _, x := range e.Xattrs {
		n += len(x.Name) + len(x.Value)
	}
	return int64(n)
}

// split puts the chunks of the file e, which has a length, and returns their
// digests. The length is a claim of the header: memory grows only with bytes
// that are really there, or with the holes that MaxChunks and charge have let
// through. A chunk in a hole costs its digest and nothing else.
func (u *unpacker) split(ctx context.Context, s *tarStream, c *content, e *image.Entry) ([]chunk.Digest, error) {
	size := e.Size
	if err := u.checkClaim(s, c, size); err != nil {
		return nil, err
	}
	count := chunk.Count(size, u.chunkSize)
	if err := u.charge(EntryBytes(e, count)); err != nil {
		return nil, err
	}
	digests := make([]chunk.Digest, 0, min(count, 1024))
	for k := range count {
		n := chunk.Len(k, size, u.chunkSize)
		whole := n == u.chunkSize
		if whole && u.zero != nil && c.hole(n) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			digests = append(digests, *u.zero)
			continue
		}
		p := u.buf[:n]
		if err := c.read(p); err != nil {
			return nil, fmt.Errorf("content at %d of %d: %w", c.pos, size, err)
		}
		d, err := u.store(ctx, s, p, whole)
		if err != nil {
			return nil, err
		}
		digests = append(digests, d)
	}
	return digests, nil
}

// checkClaim refuses a file that cannot be within the limits before it is read.
func (u *unpacker) checkClaim(s *tarStream, c *content, size int64) error {
	var stored int64
	for _, e := range c.data {
		stored += e.size
	}
	if stored > u.limits.MaxBytes-s.n {
		return fmt.Errorf("file of %d bytes: the layer expands to more than %d bytes (limit MaxBytes)", size, u.limits.MaxBytes)
	}
	if u.chunks += chunk.Count(size, u.chunkSize); u.chunks > u.limits.MaxChunks {
		return fmt.Errorf("file of %d bytes: files of the layer have more than %d chunks of %d bytes (limit MaxChunks)", size, u.limits.MaxChunks, u.chunkSize)
	}
	return nil
}

// store puts one chunk. Whole chunks of zeros, all that most holes consist of,
// are digested and stored once a layer.
func (u *unpacker) store(ctx context.Context, s *tarStream, p []byte, whole bool) (chunk.Digest, error) {
	zero := whole && isZero(p)
	if zero && u.zero != nil {
		return *u.zero, ctx.Err()
	}
	// Bytes scattered over a sparse file make a chunk of each of them.
	u.put += int64(len(p))
	if u.put > u.limits.MaxBytes {
		return chunk.Digest{}, fmt.Errorf("chunks of the layer exceed %d bytes (limit MaxBytes)", u.limits.MaxBytes)
	}
	if u.put > u.limits.RatioFloor && u.put/u.limits.MaxRatio > s.n {
		return chunk.Digest{}, fmt.Errorf("sparse files expand %d bytes to more than %d times as many (limit MaxRatio)", s.n, u.limits.MaxRatio)
	}
	d, err := u.putter.Put(ctx, p)
	if err != nil {
		return d, &StoreError{err}
	}
	if zero {
		u.zero = &d
	}
	return d, nil
}

// StoreError is an error of the Putter: not the layer's fault.
type StoreError struct{ Err error }

func (e *StoreError) Error() string { return "store chunk: " + e.Err.Error() }

// Unwrap returns the Putter's error.
func (e *StoreError) Unwrap() error { return e.Err }
