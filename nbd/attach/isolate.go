package attach

import (
	"fmt"
	"math"
	"runtime"

	"golang.org/x/sys/unix"
)

// isolated runs fn on a thread that ends with it and shares no descriptor with
// the rest of the process; fn may use descriptors it opened itself, through
// package unix only.
//
// A thread in a system call on the served file waits for an answer of this very
// process. Killed then, it would keep /dev/fuse open while it waits for what
// only closing /dev/fuse brings: EIO. Without a descriptor of it, the kill
// closes /dev/fuse at once, the call fails and the thread goes.
func isolated(fn func() error) error {
	result := make(chan error, 1)
	go func() { // ends with fn
		runtime.LockOSThread() // never unlocked: the thread must not be reused
		if err := unix.Unshare(unix.CLONE_FILES); err != nil {
			result <- fmt.Errorf("unshare descriptors: %w", err)
			return
		}
		if err := unix.CloseRange(3, math.MaxInt32, 0); err != nil {
			result <- fmt.Errorf("close inherited descriptors: %w", err)
			return
		}
		result <- fn()
	}()
	return <-result
}
