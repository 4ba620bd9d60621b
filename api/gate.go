package api

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/semaphore"
)

// Requests that read the bucket are admitted by what they hold while a read
// stalls: buffers of about 1 MiB each, the most that is read at once unless a
// chunk is longer.
const (
	// maxReads bounds them all: 1 GiB, besides the ranges of packed's helpers. A
	// burst of 256 workers has room for four requests each.
	maxReads = 1024
	// bulkReads is what a large request may hold: a start keeps 4 MiB of bootstrap
	// beside its buffers, a blob request a window of 1 MiB plain and stored, read in
	// 8 ranges. A batch has 1: it always has one range, and more of them only while
	// helpers are free, which no other request waits for.
	bulkReads = 8
)

// gate admits requests up to a sum of their weights.
type gate struct {
	slots *semaphore.Weighted
	size  int
	wait  time.Duration // 0: as long as the request lives
}

func newGate(size int, wait time.Duration) gate {
	return gate{slots: semaphore.NewWeighted(int64(size)), size: size, wait: wait}
}

// try enters with weight 1, without waiting.
func (g gate) try() (leave func(), ok bool) {
	if !g.slots.TryAcquire(1) {
		return nil, false
	}
	return func() { g.slots.Release(1) }, true
}

// enter waits for room of the given weight and returns how to give it back.
func (g gate) enter(ctx context.Context, weight int) (leave func(), err error) {
	w := int64(min(weight, g.size)) // what is larger than all has it alone
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
		return nil, fmt.Errorf("%w: other requests hold all %d reads, try again", ErrBusy, g.size)
	}
	return leave, nil
}
