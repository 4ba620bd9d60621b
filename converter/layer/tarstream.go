package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
)

// tarStream reads a tar archive entry by entry. archive/tar parses the headers;
// the content is read here, because archive/tar hands holes out as zeros that
// somebody would have to look at, a terabyte of them for an empty disk image.
type tarStream struct {
	r         io.Reader
	maxHeader int64

	n      int64  // bytes read so far
	header []byte // of the current entry: every block before its content
	inside bool   // a header is being read
}

func newTarStream(r io.Reader, limits Limits) *tarStream {
	return &tarStream{r: r, maxHeader: limits.MaxHeader}
}

// Read implements io.Reader, for archive/tar and for content.
func (s *tarStream) Read(p []byte) (int, error) {
	if s.inside {
		if err := s.checkHeader(); err != nil {
			return 0, err
		}
	}
	n, err := s.r.Read(p)
	s.n += int64(n)
	if s.inside {
		s.header = append(s.header, p[:n]...)
	}
	return n, err
}

func (s *tarStream) checkHeader() error {
	if int64(len(s.header)) > s.maxHeader {
		return fmt.Errorf("headers of one entry exceed %d bytes (limit MaxHeader)", s.maxHeader)
	}
	return nil
}

// next returns the next entry's header and where its content has bytes, or
// io.EOF at the end of the archive.
func (s *tarStream) next() (*tar.Header, []extent, error) {
	if err := s.align(); err != nil {
		return nil, nil, err
	}
	s.header, s.inside = s.header[:0], true
	// A reader an entry: it would otherwise skip the content that was read here.
	h, err := tar.NewReader(s).Next()
	s.inside = false
	if err == nil {
		err = s.checkHeader()
	}
	if errors.Is(err, io.EOF) && !isZero(s.header[:min(tarBlock, len(s.header))]) {
		err = errNoEntry
	}
	if err != nil {
		return nil, nil, err
	}
	// Of a version that nobody knows it has no map; normalise refuses it.
	if sparse, _ := sparsePAX(h.PAXRecords); sparse || h.Typeflag == tar.TypeGNUSparse {
		data, err := sparseMap(h, s.header)
		return h, data, err
	}
	if entryTypes[h.Typeflag] != entryTypes[tar.TypeReg] || h.Size <= 0 {
		return h, nil, nil
	}
	return h, []extent{{0, h.Size}}, nil
}

// errNoEntry says that an entry is lost of which a long name or PAX records are
// there; archive/tar takes that for the end.
var errNoEntry = errors.New("a long name or PAX records come without their entry: the layer is truncated")

// align skips the padding of what was read last. As archive/tar does, it takes
// an archive that ends in the padding for one that ends after it.
func (s *tarStream) align() error {
	var pad [tarBlock]byte
	for rest := -s.n & (tarBlock - 1); rest > 0; rest = -s.n & (tarBlock - 1) {
		if n, err := s.Read(pad[:rest]); n == 0 && err != nil {
			return err
		}
	}
	return nil
}

// extent is a part of a file that has bytes in the archive.
type extent struct{ off, size int64 }

func (e extent) end() int64 { return e.off + e.size }

// content reads a file from its beginning to its end.
type content struct {
	r    io.Reader
	data []extent // what is left of it
	pos  int64
}

// hole reports whether the next n bytes are a hole, and skips them if so.
func (c *content) hole(n int64) bool {
	if len(c.data) > 0 && c.data[0].off < c.pos+n {
		return false
	}
	c.pos += n
	return true
}

// read fills p with the next bytes, zeros where there are holes.
func (c *content) read(p []byte) error {
	for len(p) > 0 {
		if c.hole(int64(len(p))) {
			clear(p)
			return nil
		}
		d := &c.data[0]
		if c.pos < d.off {
			n := d.off - c.pos
			clear(p[:n])
			p = p[n:]
			c.pos += n
		}
		n, err := io.ReadFull(c.r, p[:min(int64(len(p)), d.size)])
		c.pos += int64(n)
		if err != nil {
			return explain(noEOF(err))
		}
		p = p[n:]
		d.off, d.size = d.off+int64(n), d.size-int64(n)
		if d.size == 0 {
			c.data = c.data[1:]
		}
	}
	return nil
}
