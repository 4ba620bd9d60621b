package lab

import (
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Resident says for each page of a file or block device whether it is in the page
// cache. It reads nothing of the content. A file that is served past the page
// cache, and cannot be mapped, has none.
func Resident(path string) (pages []bool, err error) {
	err = mapped(path, func(_ []byte, resident []bool) error {
		pages = resident
		return nil
	})
	return pages, err
}

// mapped maps a file and calls fn with the mapping and which of its pages are in the
// page cache, unless the file is empty or cannot be mapped.
func mapped(path string, fn func(m []byte, resident []bool) error) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil || size == 0 {
		return err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("map %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, unix.Munmap(m)) }()
	page := int64(os.Getpagesize())
	vec := make([]byte, (size+page-1)/page)
	if err := mincore(m, vec); err != nil {
		return fmt.Errorf("mincore %s: %w", path, err)
	}
	resident := make([]bool, len(vec))
	for i, v := range vec {
		resident[i] = v&1 != 0
	}
	return fn(m, resident)
}

// mincore says for each page of a mapping whether it is in memory. x/sys has
// the number of the call and no function.
func mincore(m, vec []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&vec[0])))
	if errno != 0 {
		return errno
	}
	return nil
}
