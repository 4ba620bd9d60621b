package holder

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sentry"
)

// What has left its command's session and lost its parent (setsid and a double fork)
// is in no family. Who it came from the Sentry does not say. But where a command began
// in a sandbox in which nothing ran, and no other has begun since, everything there is
// the command's, and goes with it.

// lookBefore finds out whether a command that may be killed began alone. It runs
// beside the start of the command, which does not wait for it: what the list has of
// the command itself only makes the answer no.
func (x *execution) lookBefore() {
	b := x.box
	b.mu.Lock()
	alone := b.bare && b.running == 1 && len(b.sessions) == 0
	b.mu.Unlock()
	if x.spec.Timeout == 0 || !alone {
		return
	}
	before := make(chan []sentry.Process, 1)
	x.before = before
	b.tasks.Go(func() { // bounded by killTimeout
		defer close(before)
		ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
		defer cancel()
		if list, err := b.sentry.Processes(ctx); err == nil {
			others, _ := b.beside(list)
			before <- others
		}
	})
}

// beganAlone reports whether nothing but the sleeper was there when the command with
// this PID began.
func (x *execution) beganAlone(ctx context.Context, pid int) bool {
	if x.before == nil {
		return false
	}
	select {
	case others, ok := <-x.before:
		return ok && len(newFamily(pid).update(others)) == len(others)
	case <-ctx.Done():
		return false
	}
}

// beside is who there is in a list beside the sleeper and helpers. clear says that the
// list tells all of it: a helper that starts has a number that nobody knows yet.
func (b *box) beside(list []sentry.Process) (others []sentry.Process, clear bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range list {
		if p.PID != 1 && !b.helping[p.PID] {
			others = append(others, p)
		}
	}
	return others, b.starting == 0
}

// killRest kills what a command that began alone has left, until nobody is there or
// another command has begun.
func (x *execution) killRest(ctx context.Context) error {
	for {
		list, err := x.box.sentry.Processes(ctx)
		if errors.Is(err, sentry.ErrGone) {
			return nil
		}
		if err != nil {
			return err
		}
		// What another command brings is counted before it starts: a list from before
		// this has none of it.
		rest, clear := x.box.beside(list)
		if len(rest) == 0 || !x.isLast() {
			return nil
		}
		for _, p := range rest {
			if clear { // an error says that it has ended
				x.box.sentry.Signal(ctx, sentry.ToProcess, p.PID, int(unix.SIGKILL))
			}
		}
		select {
		case <-time.After(killPoll):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// isLast reports whether no command has begun since.
func (x *execution) isLast() bool {
	x.box.mu.Lock()
	defer x.box.mu.Unlock()
	return x.box.begun == x.number && !x.box.over
}
