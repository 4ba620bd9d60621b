package attach

import (
	"fmt"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// descriptorFolder lists the calling thread's descriptors: they are not its
// process's once it has unshared them.
const descriptorFolder = "/proc/thread-self/fd"

// isolated runs fn on a thread that ends with it and shares no descriptor with
// the rest of the process; fn may use descriptors it opened itself, through
// package unix only.
//
// A thread in a system call on the served file waits for an answer of this very
// process. Killed then, it would keep /dev/fuse open while it waits for what
// only closing /dev/fuse brings: EIO. Without a descriptor of it, the kill
// closes /dev/fuse at once, the call fails and the thread goes. Nor does it
// keep the folder's lock, a socket or a pipe whose other end waits for the end.
func isolated(fn func() error) error {
	result := make(chan error, 1)
	go func() { // ends with fn
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// Go never ends the main thread, and /proc/<pid>/fd shows its table.
			// While it is locked here, another thread is found.
			result <- isolated(fn)
			runtime.UnlockOSThread()
			return
		}
		// Never unlocked from here on: the thread must not be used again.
		if err := unix.Unshare(unix.CLONE_FILES); err != nil {
			result <- fmt.Errorf("unshare descriptors: %w", err)
			return
		}
		if err := closeInherited(); err != nil {
			result <- fmt.Errorf("close inherited descriptors: %w", err)
			return
		}
		result <- fn()
	}()
	return <-result
}

// closeInherited closes the thread's descriptors but for stderr, where Go's
// runtime reports what kills it, and those the runtime waits for events with:
// the garbage collector and timers use them on whichever thread they run, and
// end the process when they are gone. The kernel's event queue does not keep
// what it watches open.
func closeInherited() error {
	dir, err := unix.Open(descriptorFolder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", descriptorFolder, err)
	}
	defer unix.Close(dir)
	var fds []int
	buf := make([]byte, 4096)
	for {
		n, err := unix.ReadDirent(dir, buf)
		if err != nil {
			return fmt.Errorf("list %s: %w", descriptorFolder, err)
		}
		if n == 0 {
			break
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			if fd, err := strconv.Atoi(name); err == nil && fd != unix.Stderr && fd != dir {
				fds = append(fds, fd)
			}
		}
	}
	link := make([]byte, 64) // a longer target is cut, and not one of the two
	for _, fd := range fds {
		n, err := unix.Readlinkat(dir, strconv.Itoa(fd), link)
		if err != nil {
			return fmt.Errorf("read %s/%d: %w", descriptorFolder, fd, err)
		}
		switch string(link[:n]) {
		case "anon_inode:[eventpoll]", "anon_inode:[eventfd]":
		default:
			unix.Close(fd)
		}
	}
	return nil
}
