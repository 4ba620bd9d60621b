package holder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// notKnown is the status of a process that was not waited for.
const notKnown = -1

// reap waits for every child: the Sentry, the gofer, and whatever else runsc left to
// this process. When all have ended it makes the end of the sandbox, unless that is
// hibernated.
func (b *box) reap() {
	end := Ended{Sentry: notKnown, Gofer: notKnown}
	for {
		// Seen first, and waited for with the lock held: until then its number is its own.
		var seen unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &seen, unix.WEXITED|unix.WNOWAIT|unix.WALL, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			break // there is no child
		}
		if b.reapOne(&end) && !b.goesToSleep() {
			// Without one of them the others are of no use; they see it, or are killed.
			time.AfterFunc(endTimeout, b.killChildren)
		}
	}
	if !b.fallAsleep() {
		b.finish(end)
	}
}

// reapOne waits for a child that has ended, and reports whether it was the Sentry
// or the gofer.
func (b *box) reapOne(end *Ended) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	var ws unix.WaitStatus
	pid, err := unix.Wait4(-1, &ws, unix.WALL|unix.WNOHANG, nil)
	switch {
	case err != nil || pid <= 0:
		return false
	case pid == b.sentryPID:
		b.sentryPID, end.Sentry = 0, int(ws)
	case pid == b.goferPID:
		b.goferPID, end.Gofer = 0, int(ws)
		if ws.Signaled() && !b.forced && b.nap != napBegun {
			b.reason = "the gofer " + describe(int(ws))
			b.goferLost = true
		}
	default:
		return false
	}
	b.over = b.over || b.nap != napBegun
	return true
}

// What waitid(2) says of a child that a signal has ended.
const (
	cldKilled = 2
	cldDumped = 3
)

// lostGofer says so when the gofer was ended from outside: what the guest saw of files
// since, and how its commands ended, is not theirs. It is a child of this process, so
// that is seen before what the Sentry makes of it.
func (b *box) lostGofer() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.goferLost && !b.forced && b.nap == napNone && b.goferPID > 0 {
		options := unix.WEXITED | unix.WNOWAIT | unix.WALL
		if !exiting(b.goferPID) {
			options |= unix.WNOHANG
		}
		var seen unix.Siginfo
		err := unix.Waitid(unix.P_PID, b.goferPID, &seen, options, nil)
		b.goferLost = err == nil && (seen.Code == cldKilled || seen.Code == cldDumped)
	}
	if !b.goferLost {
		return ""
	}
	return "the sandbox's gofer, which gives it its files, was ended from outside"
}

// exiting reports whether the kernel takes a process apart: its connections are closed
// then, which the Sentry sees before anybody can wait for the process.
func exiting(pid int) bool {
	const flagExiting = 0x4 // PF_EXITING
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// After the name, which may have anything in it: state, five numbers, flags.
	f := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(f) < 7 {
		return false
	}
	flags, err := strconv.ParseUint(f[6], 10, 64)
	return err == nil && flags&flagExiting != 0
}

// killChildren kills whatever is a child of this process.
func (b *box) killChildren() {
	b.mu.Lock()
	b.forced = true
	b.mu.Unlock()
	kill(children())
}

// children lists the children of this process.
func children() (pids []int) {
	lists, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return nil
	}
	for _, list := range lists {
		raw, err := os.ReadFile(list)
		if err != nil {
			continue
		}
		for pid := range strings.FieldsSeq(string(raw)) {
			if n, err := strconv.Atoi(pid); err == nil && n > 1 {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

func kill(pids []int) {
	for _, pid := range pids {
		unix.Kill(pid, unix.SIGKILL)
	}
}

// finish makes and records the end once every process of the sandbox is gone.
func (b *box) finish(end Ended) {
	b.mu.Lock()
	b.over = true
	order := b.order
	b.mu.Unlock()
	if b.sentry != nil {
		b.sentry.Close()
	}
	late, cancel := context.WithTimeout(context.Background(), finishTimeout)
	defer cancel()
	for _, x := range order { // each sees the Sentry gone
		select {
		case <-x.ended:
		case <-late.Done():
			b.log.Warn("exec does not end", "exec", x.state.ID)
		}
	}
	closeGuest(b.initEnds)
	for _, s := range b.init {
		s.leave()
		select {
		case <-s.done: // who is told of the end finds all of it
		case <-late.Done():
			b.log.Warn("output of the first process is not kept yet", "file", s.path)
		}
	}
	paused, _ := b.pauseState()
	b.mu.Lock()
	end.Killed, end.Init, end.At = b.killed, b.initStatus, time.Now().UTC().Round(0)
	end.Pauses, end.PausedFor, end.Execs = b.pauses, paused.Milliseconds(), b.begun
	end.NotRestored = b.nap == napWaking && !b.killed
	if end.Message = b.reason; end.Message != "" {
		end.Init = nil // it did not end by itself
	}
	b.mu.Unlock()
	if end.Init == nil && b.endedItself(end) {
		end.Init = &sentry.Status{Code: unix.WaitStatus(end.Sentry).ExitStatus()}
	}
	if end.Message == "" && !end.Killed && end.Init == nil {
		end.Message = b.whatEnded(end)
	}
	if err := writeRecord(endedPath(b.dir), endedRecord{endedFormat, end}); err != nil {
		b.log.Error("end not recorded", "err", err)
	}
	if b.socket != "" {
		os.Remove(b.socket) // runsc makes it elsewhere when the folder's path is long
	}
	b.mu.Lock()
	b.end = end
	b.mu.Unlock()
	close(b.ended)
}

// endedItself reports whether a Sentry that answered nobody ended with its guest's first
// process, whose status it then exits with: one that ends at once is gone before it is
// asked. 128 is what runsc exits with of its own, and a crash of it leaves a log. The
// sleeper never exits by itself.
func (b *box) endedItself(e Ended) bool {
	if b.bare {
		return false
	}
	const runscFailed = 128
	b.mu.Lock()
	forced, whole := b.forced, b.nap == napNone
	b.mu.Unlock()
	ws := unix.WaitStatus(e.Sentry)
	return e.Message == "" && !e.Killed && !forced && whole && e.Sentry != notKnown && ws.Exited() && ws.ExitStatus() != runscFailed && b.panicked() == ""
}

// finishTimeout bounds the wait for execs whose Sentry is gone, and for what the first
// process has written: they have but to read what is left in pipes.
const finishTimeout = 10 * time.Second

// whatEnded says what is known of an end that nobody asked for.
func (b *box) whatEnded(e Ended) string {
	if p := b.panicked(); p != "" {
		return p
	}
	return fmt.Sprintf("the Sentry %s, the gofer %s", describe(e.Sentry), describe(e.Gofer))
}

func describe(status int) string {
	ws := unix.WaitStatus(status)
	switch {
	case status == notKnown:
		return "was not seen to end"
	case ws.Signaled():
		return fmt.Sprintf("was ended by signal %d", ws.Signal())
	}
	return fmt.Sprintf("exited with %d", ws.ExitStatus())
}

// find finds an exec.
func (b *box) find(id string) (*execution, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	x := b.execs[id]
	if _, was := b.past[sumOf(id)]; was && x == nil {
		return nil, fmt.Errorf("%w any more: %s has ended, and of the execs of a sandbox the last %d are known", sandbox.ErrExecUnknown, id, KeptExecs)
	}
	if x == nil {
		return nil, fmt.Errorf("%w: %s", sandbox.ErrExecUnknown, id[:min(len(id), maxExecID)])
	}
	return x, nil
}
