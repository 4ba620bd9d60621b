package cache_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"unsafe"

	"quarry/store/cache"
)

const (
	sector = 512
	page   = 4096
)

// memFS is a folder in memory that can lose power, with a disk of bounded size
// whose operations can fail. Of what was not synced, a crash keeps any mixture of
// old and new, of zeros, and of what deleted files left on the disk, sector by
// sector; and of the folder's entries any that changed.
type memFS struct {
	mu     sync.Mutex
	names  map[string]*inode // as programs see them
	synced map[string]*inode // as they are sure to be after a crash
	limit  int64             // bytes of the disk; 0: as many as it takes
	peak   int64             // the most that the files ever took, in pages
	ops    int               // operations so far
	// fail is asked about each operation. For a write that fails it may say how
	// many bytes are written all the same.
	fail func(op, name string, n int) (written int, err error)
	// before, when set, is called before each operation without the lock.
	before func(op, name string)
}

// inode is a file's content; safe is what it was when it was last synced.
type inode struct {
	data, safe []byte
	shared     bool // data is also safe, or another folder's
}

var _ cache.FS = (*memFS)(nil)

func newMemFS() *memFS {
	return &memFS{names: map[string]*inode{}, synced: map[string]*inode{}}
}

// op counts an operation and asks whether it fails; mu is held on return.
func (m *memFS) op(op, name string, n int) (int, error) {
	if m.before != nil {
		m.before(op, name)
	}
	m.mu.Lock()
	m.ops++
	if m.fail == nil {
		return 0, nil
	}
	return m.fail(op, name, n)
}

func (m *memFS) List() ([]cache.FileInfo, error) {
	defer m.mu.Unlock()
	if _, err := m.op("list", "", 0); err != nil {
		return nil, err
	}
	var list []cache.FileInfo
	for name, f := range m.names {
		list = append(list, cache.FileInfo{Name: name, Size: int64(len(f.data))})
	}
	return list, nil
}

func (m *memFS) Open(name string, flags cache.OpenFlags) (cache.File, error) {
	defer m.mu.Unlock()
	op := "open"
	if flags&cache.Create != 0 {
		op = "create"
	}
	applied, err := m.op(op, name, 1)
	if err != nil && applied == 0 {
		return nil, err
	}
	f := m.names[name]
	switch {
	case flags&cache.Create != 0 && f == nil:
		f = &inode{}
		m.names[name] = f
	case flags&cache.Create != 0:
		f.data, f.shared = nil, false
	case f == nil:
		return nil, fs.ErrNotExist
	}
	return &memFile{m: m, name: name, f: f, direct: flags&cache.Direct != 0}, err
}

func (m *memFS) Remove(name string) error {
	defer m.mu.Unlock()
	applied, err := m.op("remove", name, 1)
	if err != nil && applied == 0 {
		return err
	}
	if m.names[name] == nil {
		return fs.ErrNotExist
	}
	delete(m.names, name)
	return err
}

func (m *memFS) Space() (free, total int64, err error) {
	defer m.mu.Unlock()
	if _, err := m.op("space", "", 0); err != nil {
		return 0, 0, err
	}
	if m.limit == 0 {
		return 1 << 40, 1 << 40, nil
	}
	return m.limit - m.size(), m.limit, nil
}

// size is what the files take, in pages; mu is held.
func (m *memFS) size() int64 {
	n := int64(0)
	for _, f := range m.names {
		n += int64(len(f.data)+page-1) / page * page
	}
	return n
}

func (m *memFS) took() (now, peak int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.size(), max(m.peak, m.size())
}

// memFile is an open file of a memFS.
type memFile struct {
	m      *memFS
	name   string
	f      *inode
	direct bool
	closed bool // guarded by m.mu
}

// check holds callers to what File says; m.mu is held.
func (f *memFile) check(p []byte, off int64) error {
	if f.closed {
		return fs.ErrClosed
	}
	if f.direct && (off%page != 0 || len(p)%page != 0 || uintptr(unsafe.Pointer(unsafe.SliceData(p)))%page != 0) {
		return fmt.Errorf("%d bytes at %d are not whole pages: %w", len(p), off, syscall.EINVAL)
	}
	return nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	defer f.m.mu.Unlock()
	if n, err := f.m.op("read", f.name, len(p)); err != nil {
		return n, err
	}
	if err := f.check(p, off); err != nil {
		return 0, err
	}
	if off >= int64(len(f.f.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.f.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	defer f.m.mu.Unlock()
	n, err := f.m.op("write", f.name, len(p))
	if err == nil {
		n, err = len(p), f.check(p, off)
	}
	if err != nil {
		n = min(n, len(p))
	}
	if f.f.shared {
		f.f.data, f.f.shared = bytes.Clone(f.f.data), false
	}
	if end := off + int64(n); n > 0 && end > int64(len(f.f.data)) {
		grows := end - int64(len(f.f.data))
		if f.m.limit > 0 && f.m.size()+grows > f.m.limit {
			return 0, syscall.ENOSPC
		}
		have := len(f.f.data)
		f.f.data = slices.Grow(f.f.data, int(grows))[:end]
		clear(f.f.data[have:])
		f.m.peak = max(f.m.peak, f.m.size())
	}
	copy(f.f.data[min(off, int64(len(f.f.data))):], p[:n])
	return n, err
}

func (f *memFile) Truncate(size int64) error {
	defer f.m.mu.Unlock()
	applied, err := f.m.op("truncate", f.name, 1)
	if err != nil && applied == 0 {
		return err
	}
	f.f.data = append(bytes.Clone(f.f.data), make([]byte, max(size-int64(len(f.f.data)), 0))...)[:size]
	f.f.shared = false
	return err
}

func (f *memFile) Sync() error {
	defer f.m.mu.Unlock()
	if _, err := f.m.op("sync", f.name, 0); err != nil {
		return err
	}
	f.f.safe = bytes.Clone(f.f.data)
	if f.m.names[f.name] == f.f {
		f.m.synced[f.name] = f.f
	}
	return nil
}

func (f *memFile) Close() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.closed {
		return errors.New("closed twice")
	}
	f.closed = true
	return nil
}

// clone returns a folder with the same files.
func (m *memFS) clone() *memFS {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := newMemFS()
	for name, f := range m.names {
		f.shared = true
		g := &inode{f.data, f.data, true}
		c.names[name], c.synced[name] = g, g
	}
	return c
}

// crash returns what a power cut may leave of the folder now.
func (m *memFS) crash(rnd *rand.Rand) *memFS {
	m.mu.Lock()
	defer m.mu.Unlock()
	left := newMemFS()
	names := slices.AppendSeq(slices.Collect(maps.Keys(m.names)), maps.Keys(m.synced))
	slices.Sort(names)
	junk := m.junk()
	for _, name := range slices.Compact(names) {
		f := m.names[name]
		if old := m.synced[name]; old != f && rnd.IntN(4) == 0 {
			f = old
		}
		if f == nil {
			continue
		}
		data := f.crash(rnd, junk)
		g := &inode{data, data, true}
		left.names[name], left.synced[name] = g, g
	}
	return left
}

// junk is what may stand in a sector that a file got and did not write: what
// other files had in it.
func (m *memFS) junk() []byte {
	var b []byte
	for _, name := range slices.Sorted(maps.Keys(m.names)) {
		b = append(b, m.names[name].data[:min(len(m.names[name].data), 64*sector)]...)
	}
	return append(b, make([]byte, sector)...)
}

// crash returns what may be left of the content.
func (f *inode) crash(rnd *rand.Rand, junk []byte) []byte {
	size := len(f.data)
	switch rnd.IntN(6) {
	case 0:
		size = len(f.safe)
	case 1:
		size = min(size, len(f.safe)) + rnd.IntN(max(size, len(f.safe))-min(size, len(f.safe))+1)
	}
	data := append(bytes.Clone(f.data), make([]byte, max(size-len(f.data), 0))...)[:size]
	calm := rnd.IntN(2) == 0 // half of the files lose little
	for off := 0; off < size; off += sector {
		end := min(off+sector, size)
		now, old := data[off:end], piece(f.safe, off, end)
		if bytes.Equal(now, old) || calm && rnd.IntN(64) != 0 {
			continue
		}
		switch rnd.IntN(5) {
		case 0:
			copy(now, old)
		case 1:
			clear(now)
		case 2:
			copy(now, junk[rnd.IntN(len(junk)/sector)*sector:])
		}
	}
	return data
}

// piece returns bytes [off, end) of b, zeros behind its end.
func piece(b []byte, off, end int) []byte {
	p := make([]byte, end-off)
	if off < len(b) {
		copy(p, b[off:])
	}
	return p
}
