package holder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// Pauses of the Sentry nest, and one Resume too many ends it: its counter goes
// below zero. So only the holder sends them, one at a time, and what counts is
// what it sent, whatever a caller asks for and however often.
const (
	// pauseTimeout is how long the guest may take to stop.
	pauseTimeout = 250 * time.Millisecond
	// undoTimeout is how long the answer to a Pause that came too late is waited for
	// before it is undone. Only the answer says for sure that the Sentry has counted
	// it; without one, it has had this time to read the request. Until then those
	// tasks of the guest that did stop stand still.
	undoTimeout = 10 * time.Second
	// resumeTimeout is for an answer that takes a lock and no more.
	resumeTimeout = 30 * time.Second
)

// gate lets starts of commands through, and none while a pause is made or undone.
type gate struct {
	mu     sync.Mutex // guards what follows
	inside int
	shut   bool
	moved  chan struct{} // closed at the next change, nil when nobody waits
}

func (g *gate) wait(ctx context.Context, pass func() bool) error {
	for {
		g.mu.Lock()
		if pass() {
			g.mu.Unlock()
			return nil
		}
		if g.moved == nil {
			g.moved = make(chan struct{})
		}
		moved := g.moved
		g.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (g *gate) move(change func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change()
	if g.moved != nil {
		close(g.moved)
		g.moved = nil
	}
}

func (g *gate) enter(ctx context.Context) error {
	return g.wait(ctx, func() bool {
		if !g.shut {
			g.inside++
		}
		return !g.shut
	})
}

// tryEnter is enter for who does not wait.
func (g *gate) tryEnter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shut {
		return false
	}
	g.inside++
	return true
}

func (g *gate) leave() { g.move(func() { g.inside-- }) }
func (g *gate) open()  { g.move(func() { g.shut = false }) }

// close shuts the gate and waits until nobody is inside.
func (g *gate) close(ctx context.Context) error {
	err := g.wait(ctx, func() bool {
		if g.shut {
			return false // another pause is under way
		}
		g.shut = true
		return true
	})
	if err != nil {
		return err
	}
	if err := g.wait(ctx, func() bool { return g.inside == 0 }); err != nil {
		g.open()
		return err
	}
	return nil
}

// pausedFor is how long the guest has been paused in all, until now.
func (b *box) pausedFor() time.Duration {
	d, _ := b.pauseState()
	return d
}

func (b *box) pauseState() (total time.Duration, isPaused bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	total = b.paused
	if b.isPaused {
		total += time.Since(b.pausedAt)
	}
	return total, b.isPaused
}

// pause stops the guest.
func (b *box) pause(ctx context.Context, force bool) error {
	if err := b.gate.close(ctx); err != nil {
		return err
	}
	if done, err := b.mayPause(force); done || err != nil {
		b.gate.open()
		return err
	}
	answered := make(chan error, 1)
	b.tasks.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), pauseTimeout+undoTimeout)
		defer cancel()
		answered <- b.sentry.Pause(ctx)
	})
	t := time.NewTimer(pauseTimeout)
	defer t.Stop()
	select {
	case err := <-answered:
		defer b.gate.open()
		if err != nil {
			return b.lost("pause", err)
		}
		b.mu.Lock()
		b.isPaused, b.pausedAt = true, time.Now()
		b.pauses++
		b.mu.Unlock()
		return nil
	case <-t.C:
	}
	b.tasks.Go(func() { // bounded by undoTimeout and resumeTimeout
		defer b.gate.open()
		if err := <-answered; err == nil || errors.Is(err, context.DeadlineExceeded) {
			b.unpause()
		}
	})
	return fmt.Errorf("%w: the guest did not stop within %v", ErrBusy, pauseTimeout)
}

// mayPause says why not, or that it is done already.
func (b *box) mayPause(force bool) (done bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.over:
		return false, sandbox.ErrEnded
	case b.isPaused:
		return true, nil
	case force:
		return false, nil
	case b.tools > 0:
		return false, fmt.Errorf("%w: commands of role tool run in it: %d", ErrBusy, b.tools)
	case b.helpers > 0:
		return false, fmt.Errorf("%w: files are read or written", ErrBusy)
	}
	return false, nil
}

// lost makes an error of one that no answer of the Sentry was.
func (b *box) lost(what string, err error) error {
	if errors.Is(err, sentry.ErrGone) {
		return sandbox.ErrEnded
	}
	return fmt.Errorf("%w: %s: %w", sandbox.ErrRuntime, what, err)
}

// unpause sends the one Resume that a Pause needs. A Sentry that does not answer
// is of no use any more, and nobody knows what it has counted.
func (b *box) unpause() error {
	ctx, cancel := context.WithTimeout(context.Background(), resumeTimeout)
	defer cancel()
	err := b.sentry.Resume(ctx)
	if err != nil && !errors.Is(err, sentry.ErrGone) {
		b.giveUp(fmt.Sprintf("the Sentry did not resume: %v", err))
	}
	return err
}

// resume lets the guest go on.
func (b *box) resume(ctx context.Context) error {
	if err := b.gate.close(ctx); err != nil {
		return err
	}
	defer b.gate.open()
	b.mu.Lock()
	over, isPaused, nap := b.over, b.isPaused, b.nap
	b.mu.Unlock()
	switch {
	case over:
		return sandbox.ErrEnded
	case nap != napNone:
		return ErrHibernated
	case !isPaused:
		return nil
	}
	if err := b.unpause(); err != nil {
		return b.lost("resume", err)
	}
	b.goOn()
	return nil
}

// goOn notes that the guest runs.
func (b *box) goOn() {
	b.mu.Lock()
	b.isPaused = false
	b.paused += time.Since(b.pausedAt)
	order := b.order
	b.mu.Unlock()
	for _, x := range order {
		x.arm()
	}
}
