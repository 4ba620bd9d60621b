package packed

import (
	"context"
	"sync"

	"quarry/store/chunk"
)

// rangeKey names bytes of a pack.
type rangeKey struct {
	pack      chunk.Digest
	off, size int64
}

// sharedRange is a range of a pack in memory, for every batch that asks for it while
// one of them has it. Its bytes do not change once done is closed.
type sharedRange struct {
	buf       *[]byte
	err       error         // of reading it
	abandoned bool          // whoever read it went away, which says nothing of the range
	done      chan struct{} // closed when the three above are set
	refs      int           // guarded by flights.mu; the last one gives buf back
}

// flights has a range that many batches want at once read from the bucket once, and
// held in memory once. Nothing is kept beyond the last of them: the bucket, or the
// cache before it, remembers.
type flights struct {
	mu     sync.Mutex // guards ranges and their refs
	ranges map[rangeKey]*sharedRange
}

// with calls use with the range, or with the error of reading it. fill reads it,
// this caller's or that of another one who wants the same now.
func (f *flights) with(ctx context.Context, k rangeKey, fill func(p []byte) error, use func(p []byte, err error) error) error {
	for {
		r, first := f.join(k)
		if first {
			*r.buf = grown(*r.buf, int(k.size))
			r.err = fill(*r.buf)
			r.abandoned = r.err != nil && ctx.Err() != nil
			f.filled(k, r)
		}
		select {
		case <-r.done:
		case <-ctx.Done():
			f.put(k, r)
			return ctx.Err()
		}
		if r.abandoned && ctx.Err() == nil {
			f.put(k, r)
			continue
		}
		defer f.put(k, r)
		return use(*r.buf, r.err)
	}
}

// join returns the range of that key and whether the caller has to fill it.
func (f *flights) join(k rangeKey) (r *sharedRange, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r, ok := f.ranges[k]; ok {
		r.refs++
		return r, false
	}
	r = &sharedRange{buf: buffers.Get().(*[]byte), done: make(chan struct{}), refs: 1}
	if f.ranges == nil {
		f.ranges = make(map[rangeKey]*sharedRange)
	}
	f.ranges[k] = r
	return r, true
}

// filled lets those go on who wait for a range. One that could not be read is read
// again for whoever comes now.
func (f *flights) filled(k rangeKey, r *sharedRange) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.err != nil {
		delete(f.ranges, k)
	}
	close(r.done)
}

// put gives a range back.
func (f *flights) put(k rangeKey, r *sharedRange) {
	f.mu.Lock()
	r.refs--
	last := r.refs == 0
	if last && f.ranges[k] == r {
		delete(f.ranges, k)
	}
	f.mu.Unlock()
	if last {
		buffers.Put(r.buf)
	}
}
