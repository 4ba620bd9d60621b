package layer

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"quarry/internal/inflate"
)

// maxZstdWindow is the largest zstd window taken: what zstd --ultra --long=27
// writes, and zstd -d accepts without being told.
const maxZstdWindow = 128 << 20

// foreignMagics name the compressions that are recognised but not read.
var foreignMagics = []struct{ name, magic string }{
	{"xz", "\xfd7zXZ\x00"},
	{"bzip2", "BZh"},
	{"lz4", "\x04\x22\x4d\x18"},
	{"lzip", "LZIP"},
	{"zip", "PK\x03\x04"},
}

// decompress decides by the first bytes, never by the media type, which lies
// often enough: labels do not change what a layer is, and the diffID proves it.
func decompress(r *bufio.Reader) (io.ReadCloser, error) {
	head, err := r.Peek(tarBlock)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case len(head) == 0 || isTarHeader(head):
		// Before the magics: a tar's first name may begin with any bytes.
		return io.NopCloser(r), nil
	case bytes.HasPrefix(head, []byte("\x1f\x8b")):
		return newGunzip(r)
	case isZstd(head):
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxZstdWindow))
		if err != nil {
			return nil, fmt.Errorf("zstd: %w", err)
		}
		return unzstd{d.IOReadCloser()}, nil
	}
	for _, f := range foreignMagics {
		if bytes.HasPrefix(head, []byte(f.magic)) {
			return nil, fmt.Errorf("compression %s is not supported: layers are gzip, zstd or plain tar", f.name)
		}
	}
	if len(head) < tarBlock {
		return nil, fmt.Errorf("layer of %d bytes is neither gzip nor zstd, and too short for a tar archive", len(head))
	}
	return nil, errors.New("layer is neither a tar archive nor gzip nor zstd: its first 512 bytes fit none of them")
}

// isZstd knows frames and, first in a layer as well, skippable frames.
func isZstd(head []byte) bool {
	if len(head) < 4 {
		return false
	}
	return bytes.HasPrefix(head, []byte("\x28\xb5\x2f\xfd")) || head[0]&0xf0 == 0x50 && string(head[1:4]) == "\x2a\x4d\x18"
}

const (
	tarBlock       = 512
	tarChecksum    = 148 // offset of the checksum field
	tarChecksumLen = 8
)

// isTarHeader reports whether b begins with a zero block or a tar header with
// a right checksum.
func isTarHeader(b []byte) bool {
	if len(b) < tarBlock {
		return false
	}
	b = b[:tarBlock]
	if isZero(b) {
		return true
	}
	field := string(bytes.Trim(b[tarChecksum:tarChecksum+tarChecksumLen], " \x00"))
	want, err := strconv.ParseInt(field, 8, 64)
	if err != nil {
		return false
	}
	var unsigned, signed int64 // old writers summed signed bytes
	for i, c := range b {
		if i >= tarChecksum && i < tarChecksum+tarChecksumLen {
			c = ' '
		}
		unsigned += int64(c)
		signed += int64(int8(c))
	}
	return want == unsigned || want == signed
}

// gunzip reads gzip members to the end of the blob. As gzip -d does, it takes
// zeros after the last member for padding, and nothing else. The headers are read
// by the general package, the content by a faster one.
type gunzip struct {
	r    *bufio.Reader
	head *gzip.Reader
	body *inflate.Reader
	sum  uint32 // of the member so far
	n    uint32 // its length, modulo 2³²
	err  error  // the one that ended it, io.EOF too: readers ask again
}

func newGunzip(r *bufio.Reader) (*gunzip, error) {
	head, err := gzip.NewReader(r)
	if err != nil {
		return nil, fmt.Errorf("gzip header: %w", noEOF(err))
	}
	return &gunzip{r: r, head: head, body: inflate.NewReader(r)}, nil
}

func (g *gunzip) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	for {
		n, err := g.body.Read(p)
		g.sum = crc32.Update(g.sum, crc32.IEEETable, p[:n])
		g.n += uint32(n)
		if errors.Is(err, io.EOF) {
			if err = g.endMember(); err == nil {
				err = g.nextMember()
			}
		} else if err != nil {
			err = fmt.Errorf("gzip: %w", err)
		}
		g.err = err
		if n > 0 || err != nil || len(p) == 0 {
			return n, err
		}
	}
}

// endMember compares the checksum and the length that follow a member.
func (g *gunzip) endMember() error {
	var end [8]byte
	if _, err := io.ReadFull(g.r, end[:]); err != nil {
		return fmt.Errorf("gzip: %w", noEOF(err))
	}
	if binary.LittleEndian.Uint32(end[:4]) != g.sum || binary.LittleEndian.Uint32(end[4:]) != g.n {
		return fmt.Errorf("gzip: %w", gzip.ErrChecksum)
	}
	g.sum, g.n = 0, 0
	return nil
}

// nextMember goes on with the member that follows, or returns io.EOF.
func (g *gunzip) nextMember() error {
	next, err := g.r.Peek(1)
	if err != nil {
		return err
	}
	if next[0] != 0 {
		if err := g.head.Reset(g.r); err != nil {
			return fmt.Errorf("after a gzip member comes neither another nor the end: %w", noEOF(err))
		}
		g.body.Reset(g.r)
		return nil
	}
	if err := drainZeros(g.r); err != nil {
		return fmt.Errorf("after the last gzip member: %w", err)
	}
	return io.EOF
}

func (g *gunzip) Close() error { return g.head.Close() }

// unzstd says which format an error is about.
type unzstd struct{ io.ReadCloser }

func (u unzstd) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("zstd: %w", err)
	}
	return n, err
}

// drainZeros reads r to its end and fails on a byte that is not zero.
func drainZeros(r io.Reader) error {
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if !isZero(buf[:n]) {
			return errTrailing
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// errTrailing says that bytes follow the end that no reader looks at: a place
// for content that the digest covers and the tree lacks.
var errTrailing = errors.New("bytes other than zeros follow the end")

var zeros [64 << 10]byte

// isZero reports whether b is all zeros; it costs next to nothing when the
// first bytes are not, which decides for most content.
func isZero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), len(zeros))
		if !bytes.Equal(b[:n], zeros[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

// noEOF keeps a short input from looking like a complete one.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Compressed reports whether a blob is compressed in a way that Decompress
// knows; head is its first 512 bytes, or all of it.
func Compressed(head []byte) bool {
	return !isTarHeader(head) && (bytes.HasPrefix(head, []byte("\x1f\x8b")) || isZstd(head))
}

// Decompress returns the plain bytes of a blob of the given size as Read sees
// them: every gzip member and zstd frame, within the limits MaxBytes and
// MaxRatio.
func Decompress(r io.Reader, size int64, limits Limits) (io.ReadCloser, error) {
	return newPlain(newSource(r, Descriptor{Size: size}, nil), limits.withDefaults())
}
