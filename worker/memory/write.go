package memory

import (
	"context"
	"errors"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// errEnough says that a write was ended because it had done what was wanted.
var errEnough = errors.New("enough")

// poll is how often it is looked whether a reclaim has done enough. The kernel swaps
// a few MiB within it.
const poll = 3 * time.Millisecond

// write writes a value whose effect takes time and which the kernel ends early when a
// signal comes: when ctx ends, or with errEnough when enough says so.
func write(ctx context.Context, path, value string, enough func() bool) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	why := make(chan error, 1)    // why the write is to end
	thread := make(chan int, 1)   // who is in it
	result := make(chan error, 1) // how it ended
	fd := int(f.Fd())
	go func() { result <- writeOn(fd, value, thread, why) }() // ends with the write, which is waited for
	tid := <-thread
	tick := time.NewTicker(poll)
	defer tick.Stop()
	ending := false
	for {
		select {
		case err := <-result:
			return err
		case <-tick.C:
		}
		if !ending && ctx.Err() != nil {
			why <- context.Cause(ctx)
			ending = true
		} else if !ending && enough() {
			why <- errEnough
			ending = true
		}
		if ending {
			// SIGURG is what Go's runtime interrupts its own threads with; one that it did
			// not ask for does nothing. It is sent until the write has ended, as one that
			// came before the write began is lost.
			unix.Tgkill(os.Getpid(), tid, unix.SIGURG)
		}
	}
}

// writeOn writes on a thread of its own, so that the signal reaches nobody else.
func writeOn(fd int, value string, thread chan<- int, why <-chan error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	thread <- unix.Gettid()
	for {
		_, err := unix.Write(fd, []byte(value))
		if err != unix.EINTR {
			return err
		}
		select {
		case err := <-why:
			return err
		default: // the runtime's own signal: go on
		}
	}
}
