// Package gate admits requests by what they hold, so that what all of them hold
// together has a bound, whoever sends how many.
package gate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
)

// What is full.
var (
	ErrFull   = errors.New("server is busy")                // others hold all there is
	ErrHolder = errors.New("too much of one token at once") // its other requests hold its share
)

// Gate admits requests up to a sum of their weights.
type Gate struct {
	slots *semaphore.Weighted
	size  int64
	unit  string
	wait  time.Duration
}

// New returns a gate for weights of size together. unit is what weights are, for
// messages. Who finds it full waits for so long, 0: as long as the request lives.
func New(size int64, unit string, wait time.Duration) Gate {
	return Gate{slots: semaphore.NewWeighted(size), size: size, unit: unit, wait: wait}
}

// Try enters without waiting.
func (g Gate) Try(weight int64) (leave func(), ok bool) {
	w := min(weight, g.size)
	if !g.slots.TryAcquire(w) {
		return nil, false
	}
	return func() { g.slots.Release(w) }, true
}

// Enter waits for room of the given weight and returns how to give it back. Errors:
// ErrFull, ctx's.
func (g Gate) Enter(ctx context.Context, weight int64) (leave func(), err error) {
	w := min(weight, g.size) // what is larger than all has it alone
	leave = func() { g.slots.Release(w) }
	if g.slots.TryAcquire(w) {
		return leave, nil
	}
	waiting := ctx
	if g.wait > 0 {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, g.wait)
		defer cancel()
	}
	if err := g.slots.Acquire(waiting, w); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("%w: other requests hold all %d %s, try again", ErrFull, g.size, g.unit)
	}
	return leave, nil
}

// Shares is a gate of which no holder takes more than three quarters.
type Shares struct {
	all  Gate
	mu   sync.Mutex // guards held
	held map[string]*share
}

// share is what one holder may have; there is one as long as it has requests.
type share struct {
	Gate
	requests int
}

// NewShares returns a Shares, with the arguments of New.
func NewShares(size int64, unit string, wait time.Duration) *Shares {
	return &Shares{all: New(size, unit, wait), held: map[string]*share{}}
}

// Enter is Gate's for a request of holder, "" for nobody, who has no bound of his own.
// Errors: ErrFull, ErrHolder, ctx's.
func (s *Shares) Enter(ctx context.Context, holder string, weight int64) (leave func(), err error) {
	if holder == "" {
		return s.all.Enter(ctx, weight)
	}
	own, end := s.of(holder)
	weight = min(weight, own.size) // what is larger leaves others the rest all the same
	leaveOwn, err := own.Enter(ctx, weight)
	if err != nil {
		end()
		if errors.Is(err, ErrFull) {
			err = fmt.Errorf("%w: its requests hold %d %s, try again when some have ended", ErrHolder, own.size, own.unit)
		}
		return nil, err
	}
	leaveAll, err := s.all.Enter(ctx, weight)
	if err != nil {
		leaveOwn()
		end()
		return nil, err
	}
	return func() { leaveAll(); leaveOwn(); end() }, nil
}

// of returns a holder's share for one request, which ends it.
func (s *Shares) of(holder string) (own *share, end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	own = s.held[holder]
	if own == nil {
		own = &share{Gate: New(s.all.size-s.all.size/4, s.all.unit, s.all.wait)}
		s.held[holder] = own
	}
	own.requests++
	return own, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if own.requests--; own.requests == 0 {
			delete(s.held, holder)
		}
	}
}
