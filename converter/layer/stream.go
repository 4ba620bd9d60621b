package layer

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"

	"quarry/store/chunk"
)

// source counts and digests the compressed bytes, all of them.
type source struct {
	r        io.Reader
	want     Descriptor
	h        hash.Hash
	n        int64
	progress func(int64)
}

func newSource(r io.Reader, want Descriptor, progress func(int64)) *source {
	return &source{r: r, want: want, h: sha256.New(), progress: progress}
}

// Read implements io.Reader. It never reads more than one byte too many.
func (s *source) Read(p []byte) (int, error) {
	room := s.want.Size + 1 - s.n
	if room <= 0 {
		return 0, s.sizeError()
	}
	n, err := s.r.Read(p[:min(int64(len(p)), room)])
	s.h.Write(p[:n])
	s.n += int64(n)
	if s.n > s.want.Size {
		return n, s.sizeError()
	}
	if s.progress != nil && n > 0 {
		s.progress(s.n)
	}
	return n, err
}

func (s *source) sizeError() error {
	return fmt.Errorf("blob is longer than the %d bytes that its descriptor says", s.want.Size)
}

// verify reads what is left and compares size and digest.
func (s *source) verify() error {
	if _, err := io.Copy(io.Discard, s); err != nil {
		return err
	}
	if s.n != s.want.Size {
		return fmt.Errorf("blob has %d bytes, its descriptor says %d", s.n, s.want.Size)
	}
	if got := chunk.Digest(s.h.Sum(nil)); got != s.want.Digest {
		return fmt.Errorf("blob has digest %s", got)
	}
	return nil
}

// sourceBuffer is how much compressed data is read at once.
const sourceBuffer = 256 << 10

// plain is the uncompressed layer. It counts and digests every byte of it.
type plain struct {
	src    *source
	limits Limits
	r      io.ReadCloser // decompressor
	h      hash.Hash
	n      int64
}

func newPlain(src *source, limits Limits) (*plain, error) {
	r, err := decompress(bufio.NewReaderSize(src, sourceBuffer))
	if err != nil {
		return nil, err
	}
	return &plain{src: src, limits: limits, r: r, h: sha256.New()}, nil
}

// Read implements io.Reader.
func (p *plain) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.h.Write(b[:n])
	p.n += int64(n)
	if lerr := p.checkLimits(); lerr != nil {
		return n, lerr
	}
	return n, err
}

func (p *plain) checkLimits() error {
	if p.n > p.limits.MaxBytes {
		return fmt.Errorf("layer expands to more than %d bytes (limit MaxBytes)", p.limits.MaxBytes)
	}
	if p.n > p.limits.RatioFloor && p.n/p.limits.MaxRatio > p.src.n {
		return fmt.Errorf("layer expands %d bytes to more than %d times as many (limit MaxRatio)", p.src.n, p.limits.MaxRatio)
	}
	return nil
}

// Close frees the decompressor.
func (p *plain) Close() error { return p.r.Close() }

func (p *plain) digest() chunk.Digest { return chunk.Digest(p.h.Sum(nil)) }
