// Package gate admits requests by what they hold, so that what all of them hold
// together has a bound, whoever sends how many.
package gate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/semaphore"
)

// ErrFull says that others hold all there is.
var ErrFull = errors.New("server is busy")

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
