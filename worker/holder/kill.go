package holder

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sentry"
)

const (
	// killTimeout bounds the kill of an exec. A guest that is stuck in a read of its
	// image takes no signal until that ends.
	killTimeout = 10 * time.Second
	// killPoll is how long after a kill the guest is looked at again.
	killPoll = 2 * time.Millisecond
)

// kill ends every process of the exec: with grace, SIGTERM goes to its group and
// SIGKILL after that time. It returns at once. A kill without grace ends the grace
// of one under way.
func (x *execution) kill(why string, grace time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.final():
		return
	case x.killing != nil:
		if grace == 0 && !x.hurried {
			x.hurried = true
			close(x.hurry)
		}
		return
	}
	x.why, x.killing, x.hurry, x.hurried = why, make(chan struct{}), make(chan struct{}), false
	done, hurry, pid := x.killing, x.hurry, x.state.PID
	x.box.tasks.Go(func() { // bounded by grace and killTimeout
		defer close(done)
		if x.spec.Session != "" {
			x.stopSession(grace, hurry)
			return
		}
		x.killAll(pid, grace, hurry)
	})
}

// killAll kills the family of a process. Who belongs to it is looked up before the
// first signal: a child whose parent has ended is no longer known as one.
func (x *execution) killAll(pid int, grace time.Duration, hurry <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), grace+killTimeout)
	defer cancel()
	family := newFamily(pid)
	x.box.look(ctx, family)
	if grace > 0 {
		if err := x.box.sentry.Signal(ctx, sentry.ToGroup, pid, int(unix.SIGTERM)); err == nil {
			t := time.NewTimer(grace)
			defer t.Stop()
			select {
			case <-t.C:
			case <-hurry:
			case <-x.gone: // others of the family may be left
			}
			x.box.look(ctx, family)
		}
	}
	err := x.box.killFamily(ctx, family)
	if err == nil && x.beganAlone(ctx, pid) {
		err = x.killRest(ctx)
	}
	if err != nil {
		x.box.log.Warn("processes of an exec may be left", "exec", x.state.ID, "err", err)
	}
}

// family is a process, those in its group, and all that came from them.
type family struct {
	leader  int
	members map[int]bool // by PID
}

func newFamily(pid int) *family { return &family{leader: pid, members: map[int]bool{pid: true}} }

// update takes in what a list of processes tells and returns who is there now.
func (f *family) update(list []sentry.Process) (alive []sentry.Process) {
	for grown := true; grown; {
		grown = false
		for _, p := range list {
			if !f.members[p.PID] && (p.PGID == f.leader || f.members[p.PPID]) {
				f.members[p.PID], grown = true, true
			}
		}
	}
	there := map[int]bool{}
	for _, p := range list {
		there[p.PID] = true
		if f.members[p.PID] {
			alive = append(alive, p)
		}
	}
	for pid := range f.members {
		if !there[pid] {
			delete(f.members, pid) // its number may be another's soon
		}
	}
	return alive
}

// look brings a family up to date.
func (b *box) look(ctx context.Context, f *family) ([]sentry.Process, error) {
	list, err := b.sentry.Processes(ctx)
	if err != nil {
		return nil, err
	}
	return f.update(list), nil
}

// killFamily kills until nobody of the family is left.
func (b *box) killFamily(ctx context.Context, f *family) error {
	for {
		alive, err := b.look(ctx, f)
		if errors.Is(err, sentry.ErrGone) || err == nil && len(alive) == 0 {
			return nil
		}
		// A list that is too long is no reason to let its processes be.
		// The group first, at once: who forks there does not get away. An error says that
		// somebody has ended by itself.
		b.sentry.Signal(ctx, sentry.ToGroup, f.leader, int(unix.SIGKILL))
		for _, p := range alive {
			if p.PGID != f.leader {
				b.sentry.Signal(ctx, sentry.ToProcess, p.PID, int(unix.SIGKILL))
			}
		}
		select {
		case <-time.After(killPoll):
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}
