package guest_test

import "golang.org/x/sys/unix"

// swap exchanges two names in one step.
func swap(a, b string) {
	_ = unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}
