package cache

import (
	"errors"
	"io"
	"sync"
	"unsafe"

	"quarry/store/chunk"
)

// bounceSize is a chunk of the default size and the page that it may begin in
// the middle of; longer reads are done in pieces.
const bounceSize = chunk.DefaultSize + pageSize

// segment is a file of chunks, which only grows until it is deleted as a whole,
// and its sidecar.
type segment struct {
	seq    uint64 // its names; segments are older the lower it is
	number uint32 // in the table

	// Guarded by Cache.mu; only the writer changes them.
	class    class
	age      uint64 // the lower, the sooner it goes: seq, or more when it was spared
	entries  []entry
	dataEnd  int64 // in whole pages
	indexEnd int64
	filling  bool // the writer appends to it

	fmu  sync.Mutex // guards data
	data File       // nil until it is needed, and when it is closed
	gone bool
}

// size is what the segment takes on the disk, or will have taken when it is
// full.
func (s *segment) size(z sizes) int64 {
	if s.filling {
		return z.unit
	}
	return s.dataEnd + align(s.indexEnd)
}

// file returns the open data file.
func (s *segment) file(fs FS) (File, error) {
	s.fmu.Lock()
	defer s.fmu.Unlock()
	if s.data == nil {
		if s.gone {
			return nil, &openError{errClosed}
		}
		f, err := fs.Open(dataName(s.seq), Direct)
		if err != nil {
			return nil, &openError{err}
		}
		s.data = f
	}
	return s.data, nil
}

// openError says that a segment could not be opened: nothing is known about what
// is in it.
type openError struct{ error }

// Unwrap returns the file system's error.
func (e *openError) Unwrap() error { return e.error }

// close closes the data file for good.
func (s *segment) close() {
	s.fmu.Lock()
	defer s.fmu.Unlock()
	if s.data != nil {
		s.data.Close()
	}
	s.data, s.gone = nil, true
}

// readEntry fills p with the bytes at off of a chunk, in whole pages.
func (c *Cache) readEntry(s *segment, e *entry, p []byte, off int64) error {
	f, err := s.file(c.fs)
	if err != nil {
		return err
	}
	if aligned(p) && off%pageSize == 0 && len(p)%pageSize == 0 {
		return readFull(f, p, e.off()+off)
	}
	b := c.buffers.Get().(*[]byte)
	defer c.buffers.Put(b)
	for len(p) > 0 {
		in := off % pageSize
		pages := (*b)[:min(align(in+int64(len(p))), bounceSize)]
		if err := readFull(f, pages, e.off()+off-in); err != nil {
			return err
		}
		n := copy(p, pages[in:])
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// readFull reads all of p; io.EOF says that the file ends before.
func readFull(f File, p []byte, off int64) error {
	n, err := f.ReadAt(p, off)
	if n == len(p) && errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// alignedBuffer returns n bytes that begin with a page, as direct I/O needs.
func alignedBuffer(n int) []byte {
	b := make([]byte, n+pageSize)
	skip := int(-uintptr(unsafe.Pointer(&b[0])) & (pageSize - 1))
	return b[skip : skip+n : skip+n]
}

func aligned(p []byte) bool {
	return len(p) > 0 && uintptr(unsafe.Pointer(&p[0]))%pageSize == 0
}
