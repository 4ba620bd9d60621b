package cache

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// FS is the folder of a cache: a file system seam, so that tests can cut the
// power and fail the disk. Safe for concurrent use.
type FS interface {
	// List names the regular files of the folder, with their sizes, in any order.
	List() ([]FileInfo, error)
	// Open opens a file to read and write. Errors: fs.ErrNotExist, without
	// Create.
	Open(name string, flags OpenFlags) (File, error)
	// Remove deletes a file. Errors: fs.ErrNotExist.
	Remove(name string) error
	// Space says how many bytes of the disk are free, and how many it has.
	Space() (free, total int64, err error)
}

// File is an open file of an FS. Nothing written is durable but by Sync. Reads
// may run while it is closed, and end with an error then. Safe for concurrent
// use on disjoint ranges.
type File interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
	// Sync makes the content and, of a created file, the name durable.
	Sync() error
	io.Closer
}

// FileInfo is one file of a folder.
type FileInfo struct {
	Name string
	Size int64
}

// OpenFlags say how to open a file.
type OpenFlags int

const (
	// Create makes the file, empty; one that exists is emptied.
	Create OpenFlags = 1 << iota
	// Direct says that offsets, lengths and memory are whole pages, and that the
	// kernel need not keep what passes.
	Direct
)

// osFS is a folder of the operating system.
type osFS struct {
	dir string
	// buffered says that direct I/O is not wanted or not to be had.
	buffered atomic.Bool
	keep     bool // Config.KeepPages
}

var _ FS = (*osFS)(nil)

func newOSFS(dir string, buffered, keep bool) (*osFS, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f := &osFS{dir: dir, keep: keep}
	f.buffered.Store(buffered)
	return f, nil
}

func (o *osFS) List() ([]FileInfo, error) {
	entries, err := os.ReadDir(o.dir)
	if err != nil {
		return nil, err
	}
	var files []FileInfo
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		st, err := e.Info()
		if err != nil {
			return nil, err
		}
		files = append(files, FileInfo{e.Name(), st.Size()})
	}
	return files, nil
}

func (o *osFS) Open(name string, flags OpenFlags) (File, error) {
	mode := os.O_RDWR
	if flags&Create != 0 {
		mode |= os.O_CREATE | os.O_TRUNC
	}
	path := filepath.Join(o.dir, name)
	if flags&Direct == 0 || o.keep {
		f, err := os.OpenFile(path, mode, 0o600)
		if err != nil {
			return nil, err
		}
		return &osFile{File: f, dir: o.dir}, nil
	}
	if !o.buffered.Load() {
		f, err := os.OpenFile(path, mode|unix.O_DIRECT, 0o600)
		if err == nil {
			return &osFile{File: f, dir: o.dir, fs: o}, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			return nil, err
		}
		o.buffered.Store(true)
	}
	f, err := os.OpenFile(path, mode, 0o600)
	if err != nil {
		return nil, err
	}
	g := &osFile{File: f, dir: o.dir, fs: o}
	g.control(func(fd int) error { return unix.Fadvise(fd, 0, 0, unix.FADV_RANDOM) }) // no read-ahead
	return g, nil
}

func (o *osFS) Remove(name string) error { return os.Remove(filepath.Join(o.dir, name)) }

func (o *osFS) Space() (free, total int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(o.dir, &st); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: o.dir, Err: err}
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}

// osFile is a file of an osFS; fs is set for those whose pages the kernel need
// not keep.
type osFile struct {
	*os.File
	dir string
	fs  *osFS
}

func (f *osFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	if f.goBuffered(err) {
		n, err = f.File.ReadAt(p, off)
	}
	if n > 0 && f.fs != nil && f.fs.buffered.Load() {
		f.forget(off, int64(n), false)
	}
	return n, err
}

func (f *osFile) WriteAt(p []byte, off int64) (int, error) {
	n, err := f.File.WriteAt(p, off)
	if f.goBuffered(err) {
		n, err = f.File.WriteAt(p, off)
	}
	if n > 0 && f.fs != nil && f.fs.buffered.Load() {
		f.forget(off, int64(n), true)
	}
	return n, err
}

// goBuffered turns direct I/O off for this file when err says that the file
// system has none, although it let the file be opened.
func (f *osFile) goBuffered(err error) bool {
	if f.fs == nil || !errors.Is(err, unix.EINVAL) {
		return false
	}
	f.fs.buffered.Store(true)
	return f.control(func(fd int) error {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err != nil || flags&unix.O_DIRECT == 0 {
			return errors.Join(err, unix.EINVAL)
		}
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags&^unix.O_DIRECT)
		return err
	}) == nil
}

// forget asks the kernel not to keep a range. Pages that wait to be written are
// written first, or they would stay.
func (f *osFile) forget(off, n int64, dirty bool) {
	f.control(func(fd int) error {
		if dirty {
			const flags = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
			if err := unix.SyncFileRange(fd, off, n, flags); err != nil {
				return err
			}
		}
		return unix.Fadvise(fd, off, n, unix.FADV_DONTNEED)
	})
}

func (f *osFile) control(do func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var derr error
	if err := raw.Control(func(fd uintptr) { derr = do(int(fd)) }); err != nil {
		return err
	}
	return derr
}

func (f *osFile) Sync() error {
	if err := f.File.Sync(); err != nil {
		return err
	}
	d, err := os.Open(f.dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
