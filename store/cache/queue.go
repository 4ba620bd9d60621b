package cache

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"quarry/store"
	"quarry/store/chunk"
)

const (
	// maxQueue bounds the bytes that wait to be written: a third of a second at
	// 100 MB/s, and Close waits for no more.
	maxQueue = 32 << 20
	// maxQueued bounds their number: 32 MiB of chunks of 8 KiB.
	maxQueued = 4096
	// maxMarks bounds the states that wait to be written, 24 bytes each. One that
	// finds no room is only written when the same thing happens again after a
	// restart.
	maxMarks = 8192
)

// item is a chunk on its way to the disk.
type item struct {
	digest  chunk.Digest
	plain   []byte
	class   class
	used    atomic.Bool
	dropped bool          // guarded by Cache.mu
	done    chan struct{} // closed when it was written, or not
	err     error         // why not; set before done is closed
}

// mark says that the state of an entry is to be written.
type mark struct {
	seg *segment
	i   uint32
}

var (
	errFull   = errors.New("the disk cache's queue is full")
	errClosed = fmt.Errorf("disk cache is closed: %w", store.ErrLocalDisk)
	errPaused = fmt.Errorf("disk cache is not written for a while after a fault: %w", store.ErrLocalDisk)
	errBad    = errors.New("the chunk was found bad before it was written")
)

// enqueue puts a chunk in the queue and returns its item, or that of the same
// chunk which is there already; neither an item nor an error when the chunk is
// on the disk. With errFull it returns a channel that is closed when there may be
// room. mu is held.
func (c *Cache) enqueue(d chunk.Digest, p []byte, cl class, bound int64) (*item, <-chan struct{}, error) {
	if it := c.pending[d]; it != nil && len(it.plain) == len(p) {
		return it, nil, nil
	}
	if at := c.t.get(d); at.seg != 0 && int(c.t.at(at).length) == len(p) {
		return nil, nil, nil
	}
	switch n := int64(len(p)); {
	case n == 0 || n > c.sizes.maxChunk():
		return nil, nil, fmt.Errorf("chunk %s has %d bytes, this disk cache keeps those of 1 to %d", d, n, c.sizes.maxChunk())
	case c.closed:
		return nil, nil, errClosed
	case time.Now().Before(c.pausedTill):
		return nil, nil, errPaused
	case c.queueBytes+n > bound || len(c.pending) >= maxQueued:
		return nil, c.room, errFull
	}
	it := &item{digest: d, plain: p, class: cl, done: make(chan struct{})}
	c.pending[d] = it
	c.queue = append(c.queue, it)
	c.queueBytes += int64(len(p))
	c.newBytes += int64(len(p))
	return it, nil, nil
}

// mark has the state of an entry written; mu is held.
func (c *Cache) mark(s *segment, i uint32) {
	if len(c.marks) < maxMarks {
		c.marks = append(c.marks, mark{s, i})
		c.wakeWriter()
	}
	if len(c.marks) == maxMarks/2 {
		c.hurryWriter()
	}
}

// wakeWriter tells the writer that there is work, which may wait for more.
func (c *Cache) wakeWriter() {
	select {
	case c.wake <- struct{}{}:
	default: // it will look anyway
	}
}

// hurryWriter tells the writer that there is enough work, or somebody who waits
// for its end.
func (c *Cache) hurryWriter() {
	select {
	case c.hurry <- struct{}{}:
	default: // it is told already
	}
	c.wakeWriter()
}

// take returns the work there is, and whether there will be more.
func (c *Cache) take() (items []*item, marks []mark, more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, bytes := 0, int64(0)
	for n < len(c.queue) && bytes < takeBytes {
		bytes += int64(len(c.queue[n].plain))
		n++
	}
	items, c.queue = c.queue[:n:n], c.queue[n:]
	c.newBytes -= bytes
	if len(c.queue) == 0 {
		c.queue = nil
	}
	marks, c.marks = c.marks, nil
	return items, marks, !c.closed || len(c.queue) > 0
}

// finish ends the way of items, with the error of all of them or none. Those
// that were written are in the table by now, so that there is no moment at which
// they cannot be read.
func (c *Cache) finish(items []*item, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, it := range items {
		if c.pending[it.digest] == it {
			delete(c.pending, it.digest)
		}
		c.queueBytes -= int64(len(it.plain))
		if it.err = err; err != nil {
			c.count.refused++
		} else if it.dropped {
			it.err = errBad
		}
		close(it.done)
	}
	close(c.room)
	c.room = make(chan struct{})
}
