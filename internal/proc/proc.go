// Package proc holds what processes that work on one folder need of each other:
// locks that end with their holder, an identity that outlives the reuse of a
// pid, and background processes that outlive the command that started them.
package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// poll is how often something is tried again that cannot be waited for.
const poll = 5 * time.Millisecond

// Lock is an flock(2) lock; the kernel drops it when its holder dies.
type Lock struct{ f *os.File }

// ErrLocked says that another process holds the lock.
var ErrLocked = errors.New("locked by another process")

// TryLock takes the lock of a file, which it makes when missing, or returns
// ErrLocked.
func TryLock(path string) (*Lock, error) { return tryLock(path, os.O_RDWR|os.O_CREATE) }

// TryLockExisting is TryLock for a file that must be there: fs.ErrNotExist.
func TryLockExisting(path string) (*Lock, error) { return tryLock(path, os.O_RDWR) }

func tryLock(path string, flags int) (*Lock, error) {
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if l := (&Lock{f}); err == nil && l.Stands() {
		return l, nil
	}
	f.Close()
	if err == nil || errors.Is(err, unix.EWOULDBLOCK) { // nil: the file was removed meanwhile
		return nil, fmt.Errorf("%s: %w", path, ErrLocked)
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// Stands reports whether the lock's file still is what others find at its path. When
// somebody has removed it, another process can hold the lock too, and who sees that
// lets go.
func (l *Lock) Stands() bool {
	held, err := l.f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(l.f.Name())
	return err == nil && os.SameFile(held, named)
}

// TakeLock waits for the lock until ctx ends.
func TakeLock(ctx context.Context, path string) (*Lock, error) {
	for {
		l, err := TryLock(path)
		if !errors.Is(err, ErrLocked) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, ctx.Err())
		case <-time.After(poll):
		}
	}
}

// lookGrace is longer than any look of Locked.
const lookGrace = 100 * time.Millisecond

// TakeFree takes a lock that nobody holds but to look at it: ErrLocked otherwise.
func TakeFree(ctx context.Context, path string) (*Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, lookGrace)
	defer cancel()
	return TakeLock(ctx, path)
}

// Locked reports whether a process holds the lock. It is in the way of TryLock
// for a moment; TakeFree minds that.
func Locked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// File is what the lock is on. A process that inherits it holds the lock too, however
// this one ends, until both have closed it.
func (l *Lock) File() *os.File { return l.f }

// Unlock gives the lock back.
func (l *Lock) Unlock() { l.f.Close() }

// maxHolder bounds what Write takes: one block, which a file system writes whole
// or not at all, and needs no new room for where the file has one.
const maxHolder = 4 << 10

// Write replaces the content of the lock's file, for others to read who holds
// the lock. They read without it, so it is never empty, and never has more than the
// new content and, for a moment, newlines where the old one was longer.
// A write that fails leaves the old content.
func (l *Lock) Write(p []byte) error {
	if len(p) > maxHolder {
		return fmt.Errorf("write %d bytes to %s, at most %d fit: %w", len(p), l.f.Name(), maxHolder, unix.EFBIG)
	}
	st, err := l.f.Stat()
	if err != nil {
		return err
	}
	rest := min(max(st.Size()-int64(len(p)), 0), maxHolder)
	whole := append(slices.Clone(p), bytes.Repeat([]byte("\n"), int(rest))...)
	if _, err := l.f.WriteAt(whole, 0); err != nil {
		return err
	}
	return l.f.Truncate(int64(len(p)))
}

// maxLog is the size above which a log is set aside when its program starts.
const maxLog = 8 << 20

// Start starts a program in a session of its own, so that no terminal signal and
// no end of this process reaches it. Its output goes to the end of the log file,
// but for stdout when that is not nil.
func Start(args []string, logPath string, stdout *os.File) (*exec.Cmd, error) {
	if st, err := os.Stat(logPath); err == nil && st.Size() > maxLog {
		if err := os.Rename(logPath, logPath+".old"); err != nil {
			return nil, err
		}
	}
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	if stdout != nil {
		cmd.Stdout = stdout
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd, cmd.Start()
}

const (
	// again is the pause before a program is started once more.
	again = 50 * time.Millisecond
	// maxKilled is how often in a row Ensure starts one that was killed. Who kills it
	// may do so once more; a machine without memory does so every time.
	maxKilled = 10
)

// Killed reports whether a program's Wait says that somebody has killed it or told it
// to end: nothing is wrong with the program then.
func Killed(err error) bool {
	var e *exec.ExitError
	if !errors.As(err, &e) {
		return false
	}
	st, ok := e.Sys().(syscall.WaitStatus)
	return ok && st.Signaled() && (st.Signal() == syscall.SIGKILL || st.Signal() == syscall.SIGTERM)
}

// Ensure makes sure that a background program answers: it calls probe, and
// starts the program when there is no answer, until probe reports true or ctx
// ends. A program that ends well has found another one that does its work, which
// may itself be on its way out, so it is started again after a moment, as is one that
// was killed; one that fails is an error with the end of its log.
func Ensure(ctx context.Context, args []string, logPath string, probe func(context.Context) bool) error {
	for killed := 0; !probe(ctx); {
		cmd, err := Start(args, logPath, nil)
		if err != nil {
			return err
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }() // ends with the program, or with this process
		up, err := await(ctx, ended, probe)
		if Killed(err) && killed < maxKilled && sleep(ctx, again) {
			killed++
			continue
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, LastLine(logPath))
		}
		if up {
			return nil
		}
	}
	return nil
}

// sleep reports whether it was not ended by ctx.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// await polls until probe is true, or the program has ended well.
func await(ctx context.Context, ended <-chan error, probe func(context.Context) bool) (bool, error) {
	pause := poll
	for {
		select {
		case <-ctx.Done():
			return false, fmt.Errorf("no answer: %w", ctx.Err())
		case err := <-ended:
			if err != nil {
				return false, fmt.Errorf("it ended: %w", err)
			}
			ended, pause = nil, again
		case <-time.After(pause):
			if probe(ctx) {
				return true, nil
			}
			if ended == nil {
				return false, nil
			}
		}
	}
}

// scarce is how little room on its disk makes a log's silence worth a word.
const scarce = 1 << 20

// LastLine returns the end of a log for an error message. What could not be written
// for want of room on the disk is not there, so that is said.
func LastLine(path string) string {
	line := lastLine(path)
	var st unix.Statfs_t
	if unix.Statfs(filepath.Dir(path), &st) != nil || int64(st.Bavail)*st.Bsize >= scarce {
		return line
	}
	return strings.TrimPrefix(fmt.Sprintf("%s; the disk of %s has %d KiB left", line, path, int64(st.Bavail)*st.Bsize>>10), "; ")
}

func lastLine(path string) string {
	const tail = 4 << 10
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		return err.Error()
	}
	if st.Size() > tail {
		f.Seek(-tail, io.SeekEnd)
	}
	raw, err := io.ReadAll(io.LimitReader(f, tail))
	if err != nil {
		return err.Error()
	}
	text := strings.TrimSpace(string(raw))
	return text[strings.LastIndexByte(text, '\n')+1:]
}
