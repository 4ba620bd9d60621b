package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrInUse says that a live process serves the folder's attachment.
var ErrInUse = errors.New("attachment is in use")

const (
	// lockPatience is how long a lock is waited for that no serving process holds:
	// a sweep does for some hundred milliseconds, a look at the lock for microseconds.
	lockPatience = time.Second
	// maxRecord bounds the record in the lock file: two numbers of 20 digits.
	maxRecord = 64
)

// Lock is a folder's lock, held by the process that serves the folder, or is
// about to. The kernel drops it with the process, so there are no stale locks.
// The file says which process it is.
type Lock struct {
	dir      folder
	file     *os.File
	regained bool // the file had been removed meanwhile
}

// TakeLock takes the lock of a folder that exists. A process that will serve the
// folder takes it first of all, so that End finds it. Errors: ErrInUse,
// fs.ErrNotExist.
func TakeLock(ctx context.Context, path string) (*Lock, error) {
	dir, err := realFolder(path)
	if err != nil {
		return nil, err
	}
	f, err := lockFolder(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	l := &Lock{dir: dir, file: f}
	if err := l.sign(); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return l, nil
}

// sign writes this process's record.
func (l *Lock) sign() error {
	start, err := ProcessStart(os.Getpid())
	if err != nil {
		return err
	}
	_, err = l.file.WriteAt([]byte(process{os.Getpid(), start}.String()), 0)
	return err
}

// Release gives the lock back, once or more.
func (l *Lock) Release() error {
	if err := l.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// ours reports whether the lock still is the folder's: who removes the file, or
// the folder, wants the attachment gone.
func (l *Lock) ours() bool { return isAt(l.file, l.dir.lock()) }

// regain makes the lock the folder's again so that the folder can be cleaned.
// An error says that there is nothing to clean: another process has it, or it
// is gone.
func (l *Lock) regain(ctx context.Context) error {
	if l.ours() {
		return nil
	}
	f, err := lockFolder(ctx, l.dir)
	if err != nil {
		return fmt.Errorf("lock of %s was removed: %w", l.dir, err)
	}
	l.file.Close()
	l.file, l.regained = f, true
	return l.sign()
}

// realFolder returns a folder by its real path, which mount tables and loop
// devices speak of. Errors: fs.ErrNotExist.
func realFolder(path string) (folder, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	path, err = filepath.EvalSymlinks(path)
	return folder(path), err
}

// lockFolder takes the lock and empties the record: it was a dead process's.
func lockFolder(ctx context.Context, dir folder) (*os.File, error) {
	for end := time.Now().Add(lockPatience); ; {
		f, err := os.OpenFile(dir.lock(), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && isAt(f, dir.lock()) {
			if err := f.Truncate(0); err != nil {
				f.Close()
				return nil, err
			}
			return f, nil
		}
		f.Close()
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, err
		}
		if _, serving := dir.holder(); serving || time.Now().After(end) {
			return nil, ErrInUse
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// isAt reports whether path names the open file.
func isAt(f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(opened, named)
}

// locked reports whether some process has the lock, in whatever PID namespace.
func (f folder) locked() bool {
	file, err := openRegular(f.lock())
	if err != nil {
		return false
	}
	defer file.Close()
	return errors.Is(unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// record returns what the lock file says about its holder.
func (f folder) record() (process, error) {
	file, err := openRegular(f.lock())
	if err != nil {
		return process{}, err
	}
	defer file.Close()
	b := make([]byte, maxRecord)
	n, err := file.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		return process{}, err
	}
	var p process
	fmt.Sscanf(string(b[:n]), "%d %d", &p.pid, &p.start)
	if p.pid <= 0 || p.String() != string(b[:n]) {
		return process{}, fmt.Errorf("%s names no process", f.lock())
	}
	return p, nil
}

// holder returns the process that the lock file names when the kernel confirms
// that it holds the lock.
func (f folder) holder() (process, bool) {
	p, err := f.record()
	return p, err == nil && p.holds(f.lock())
}

// process names a process: numbers are used again.
type process struct {
	pid   int
	start uint64 // see ProcessStart
}

func (p process) String() string { return fmt.Sprintf("%d %d\n", p.pid, p.start) }

// holds reports whether the process has the lock file open and locked. It cannot
// see a process of a PID namespace that is not below this one.
func (p process) holds(lock string) bool {
	start, err := ProcessStart(p.pid)
	if err != nil || start != p.start {
		return false
	}
	want, err := os.Stat(lock)
	if err != nil {
		return false
	}
	proc := filepath.Join("/proc", strconv.Itoa(p.pid))
	infos, err := os.ReadDir(filepath.Join(proc, "fdinfo"))
	if err != nil {
		return false
	}
	for _, fd := range infos {
		// Only a locked file is looked at: that of another file could block.
		if b, err := os.ReadFile(filepath.Join(proc, "fdinfo", fd.Name())); err != nil || !saysLocked(string(b)) {
			continue
		}
		if got, err := os.Stat(filepath.Join(proc, "fd", fd.Name())); err == nil && os.SameFile(got, want) {
			return true
		}
	}
	return false
}

// saysLocked reads a descriptor's information, see proc_pid_fdinfo(5), such as
// "lock:	1: FLOCK  ADVISORY  WRITE 359 00:13:11691 0 EOF".
func saysLocked(info string) bool {
	for line := range strings.Lines(info) {
		f := strings.Fields(line)
		if len(f) > 4 && f[0] == "lock:" && f[2] == "FLOCK" && f[4] == "WRITE" {
			return true
		}
	}
	return false
}
