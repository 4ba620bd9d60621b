package memory

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Range is a part of a file, in bytes.
type Range struct{ Off, Len int64 }

const (
	// maxRanges bounds a list of ranges. The guest decides how scattered its memory is:
	// a list that is longer is cut to ranges that hold holes too.
	maxRanges = 1 << 16
	// grain is how finely it is asked what is in memory. Reading 64 KiB that is there
	// already takes some 10 µs, asking takes 1 µs.
	grain = 64 << 10
)

// File is a file whose pages come and go: a guest's memory, or a file of an image. Its
// methods may be called by many goroutines at once.
type File struct {
	f     *os.File
	shmem bool
}

// ErrNotMemory says that a descriptor is not of a memory file.
var ErrNotMemory = errors.New("not a memory file")

// OpenMemory opens the memory file of a guest anew, for reading, and leaves the one it
// was given alone: its position is shared with the Sentry. The Sentry is not trusted
// with what it gave. Errors: ErrNotMemory.
func OpenMemory(given *os.File) (*File, error) {
	raw, err := given.SyscallConn()
	if err != nil {
		return nil, err
	}
	var f *os.File
	var inner error
	if err := raw.Control(func(fd uintptr) { f, inner = reopen(int(fd)) }); err != nil {
		return nil, err
	}
	if inner != nil {
		return nil, fmt.Errorf("open a guest's memory: %w", inner)
	}
	return &File{f: f, shmem: true}, nil
}

func reopen(fd int) (*os.File, error) {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &st), unix.Fstatfs(fd, &fs)); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || fs.Type != unix.TMPFS_MAGIC {
		return nil, ErrNotMemory
	}
	// For writing too: the kernel tells what is in memory only to who may write.
	return os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDWR, 0)
}

// OpenImage makes a File of a file of an image. It belongs to the File.
func OpenImage(f *os.File) *File { return &File{f: f} }

// Close closes it. Reads under way are not hurt.
func (f *File) Close() error { return f.f.Close() }

// control calls fn with the descriptor, which stays open meanwhile.
func (f *File) control(fn func(fd int) error) error {
	raw, err := f.f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = fn(int(fd)) })
	return errors.Join(err, inner)
}

// Data lists where the file has content, in memory or in swap. The rest are holes,
// which read as zeros and need no memory. When ctx ends it is a part of that.
func (f *File) Data(ctx context.Context) (out []Range, err error) {
	err = f.control(func(fd int) error {
		for off := int64(0); ; {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			start, err := unix.Seek(fd, off, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("find data from %d: %w", off, err)
			}
			end, err := unix.Seek(fd, start, unix.SEEK_HOLE)
			if err != nil {
				return fmt.Errorf("find the end of data from %d: %w", start, err)
			}
			out = add(out, Range{start, end - start})
			off = end
		}
	})
	return out, err
}

// add appends a range that lies behind all others. It joins what touches, and what
// would make the list too long.
func add(list []Range, r Range) []Range {
	if n := len(list); n > 0 {
		last := &list[n-1]
		if end := last.Off + last.Len; end == r.Off || n >= maxRanges {
			last.Len = r.Off + r.Len - last.Off
			return list
		}
	}
	return append(list, r)
}

// Bytes is how long ranges are together.
func Bytes(list []Range) (n int64) {
	for _, r := range list {
		n += r.Len
	}
	return n
}

// Away lists the parts of a range that are not in memory, to 64 KiB. Where the kernel
// does not tell (before Linux 6.5), it is the whole range.
func (f *File) Away(r Range) []Range {
	return f.find(nil, r, func(s unix.Cachestat_t, pages int64) int64 {
		if f.shmem {
			return int64(s.Evicted)
		}
		return pages - int64(s.Cache)
	})
}

// Present lists the parts of a range that are in memory, to 64 KiB. Where the kernel
// does not tell, there are none.
func (f *File) Present(r Range) []Range {
	if _, err := f.stat(r); err != nil {
		return nil
	}
	return f.find(nil, r, func(s unix.Cachestat_t, _ int64) int64 { return int64(s.Cache) })
}

// find halves a range until all its pages count, or none.
func (f *File) find(out []Range, r Range, count func(unix.Cachestat_t, int64) int64) []Range {
	page := int64(os.Getpagesize())
	s, err := f.stat(r)
	if err != nil {
		return add(out, r)
	}
	pages := (r.Off%page + r.Len + page - 1) / page
	switch n := count(s, pages); {
	case n <= 0:
		return out
	case n >= pages || r.Len <= grain:
		return add(out, r)
	}
	half := (r.Len/2 + grain - 1) &^ (grain - 1)
	out = f.find(out, Range{r.Off, half}, count)
	return f.find(out, Range{r.Off + half, r.Len - half}, count)
}

func (f *File) stat(r Range) (s unix.Cachestat_t, err error) {
	err = f.control(func(fd int) error {
		return unix.Cachestat(uint(fd), &unix.CachestatRange{Off: uint64(r.Off), Len: uint64(r.Len)}, &s, 0)
	})
	return s, err
}
