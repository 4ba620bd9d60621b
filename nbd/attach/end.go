package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// termGrace is longer than a shim takes to detach a busy mount.
	termGrace = 20 * time.Second
	// killGrace is for the kernel to take a killed process apart.
	killGrace = 5 * time.Second
)

// End ends the process that serves the folder or has begun to, by SIGTERM and,
// when it does not heed that, SIGKILL, and sweeps the folder. It goes by the
// folder's lock alone and signals no process that does not hold it. A folder
// that nobody serves, or none at all, is fine. Errors: ErrInUse when the holder
// cannot be signalled, being this process or of another PID namespace.
func End(ctx context.Context, path string) error {
	dir, err := realFolder(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := endHolders(ctx, dir); err != nil {
		return fmt.Errorf("end attachment at %s: %w", path, err)
	}
	return Sweep(ctx, path)
}

func endHolders(ctx context.Context, dir folder) error {
	giveUp := time.Now().Add(lockPatience)
	for dir.locked() {
		if p, ok := dir.holder(); ok {
			if err := p.end(ctx, dir.lock(), termGrace); err != nil {
				return err
			}
			giveUp = time.Now().Add(lockPatience)
			continue
		}
		// Its record is yet to be written, or it is a sweep, which ends soon.
		if time.Now().After(giveUp) {
			return fmt.Errorf("%w by a process that the lock file does not name", ErrInUse)
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// end ends the process, which has d to heed SIGTERM; nil when it does not hold
// the lock, then or in the end.
func (p process) end(ctx context.Context, lock string, d time.Duration) error {
	if p.pid == os.Getpid() {
		return fmt.Errorf("%w by this process", ErrInUse)
	}
	fd, err := unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", p.pid, err)
	}
	defer unix.Close(fd)
	for _, step := range []struct {
		signal unix.Signal
		grace  time.Duration
	}{{unix.SIGTERM, d}, {unix.SIGKILL, killGrace}} {
		if !p.holds(lock) { // fd is of the process that did: the number is not reused while it does
			return nil
		}
		if err := unix.PidfdSendSignal(fd, step.signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("send %v to process %d: %w", step.signal, p.pid, err)
		}
		if ended, err := waitEnd(ctx, fd, step.grace, func() bool { return !p.holds(lock) }); ended || err != nil {
			return err
		}
	}
	if p.holds(lock) {
		return fmt.Errorf("process %d does not end", p.pid)
	}
	return nil
}

// waitEnd reports whether the process ends within d, reaped or not, or has let
// go: killed with a thread that waits for a read of its own NBD device, it ends
// only when a sweep has disconnected the device.
func waitEnd(ctx context.Context, pidfd int, d time.Duration, letGo func() bool) (bool, error) {
	for end := time.Now().Add(d); ; {
		const sliceMillis = 20 // how late the end of ctx is seen
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, sliceMillis)
		switch {
		case n > 0:
			return true, nil
		case err != nil && !errors.Is(err, unix.EINTR):
			return false, err
		case ctx.Err() != nil:
			return false, ctx.Err()
		case letGo():
			return true, nil
		case time.Now().After(end):
			return false, nil
		}
	}
}
