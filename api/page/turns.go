package page

import (
	"context"
	"sync"
)

// turns runs what the page does in the background, one of a kind at a time, and
// only because somebody looked: a page that nobody has open costs nothing.
type turns struct {
	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup

	mu     sync.Mutex // guards the rest
	busy   map[string]chan struct{}
	closed bool
}

func newTurns() *turns {
	ctx, cancel := context.WithCancel(context.Background())
	return &turns{ctx: ctx, cancel: cancel, busy: map[string]chan struct{}{}}
}

// start has fn run unless one of its kind does, and returns what is closed when that
// one has ended.
func (t *turns) start(kind string, fn func(context.Context)) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if done := t.busy[kind]; done != nil {
		return done
	}
	done := make(chan struct{})
	if t.closed {
		close(done)
		return done
	}
	t.busy[kind] = done
	t.all.Go(func() { // ends with fn, which close tells to end and waits for
		defer close(done)
		defer func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			delete(t.busy, kind)
		}()
		fn(t.ctx)
	})
	return done
}

func (t *turns) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.cancel()
	t.all.Wait()
}
