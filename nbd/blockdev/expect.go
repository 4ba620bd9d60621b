package blockdev

import (
	"errors"
	"fmt"
	"sync"

	"quarry/store/chunk"
)

// ErrRefused says that a delivered chunk was not expected, or is not what its
// digest says.
var ErrRefused = errors.New("delivery refused")

// Expected are chunks that somebody brings without having been asked for each,
// in the order in which they are going to be read. A read that meets one waits
// for it while others come, at most a second. Safe for concurrent use.
type Expected struct {
	d *Device

	mu   sync.Mutex // guards left
	left map[chunk.Digest]*coming
}

// Expect announces the chunks with these numbers. Numbers that the image does not
// have are left out. Whoever calls it calls End, whatever happens.
func (d *Device) Expect(numbers []uint32) *Expected {
	e := &Expected{d: d, left: make(map[chunk.Digest]*coming, min(len(numbers), len(d.chunks)))}
	by := newBringer(0)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return e
	}
	d.expected[e] = struct{}{}
	for _, n := range numbers {
		if int64(n) < int64(len(d.chunks)) && e.left[d.chunks[n].Digest] == nil {
			c, _ := d.announce(by, int(n)) // it comes, be it announced or not
			e.left[c.d] = c
			by.size += int64(d.chunks[n].Len)
		}
	}
	return e
}

// Deliver takes the plain bytes of an expected chunk, which are verified here, and
// the device's from now on, not to be changed. It is given to the reads that wait for
// it, and kept while there is room for chunks that nobody has read yet. Errors:
// ErrRefused.
func (e *Expected) Deliver(digest chunk.Digest, plain []byte) error {
	d := e.d
	e.mu.Lock()
	c := e.left[digest]
	delete(e.left, digest)
	e.mu.Unlock()
	if c == nil {
		d.count.startRefused.Add(1)
		return fmt.Errorf("%w: chunk %s was not expected, or has come before", ErrRefused, digest)
	}
	length := d.chunks[c.i].Len
	if len(plain) != int(length) || chunk.Sum(plain) != digest {
		d.count.startRefused.Add(1)
		d.memory.unexpect(c)
		return fmt.Errorf("%w: %d bytes are not chunk %s of %d", ErrRefused, len(plain), digest, length)
	}
	d.count.start.fetched.add(int64(length))
	d.count.ahead.fetched.add(int64(length))
	c.by.took(int64(length))
	a := arrival{d: digest, p: plain, tier: TierStart, coming: c, ahead: &d.count.ahead, patient: true}
	if got := d.arrive(a); got.fresh {
		d.offer(digest, plain, !got.waited)
	}
	return nil
}

// End says that no more chunks come: reads fetch by themselves what has not.
func (e *Expected) End() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.left {
		e.d.memory.unexpect(c)
	}
	clear(e.left)
	e.d.mu.Lock()
	delete(e.d.expected, e)
	e.d.mu.Unlock()
}
