// Package swap makes swap areas and switches them on and off, for benches and tests that
// measure what a machine without memory to spare does.
package swap

import (
	"encoding/binary"
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Header is the first page of an area of so many bytes, as mkswap writes it.
func Header(size int64) []byte {
	page := os.Getpagesize()
	b := make([]byte, page)
	binary.NativeEndian.PutUint32(b[1024:], 1)
	binary.NativeEndian.PutUint32(b[1028:], uint32(size/int64(page)-1))
	copy(b[page-10:], "SWAPSPACE2")
	return b
}

// MakeFile makes a file that can be switched on. Where one is already it fails, and
// after an error there is none of it.
func MakeFile(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	if err == nil {
		_, err = f.WriteAt(Header(size), 0)
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// On has the kernel swap to an area.
func On(path string) error { return call("swapon", unix.SYS_SWAPON, path) }

// Off brings back what is in it, and lets go of it.
func Off(path string) error { return call("swapoff", unix.SYS_SWAPOFF, path) }

func call(op string, number uintptr, path string) error {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	if _, _, e := unix.Syscall(number, uintptr(unsafe.Pointer(name)), 0, 0); e != 0 {
		return &os.PathError{Op: op, Path: path, Err: e}
	}
	return nil
}
