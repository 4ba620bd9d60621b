package proc

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

// Process is a running process, whoever started it. It is known by a descriptor,
// so that its number cannot come to mean another process.
type Process struct {
	pid int
	f   *os.File
}

// Open finds a process by its number. Errors: os.ErrProcessDone when there is
// none.
func Open(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("open process %d: %w", pid, os.ErrProcessDone)
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	return &Process{pid, os.NewFile(uintptr(fd), "pidfd")}, nil
}

// PID returns its number, which may be another's once it has ended.
func (p *Process) PID() int { return p.pid }

// Wait returns nil when the process has ended, reaped or not, or ctx's error.
// Called by one goroutine at a time.
func (p *Process) Wait(ctx context.Context) error {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return err
	}
	p.f.SetReadDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { p.f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	err = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 && err == nil
	})
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Signal sends a signal; one that has ended gets none: os.ErrProcessDone.
func (p *Process) Signal(s unix.Signal) error {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return err
	}
	ctlErr := raw.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), s, nil, 0) })
	if errors.Is(err, unix.ESRCH) {
		return os.ErrProcessDone
	}
	return errors.Join(ctlErr, err)
}

// maxStatus bounds one /proc/<pid>/task/<tid>/status.
const maxStatus = 64 << 10

// Switches counts how often the process's threads have been given a processor or
// have given one back, more or less: a thread that ends takes its own along. Two
// looks that see the same number saw a process that has not run in between, be it
// stopped, frozen or stuck.
func (p *Process) Switches() (n uint64, err error) {
	dir := filepath.Join("/proc", strconv.Itoa(p.pid), "task")
	threads, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, t := range threads {
		f, err := os.Open(filepath.Join(dir, t.Name(), "status"))
		if err != nil {
			continue // it has ended
		}
		text, err := io.ReadAll(io.LimitReader(f, maxStatus))
		f.Close()
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			if strings.HasSuffix(name, "voluntary_ctxt_switches") { // and nonvoluntary_…
				k, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
				if err != nil {
					return 0, fmt.Errorf("%s/%s/status: %w", dir, t.Name(), err)
				}
				n += k
			}
		}
	}
	return n, nil
}

// Close lets the process go.
func (p *Process) Close() error { return p.f.Close() }
