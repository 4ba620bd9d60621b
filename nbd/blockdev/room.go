package blockdev

import (
	"context"
	"sync"
)

// room is an amount of bytes that may be taken. Who waits for some is passed by
// those who do not wait, other than at a semaphore: a Prefetch that waits must not
// keep reads from their neighbours. Safe for concurrent use.
type room struct {
	mu   sync.Mutex // guards what follows
	free int64
	more chan struct{} // closed when some is given back
}

func newRoom(size int64) *room { return &room{free: size, more: make(chan struct{})} }

// take takes n bytes if they are there.
func (r *room) take(n int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n > r.free {
		return false
	}
	r.free -= n
	return true
}

// left is what may be taken.
func (r *room) left() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.free
}

// give gives n bytes back.
func (r *room) give(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free += n
	close(r.more)
	r.more = make(chan struct{})
}

// wait takes n bytes when they are there. Errors: ctx's, ErrClosed once gone is
// closed.
func (r *room) wait(ctx context.Context, gone <-chan struct{}, n int64) error {
	for {
		r.mu.Lock()
		more := r.more
		r.mu.Unlock()
		if r.take(n) {
			return nil
		}
		select {
		case <-more:
		case <-gone:
			return ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
