package proc

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// maxSigned bounds what Sign writes: a number of at most 20 digits.
const maxSigned = 32

// Sign writes into the lock's file who holds it, for Holder.
func (l *Lock) Sign() error { return l.Write([]byte(strconv.Itoa(os.Getpid()) + "\n")) }

// signed opens the file of a lock and reads who has signed it.
func signed(path string) (f *os.File, pid int, err error) {
	f, err = os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSigned))
	if err == nil {
		pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if err != nil || pid <= 0 {
		f.Close()
		return nil, 0, fmt.Errorf("%s names no process: %w", path, cmp.Or(err, os.ErrProcessDone))
	}
	return f, pid, nil
}

// Holder returns the process that has signed a lock and holds it, which the kernel
// confirms: a number in a file is not believed. Errors: there is none, it has not
// signed, or it is of another PID namespace.
func Holder(path string) (*Process, error) {
	f, pid, err := signed(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := Open(pid)
	if err != nil {
		return nil, err
	}
	// Looked at after it was opened: the number was its own then.
	if !p.holds(f) {
		return nil, errors.Join(fmt.Errorf("process %d does not hold %s", pid, path), p.Close())
	}
	return p, nil
}

// HolderStopped reports whether a lock's Holder is stopped. That it is not costs little
// to see.
func HolderStopped(path string) bool {
	f, pid, err := signed(path)
	if err != nil {
		return false
	}
	f.Close()
	if !stopped(pid) {
		return false
	}
	p, err := Holder(path)
	if err != nil {
		return false
	}
	defer p.Close()
	return p.Stopped()
}

// holds reports whether the process has the file open and locked.
func (p *Process) holds(lock *os.File) bool {
	want, err := lock.Stat()
	if err != nil {
		return false
	}
	dir := filepath.Join("/proc", strconv.Itoa(p.pid))
	fds, err := os.ReadDir(filepath.Join(dir, "fdinfo"))
	if err != nil {
		return false
	}
	for _, fd := range fds {
		info, err := os.ReadFile(filepath.Join(dir, "fdinfo", fd.Name()))
		if err != nil || !saysLocked(string(info)) {
			continue // another file is not looked at: that could block
		}
		if got, err := os.Stat(filepath.Join(dir, "fd", fd.Name())); err == nil && os.SameFile(got, want) {
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

// Stopped reports whether the process is stopped, by a signal or by a debugger.
func (p *Process) Stopped() bool { return stopped(p.pid) }

func stopped(pid int) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	// "pid (name) state …"; a name may have parentheses of its own.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	return len(f) > 0 && (f[0] == "T" || f[0] == "t")
}
