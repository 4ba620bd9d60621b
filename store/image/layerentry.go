package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"

	"quarry/rafs"
	"quarry/store/chunk"
)

const (
	// minEntry is what the smallest entry takes: type, shared and own length of
	// the name, mode, uid, gid, two parts of mtime and the number of xattrs.
	minEntry = 9
	// minXattr is what the smallest xattr takes: two lengths.
	minXattr = 2
	// maxXattrs bounds the xattrs of one entry; Linux lists at most 64 KiB of
	// names.
	maxXattrs = 64 << 10
	// maxFile bounds a file's length so that its chunks can be counted in int64.
	maxFile = 1 << 60

	maxMode = 0o7777
	maxNsec = 999_999_999
)

// validate checks that e is an entry that has only what its type has, so that
// the fields which are not encoded are not lost.
func (e *Entry) validate(chunkSize uint32) error {
	rest := *e
	switch e.Type {
	case TypeReg:
		if e.Size < 0 || e.Size > maxFile || int64(len(e.Chunks)) != chunk.Count(e.Size, int64(chunkSize)) {
			return fmt.Errorf("%w: %d bytes and %d chunks do not go together", ErrMalformed, e.Size, len(e.Chunks))
		}
		rest.Size, rest.Chunks = 0, nil
	case TypeLink, TypeSymlink:
		rest.Link = ""
	case TypeChar, TypeBlock:
		rest.Major, rest.Minor = 0, 0
	case TypeDir, TypeFIFO:
	default:
		return fmt.Errorf("%w: unknown type %q", ErrMalformed, e.Type)
	}
	if rest.Size != 0 || len(rest.Chunks) != 0 || rest.Link != "" || rest.Major != 0 || rest.Minor != 0 {
		return fmt.Errorf("%w: it has a size, chunks, a link or a device number, which type %q has not", ErrMalformed, e.Type)
	}
	if e.Mode > maxMode || e.MtimeNsec > maxNsec {
		return fmt.Errorf("%w: mode %#o or %d ns is out of range", ErrMalformed, e.Mode, e.MtimeNsec)
	}
	if len(e.Xattrs) > maxXattrs {
		return fmt.Errorf("%w: %d xattrs, at most %d", ErrMalformed, len(e.Xattrs), maxXattrs)
	}
	longest := max(len(e.Name), len(e.Link))
	for _, x := range e.Xattrs {
		longest = max(longest, len(x.Name), len(x.Value))
	}
	if longest > MaxText {
		return fmt.Errorf("%w: a name, link or xattr has %d bytes, at most %d", ErrMalformed, longest, MaxText)
	}
	return nil
}

// append appends the encoding of e, whose name is written as what it does not
// share with the previous entry's.
func (e *Entry) append(b []byte, previous string) []byte {
	shared := sharedPrefix(previous, e.Name)
	b = append(b, e.Type)
	b = binary.AppendUvarint(b, uint64(shared))
	b = appendText(b, e.Name[shared:])
	b = binary.AppendUvarint(b, uint64(e.Mode))
	b = binary.AppendUvarint(b, uint64(e.UID))
	b = binary.AppendUvarint(b, uint64(e.GID))
	b = binary.AppendVarint(b, e.Mtime)
	b = binary.AppendUvarint(b, uint64(e.MtimeNsec))
	b = binary.AppendUvarint(b, uint64(len(e.Xattrs)))
	for _, x := range e.Xattrs {
		b = appendText(b, x.Name)
		b = appendText(b, x.Value)
	}
	switch e.Type {
	case TypeReg:
		b = binary.AppendUvarint(b, uint64(e.Size))
		for i := range e.Chunks {
			b = append(b, e.Chunks[i][:]...)
		}
	case TypeLink, TypeSymlink:
		b = appendText(b, e.Link)
	case TypeChar, TypeBlock:
		b = binary.AppendUvarint(b, uint64(e.Major))
		b = binary.AppendUvarint(b, uint64(e.Minor))
	}
	return b
}

func sharedPrefix(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

func appendText[T string | []byte](b []byte, text T) []byte {
	b = binary.AppendUvarint(b, uint64(len(text)))
	return append(b, text...)
}

// entryReader takes entries off the front of b. Its first error stays, and from
// then on every method returns zero.
type entryReader struct {
	b         []byte
	size      int // of the whole body, to say where an error is
	chunkSize int64
	name      []byte // scratch
	err       error
}

func (r *entryReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: at %d: %s", ErrMalformed, r.size-len(r.b), fmt.Sprintf(format, args...))
	}
}

func (r *entryReader) entry(e *Entry, previous string) {
	if p := r.bytes(1); len(p) == 1 {
		e.Type = p[0]
	}
	shared := r.uint(uint64(len(previous)))
	r.name = append(append(r.name[:0], previous[:shared]...), r.bytes(r.uint(MaxText-shared))...)
	e.Name = string(r.name)
	e.Mode = uint32(r.uint(maxMode))
	e.UID = uint32(r.uint(math.MaxUint32))
	e.GID = uint32(r.uint(math.MaxUint32))
	e.Mtime = r.int()
	e.MtimeNsec = uint32(r.uint(maxNsec))
	if n := r.count(maxXattrs, minXattr); n > 0 {
		e.Xattrs = make([]rafs.Xattr, n)
	}
	for i := range e.Xattrs {
		e.Xattrs[i] = rafs.Xattr{Name: r.text(), Value: bytes.Clone(r.bytes(r.uint(MaxText)))}
	}
	switch e.Type {
	case TypeReg:
		e.Size = int64(r.uint(maxFile))
		e.Chunks = r.digests(chunk.Count(e.Size, r.chunkSize))
	case TypeLink, TypeSymlink:
		e.Link = r.text()
	case TypeChar, TypeBlock:
		e.Major = uint32(r.uint(math.MaxUint32))
		e.Minor = uint32(r.uint(math.MaxUint32))
	}
}

// uint takes an unsigned varint of at most limit.
func (r *entryReader) uint(limit uint64) uint64 {
	if r.err != nil {
		return 0
	}
	v, n := binary.Uvarint(r.b)
	if n <= 0 || v > limit {
		r.fail("want a number of at most %d", limit)
		return 0
	}
	r.b = r.b[n:]
	return v
}

// int takes a signed varint.
func (r *entryReader) int() int64 {
	if r.err != nil {
		return 0
	}
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.fail("want a signed number")
		return 0
	}
	r.b = r.b[n:]
	return v
}

// count takes how many things of at least size bytes follow: no more than fit
// into what is left, so that a made-up count allocates nothing.
func (r *entryReader) count(limit, size int) int {
	return int(r.uint(uint64(min(limit, len(r.b)/size))))
}

func (r *entryReader) bytes(n uint64) []byte {
	if r.err == nil && n > uint64(len(r.b)) {
		r.fail("want %d bytes, %d are left", n, len(r.b))
	}
	if r.err != nil {
		return nil
	}
	p := r.b[:n]
	r.b = r.b[n:]
	return p
}

func (r *entryReader) text() string { return string(r.bytes(r.uint(MaxText))) }

func (r *entryReader) digests(n int64) []chunk.Digest {
	if n > int64(len(r.b)/sha256.Size) {
		r.fail("want %d chunk digests, %d bytes are left", n, len(r.b))
	}
	if r.err != nil || n == 0 {
		return nil
	}
	ds := make([]chunk.Digest, n)
	for i := range ds {
		copy(ds[i][:], r.b[i*sha256.Size:])
	}
	r.b = r.b[n*sha256.Size:]
	return ds
}
