package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// In version 2 the kernel ends a group as a whole when it has no memory left. Version
// 1 kills one process and leaves half a sandbox, so whoever keeps the group has to end
// the rest.

const (
	// countPatience is how long a kill may come after the notice that memory ran out.
	countPatience = time.Second
	eventSize     = 8 // of an eventfd's counter
)

// AwaitOOM returns nil when the kernel has killed a process of the group for want of
// memory, and ctx's error when ctx ends. In version 2 it waits for ctx alone: nobody
// needs to act there.
func (g *Group) AwaitOOM(ctx context.Context) error {
	if g.t.v2 {
		<-ctx.Done()
		return ctx.Err()
	}
	event, err := g.oomEvent()
	if err != nil {
		return fmt.Errorf("watch the memory of control group %s: %w", g.id, err)
	}
	defer event.Close()
	stop := context.AfterFunc(ctx, func() { event.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for patience := time.Duration(0); ; patience = countPatience {
		// Looked at first: it may have happened before anybody watched.
		if g.oomKilled(ctx, patience) {
			return nil
		}
		var n [eventSize]byte
		if _, err := event.Read(n[:]); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}
	}
}

// oomKilled reports whether a process was killed, which is counted a moment after the
// notice.
func (g *Group) oomKilled(ctx context.Context, patience time.Duration) bool {
	for end := time.Now().Add(patience); ; {
		n, err := readKey(filepath.Join(g.dir("memory"), "memory.oom_control"), "oom_kill")
		if err == nil && n > 0 {
			return true
		}
		if err != nil || !time.Now().Before(end) || !sleep(ctx, endPoll) {
			return false
		}
	}
}

// oomEvent has the kernel tell of a group without memory by an eventfd.
func (g *Group) oomEvent() (*os.File, error) {
	dir := g.dir("memory")
	control, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err != nil {
		return nil, err
	}
	defer control.Close()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, err
	}
	event := os.NewFile(uintptr(fd), "eventfd")
	line := fmt.Sprintf("%d %d", fd, control.Fd())
	if err := writeValue(filepath.Join(dir, "cgroup.event_control"), line); err != nil {
		return nil, errors.Join(err, event.Close())
	}
	return event, nil
}
