package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mincore says for each page of a mapping whether it is in memory. x/sys has
// the number of the call and no function.
func mincore(m, vec []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m[0])), uintptr(len(m)), uintptr(unsafe.Pointer(&vec[0])))
	if errno != 0 {
		return errno
	}
	return nil
}
