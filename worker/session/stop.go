package session

import (
	"context"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sentry"
)

const (
	// stopPoll is how long after a signal the command is looked at again.
	stopPoll = 20 * time.Millisecond
	// letGo is how long bash has to come back from a command whose processes are
	// killed, until it is interrupted too, and then until it is killed.
	letGo = 500 * time.Millisecond
	// sweepTimeout bounds the kill of what a command leaves when it is given up. A
	// guest that is stuck in a read of its image takes no signal until that ends.
	sweepTimeout = 10 * time.Second
)

// abortSignal makes bash give a command up when the process that it waits for has
// ended, before it goes on to the next: the first realtime signals are libc's, and
// nobody is known to use this one. SIGINT alone does not do that: bash passes it over
// when its child ended by something else.
const abortSignal = 41

// Stop gives up the command that runs. Bash is told first, so that nothing of the
// command runs after what is killed. With grace, SIGTERM goes to the command's
// processes and SIGKILL after that time, or when hurry is closed. A bash that does not
// come back from the command ends too. Background jobs of commands before are left
// alone. Run returns after Stop.
func (s *Session) Stop(ctx context.Context, grace time.Duration, hurry <-chan struct{}) error {
	s.mu.Lock()
	c := s.now
	if c == nil || s.over(c) {
		s.mu.Unlock()
		return nil
	}
	c.stops.Add(1)
	s.mu.Unlock()
	defer c.stops.Done()
	_ = s.g.Signal(ctx, sentry.ToProcess, s.pid, abortSignal)
	if grace > 0 {
		if err := s.term(ctx, c, grace, hurry); err != nil {
			return err
		}
	}
	if err := s.insist(ctx, c); err != nil {
		return err
	}
	return s.sweep(ctx, c)
}

// killTries is after how many a process counts as dead: one whose parent does not wait
// for it is listed until that ends.
const killTries = 5

// sweep kills what is left of a command whose bash has come back or ended.
func (s *Session) sweep(ctx context.Context, c *command) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTimeout)
	defer cancel()
	tries := map[int]int{}
	for {
		pids, err := s.members(ctx, c)
		if err != nil {
			return err
		}
		pids = slices.DeleteFunc(pids, func(pid int) bool { tries[pid]++; return tries[pid] > killTries })
		if len(pids) == 0 {
			return nil
		}
		s.signalAll(ctx, pids, unix.SIGKILL)
		if !pause(ctx, stopPoll/4) {
			return ctx.Err()
		}
	}
}

// insist kills the command's processes until bash has come back or ended.
func (s *Session) insist(ctx context.Context, c *command) error {
	for began := time.Now(); !s.over(c); {
		pids, err := s.members(ctx, c)
		if err != nil {
			return err
		}
		s.signalAll(ctx, pids, unix.SIGKILL)
		switch waited := time.Since(began); {
		case waited > 2*letGo:
			if err := s.g.Signal(ctx, sentry.ToProcess, s.pid, int(unix.SIGKILL)); err != nil {
				return err
			}
		case waited > letGo:
			// A builtin that waits hears only this. Should bash have come back by itself
			// a moment ago, the interrupt takes the report away: it is asked for again.
			_ = s.g.Signal(ctx, sentry.ToProcess, s.pid, int(unix.SIGINT))
			_, _ = s.script.WriteString(report(c.nonce))
		}
		s.sleep(ctx, c, stopPoll)
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// term asks the command's processes to end, and returns when they have or the time is over.
func (s *Session) term(ctx context.Context, c *command, grace time.Duration, hurry <-chan struct{}) error {
	asked, err := s.members(ctx, c)
	if err != nil {
		return err
	}
	s.signalAll(ctx, asked, unix.SIGTERM)
	for end := time.Now().Add(grace); time.Now().Before(end) && !s.over(c); {
		alive, err := s.members(ctx, c)
		if err != nil {
			return err
		}
		if !overlap(alive, asked) {
			return nil
		}
		select {
		case <-hurry:
			return nil
		default:
		}
		s.sleep(ctx, c, min(stopPoll, time.Until(end)))
	}
	return ctx.Err()
}

func (s *Session) signalAll(ctx context.Context, pids []int, sig unix.Signal) {
	for _, pid := range pids {
		_ = s.g.Signal(ctx, sentry.ToProcess, pid, int(sig)) // it may have ended
	}
}

func overlap(a, b []int) bool {
	for _, x := range a {
		for _, y := range b {
			if x == y {
				return true
			}
		}
	}
	return false
}

func (s *Session) over(c *command) bool {
	select {
	case <-c.done:
		return true
	case <-s.ended:
		return true
	default:
		return false
	}
}

func (s *Session) sleep(ctx context.Context, c *command, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-c.done:
	case <-s.ended:
	case <-ctx.Done():
	}
}

// Signal sends a signal to the processes of the command that runs; SIGINT goes to bash
// too, which gives the command up.
func (s *Session) Signal(ctx context.Context, sig int) error {
	s.mu.Lock()
	c := s.now
	s.mu.Unlock()
	if c == nil || s.over(c) {
		return ErrEnded
	}
	return s.send(ctx, c, unix.Signal(sig))
}

func (s *Session) send(ctx context.Context, c *command, sig unix.Signal) error {
	pids, err := s.members(ctx, c)
	if err != nil {
		return err
	}
	if sig == unix.SIGINT {
		// Bash first: it gives the command up if its child ends by the same signal.
		pids = append([]int{s.pid}, pids...)
	}
	s.signalAll(ctx, pids, sig)
	return nil
}

// members are the processes of a command: bash's descendants and its group, without
// those that were there before, and without theirs.
func (s *Session) members(ctx context.Context, c *command) ([]int, error) {
	list, err := s.g.Processes(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	before := c.before
	s.mu.Unlock()
	if before == nil {
		return nil, nil // it has not begun
	}
	old := closure(list, func(p sentry.Process) bool { return before[p.PID] && p.PID != s.pid }, nil)
	ours := closure(list, func(p sentry.Process) bool { return p.PID == s.pid || p.PGID == s.pid }, old)
	var pids []int
	for _, p := range list {
		if ours[p.PID] && p.PID != s.pid {
			pids = append(pids, p.PID)
		}
	}
	return pids, nil
}

// initPID adopts orphans: to be its child says nothing.
const initPID = 1

// closure returns the processes for which is holds and those that came from them, but
// for those in not.
func closure(list []sentry.Process, is func(sentry.Process) bool, not map[int]bool) map[int]bool {
	in := map[int]bool{}
	for _, p := range list {
		if !not[p.PID] && is(p) {
			in[p.PID] = true
		}
	}
	for grown := true; grown; {
		grown = false
		for _, p := range list {
			if !in[p.PID] && !not[p.PID] && p.PPID != initPID && in[p.PPID] {
				in[p.PID], grown = true, true
			}
		}
	}
	return in
}
