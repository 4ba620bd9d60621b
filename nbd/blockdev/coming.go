package blockdev

import (
	"context"
	"sync"
	"time"

	"quarry/store/chunk"
)

const (
	// maxBefore is how many bytes of others may come before a chunk that a read waits
	// for: what a sequential read has under way, 3.4 MB stored, 30 ms at 1 Gbit/s.
	// What is further behind comes sooner when it is asked for by itself.
	maxBefore = sureWindow
	// maxOnWay is what a read waits at most for a chunk that is on its way, however
	// steadily others come: maxBefore takes so long at 28 Mbit/s.
	maxOnWay = time.Second
)

// bringer brings chunks that no read has asked for: it is a request, or a start
// stream.
type bringer struct {
	size int64 // plain bytes of what it brings; used while that is announced

	mu      sync.Mutex // guards what follows
	brought int64      // of size, what has come or does not come
	moved   time.Time  // when something came last, or it was asked for
	slow    bool       // a read has waited for maxOnWay: none does any more
}

// newBringer returns one that brings so many bytes before what is announced.
func newBringer(first int64) *bringer { return &bringer{size: first, moved: time.Now()} }

// took notes that a chunk of n bytes has come, or was said not to come.
func (b *bringer) took(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.brought += n
	b.moved = time.Now()
}

// coming is one chunk that is on its way without a read having asked for it.
type coming struct {
	d      chunk.Digest
	i      int // the announcer's number of it
	by     *bringer
	before int64 // bytes that by brings before it
	done   chan struct{}
	came   bool // a store gave it, by whichever way; guarded by the memory's mu
}

// announce says that b brings chunk i, unless that is on its way already, or here.
func (d *Device) announce(b *bringer, i int) (c *coming, ok bool) {
	c = &coming{d: d.chunks[i].Digest, i: i, by: b, before: b.size, done: make(chan struct{})}
	return c, d.memory.expect(c)
}

// patience is how long a read that waits since began may go on to wait for c.
func (c *coming) patience(began time.Time, hedge time.Duration) time.Duration {
	b := c.by
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	most := began.Add(maxOnWay).Sub(now)
	b.slow = b.slow || most <= 0
	if b.slow || c.before-b.brought > maxBefore {
		return 0
	}
	return min(most, b.moved.Add(hedge).Sub(now))
}

// awaited is a chunk that reads wait for and that is on its way.
type awaited struct {
	f *flight
	c *coming
}

// hedged waits for chunks that are on their way, and fetches those that are late.
func (d *Device) hedged(ctx context.Context, onWay []awaited) {
	var g sync.WaitGroup // ends before the fetch that it is a part of
	defer g.Wait()
	began := time.Now()
	for {
		late, rest, wait := d.late(ctx, onWay, began)
		if len(late) > 0 {
			g.Go(func() { d.fetch(ctx, request{demanded: late}) })
		}
		if len(rest) == 0 {
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-rest[0].f.done:
		case <-rest[0].c.done:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		onWay = rest
	}
}

// late picks what must be fetched now. What is in rest may be waited for, for so
// long; what has come is nowhere.
func (d *Device) late(ctx context.Context, onWay []awaited, began time.Time) (late []*flight, rest []awaited, wait time.Duration) {
	wait = maxOnWay
	for _, w := range onWay {
		gone := isClosed(w.c.done) // looked at first: what comes ends its flights before
		if isClosed(w.f.done) {
			continue
		}
		left := w.c.patience(began, d.hedge)
		switch {
		case gone || ctx.Err() != nil:
			late = append(late, w.f)
		case left <= 0:
			d.count.hedged.add(int64(d.chunks[w.f.i].Len))
			late = append(late, w.f)
		default:
			rest = append(rest, w)
			wait = min(wait, left)
		}
	}
	return late, rest, wait
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
