package ranges

import (
	"context"
	"errors"

	"quarry/store/bucket"
)

// fetch is one read of the bucket, of whole blocks, for everybody who wants one of
// them while it runs.
type fetch struct {
	o        bucket.Object
	first, n int64 // blocks

	done   chan struct{} // closed when buf and err are set
	buf    []byte
	err    error
	cancel context.CancelFunc

	// Guarded by Cache.mu.
	refs      int
	cancelled bool
	orphan    bool // it is one of Cache.orphans
	ended     bool
}

// joined is a fetch, and which of its blocks a reader wants.
type joined struct {
	*fetch
	blocks []int64
}

// abandoned says that a fetch has failed because nobody waited for it any more. It is
// for who has seen done closed.
func (f *fetch) abandoned() bool { return errors.Is(f.err, context.Canceled) }

// join returns the fetches that bring blocks, which rise: those under way and, for the
// others, new ones. With look, blocks that the disk has got meanwhile are left for later.
func (c *Cache) join(ctx context.Context, o bucket.Object, want []int64, look bool) (fetches []joined, later []int64) {
	var begun []*fetch
	add := func(f *fetch, n int64) {
		if i := len(fetches) - 1; i >= 0 && fetches[i].fetch == f {
			fetches[i].blocks = append(fetches[i].blocks, n)
			return
		}
		f.refs++
		fetches = append(fetches, joined{f, []int64{n}})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range want {
		b := block{o.Key, n}
		if f := c.fetches[b]; f != nil && !f.cancelled {
			c.metrics.shared.Inc()
			add(f, n)
			continue
		}
		if look && c.disk.Has(b.name()) {
			later = append(later, n)
			continue
		}
		c.metrics.missed.Inc()
		if i := len(begun) - 1; i < 0 || !begun[i].extend(n) {
			begun = append(begun, &fetch{o: o, first: n, n: 1, done: make(chan struct{})})
		}
		f := begun[len(begun)-1]
		c.fetches[b] = f
		add(f, n)
	}
	for _, f := range begun {
		// What the reader's context says for the bucket counts; that it ends does not.
		var run context.Context
		run, f.cancel = context.WithCancel(context.WithoutCancel(ctx))
		c.work.Go(func() { c.run(run, f) })
	}
	return fetches, later
}

// extend makes n the last block of a fetch, if it is the next one and there is room.
func (f *fetch) extend(n int64) bool {
	if f.first+f.n != n || (f.n+1)*blockSize > maxFetch {
		return false
	}
	f.n++
	return true
}

// run reads the bucket and has the disk take what came.
func (c *Cache) run(ctx context.Context, f *fetch) {
	defer f.cancel()
	off := f.first * blockSize
	f.buf = make([]byte, min(f.n*blockSize, f.o.Size-off))
	f.err = c.bucket.ReadAt(ctx, f.o.Key, f.buf, off)
	c.metrics.fetches.Inc()
	if f.err == nil {
		c.metrics.fetchedBytes.Add(float64(len(f.buf)))
		c.keep(ctx, f)
	}
	c.end(f)
	close(f.done)
}

// end has nobody join a fetch any more, before anybody is told how it ended: who then
// asks again does not get its error.
func (c *Cache) end(f *fetch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.ended = true
	for n := f.first; n < f.first+f.n; n++ {
		if b := (block{f.o.Key, n}); c.fetches[b] == f {
			delete(c.fetches, b)
		}
	}
	if f.orphan {
		c.orphans--
	}
}

// keep gives the disk the blocks, before anybody is told that the fetch has ended: from
// then on they are read there.
func (c *Cache) keep(ctx context.Context, f *fetch) {
	wait := roomTime
	if c.slow.Load() {
		wait = 0
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for n := int64(0); n < f.n; n++ {
		p := f.buf[n*blockSize : min((n+1)*blockSize, int64(len(f.buf)))]
		err := c.disk.Give(ctx, block{f.o.Key, f.first + n}.name(), p)
		if err != nil {
			c.metrics.unkept.Inc()
		}
		c.slow.Store(errors.Is(err, context.DeadlineExceeded))
	}
}

// leave ends the use of a fetch. One that nobody waits for goes on all the same, unless
// there are many of those.
func (c *Cache) leave(f *fetch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.refs--
	if f.refs > 0 || f.ended || f.orphan {
		return
	}
	if c.orphans < maxOrphans {
		c.orphans++
		f.orphan = true
		return
	}
	f.cancelled = true
	f.cancel()
}
