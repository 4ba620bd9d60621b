package cache

import (
	"cmp"
	"errors"
	"io/fs"
	"slices"
	"sync"

	"quarry/store/chunk"
)

// makeRoom evicts until there is room for one more segment. Two units stay free
// for what evictions keep: an eviction keeps at most half of what it frees, so
// while the kept chunks fill one segment, two of that size go; what is lost at
// segments' ends is at most an eighth (see maxChunk). So the files never take
// more than forSegments, and the loop ends.
func (w *writer) makeRoom() error {
	for {
		w.c.mu.RLock()
		over := w.c.over(3)
		w.c.mu.RUnlock()
		if !over {
			return nil
		}
		w.spare()
		s, keep := w.victim()
		if s == nil {
			return nil // only what is being filled: a few of the units
		}
		if err := w.evict(s, keep); err != nil {
			return err
		}
	}
}

// over reports whether less than the given number of units is free, or a bound of
// numbers is reached; mu is held.
func (c *Cache) over(units int64) bool {
	return c.taken() > c.forSegments()-units*c.sizes.unit ||
		c.entries > maxEntries-int(units*c.sizes.segment/pageSize) || len(c.t.segs) > maxSegments-int(units)
}

// taken is what all segments take of the disk; mu is held.
func (c *Cache) taken() int64 {
	n := int64(0)
	for _, s := range c.t.segs {
		if s != nil {
			n += s.size(c.sizes)
		}
	}
	return n
}

// forSegments is what all segments may take of the limit: less than sizes.segments
// while there are more lists of pins than a limit of today would take; mu is held.
func (c *Cache) forSegments() int64 { return c.sizes.limit - max(c.sizes.pinLists, c.pinFiles) }

// oldest returns the segments that are not being filled, oldest first; mu is
// held.
func (c *Cache) oldest() []*segment {
	var segs []*segment
	for _, s := range c.t.segs {
		if s != nil && !s.filling {
			segs = append(segs, s)
		}
	}
	slices.SortFunc(segs, func(a, b *segment) int { return cmp.Compare(a.age, b.age) })
	return segs
}

// inOrder returns them in the order in which they are evicted: the speculative
// first. mu is held.
func (c *Cache) inOrder() []*segment {
	segs := c.oldest()
	slices.SortStableFunc(segs, func(a, b *segment) int { return -cmp.Compare(a.class, b.class) })
	return segs
}

// weight is how many bytes of a segment are pinned, how many others protected,
// and how many of the rest have been used.
type weight struct{ pinned, protected, used int64 }

// weigh returns the weight of a segment; mu is held.
func (c *Cache) weigh(s *segment) (w weight) {
	for i := range s.entries {
		e := &s.entries[i]
		switch {
		case !c.t.live(s, i):
		case c.pins[e.digest].images > 0:
			w.pinned += e.space()
		case c.protected[e.digest] > 0:
			w.protected += e.space()
		case e.state == used:
			w.used += e.space()
		}
	}
	return w
}

// Protect has chunks stay before all others that are not pinned, once they are
// there, until release is called: what a pull brings must not go before it has
// brought the rest. It brings none and outlives no restart.
func (c *Cache) Protect(chunks []Chunk) (release func()) {
	count := func(by int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, ch := range chunks {
			if c.protected[ch.Digest] += by; c.protected[ch.Digest] == 0 {
				delete(c.protected, ch.Digest)
			}
		}
	}
	count(1)
	return sync.OnceFunc(func() { count(-1) })
}

// keeps is how many bytes of a segment an eviction keeps at most: half of it, or
// of a segment of today when a higher limit made this one larger.
func (c *Cache) keeps(s *segment) int64 { return min(s.size(c.sizes), c.sizes.unit) / 2 }

// victim chooses what to evict: the oldest segment of speculative chunks, else
// the oldest of all, but none of which more is pinned or protected than can be
// kept. When there is no such segment, protected chunks go first: where they are
// fewest. keep is how many bytes of it may be kept.
func (w *writer) victim() (s *segment, keep int64) {
	c := w.c
	c.mu.RLock()
	defer c.mu.RUnlock()
	var best *segment // of which protected chunks go
	leastProtected, leastPinned := int64(0), int64(0)
	for _, next := range c.inOrder() {
		n, keeps := c.weigh(next), c.keeps(next)
		if n.pinned+n.protected <= keeps {
			return next, keeps
		}
		if n.pinned <= keeps && (best == nil || n.protected < leastProtected) {
			best, leastProtected = next, n.protected
		}
		if s == nil || n.pinned < leastPinned {
			s, leastPinned = next, n.pinned
		}
	}
	if best != nil {
		return best, c.keeps(best)
	}
	// Only where the limit is lower than it was when the pins were made, or chunks
	// are larger than their pins say. The limit holds even then; what was pinned is
	// cached again when it is read.
	return s, 0
}

// maxSpared bounds the segments that are spared for one eviction, and how long
// that holds up readers: when everything is in use, something in use must go.
const maxSpared = 4

// spare gives segments of which more is in use than an eviction keeps a second
// chance as a whole, which costs no write: speculative ones are like others from
// now on, and others are counted as young and unused.
func (w *writer) spare() {
	c := w.c
	c.mu.Lock()
	var worth []*segment
	for i, s := range c.inOrder() {
		if i == maxSpared || !c.inUse(s) {
			break // this one can go
		}
		if s.class == speculative {
			s.class = demand
			worth = append(worth, s)
			continue
		}
		s.age = w.nextSeq
		w.nextSeq++
		for k := range s.entries {
			if e := &s.entries[k]; e.state == used {
				e.state = unused
			}
		}
	}
	c.mu.Unlock()
	for _, s := range worth { // where this fails, they are speculative again after a restart
		if err := w.writeHeader(s); err != nil {
			w.failed()
		}
	}
}

// inUse reports whether more of a segment is in use than an eviction keeps; mu
// is held.
func (c *Cache) inUse(s *segment) bool {
	n := c.weigh(s)
	return n.pinned+n.used > c.keeps(s)
}

func (w *writer) writeHeader(s *segment) error {
	f, err := w.c.fs.Open(indexName(s.seq), 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt(appendHeader(nil, header{s.seq, s.class}), 0)
	return err
}

// evict deletes a segment. Up to keep bytes of it, first what is pinned, then
// what is protected or was used, are written again to the one that is being filled.
func (w *writer) evict(s *segment, keep int64) error {
	pinned, others := w.kept(s, keep)
	err := w.copy(s, pinned)
	if err != nil && !errors.Is(err, errNoRoom) {
		return err
	}
	if err == nil {
		err = w.copy(s, others)
	}
	if err != nil {
		// The disk is full, perhaps: then these are what it takes to make room.
		w.failed()
	}
	w.delete(s)
	return nil
}

// errNoRoom says that faults have left so many half-filled segments that there
// is none for what an eviction keeps.
var errNoRoom = errors.New("no room for another segment")

// kept returns the numbers of the entries that survive an eviction.
func (w *writer) kept(s *segment, keep int64) (pinned, others []int) {
	c := w.c
	c.mu.RLock()
	defer c.mu.RUnlock()
	keep -= c.weigh(s).pinned
	var wereUsed []int
	for i := range s.entries {
		e := &s.entries[i]
		switch {
		case !c.t.live(s, i):
		case c.pins[e.digest].images > 0:
			if keep >= 0 {
				pinned = append(pinned, i)
			}
		case c.protected[e.digest] > 0:
			if keep >= e.space() {
				keep -= e.space()
				others = append(others, i)
			}
		case e.state == used:
			wereUsed = append(wereUsed, i)
		}
	}
	for _, i := range wereUsed {
		if e := &s.entries[i]; keep >= e.space() {
			keep -= e.space()
			others = append(others, i)
		}
	}
	return pinned, others
}

// copy writes chunks of s again, some at a time: those whose bytes are right, as far
// as names tell.
func (w *writer) copy(s *segment, numbers []int) error {
	var items []*item
	bytes := 0
	for n, i := range numbers {
		e := &s.entries[i] // unchanging but for its state
		p := alignedBuffer(int(e.space()))[:e.length]
		if w.c.readEntry(s, e, p, 0) == nil && (w.c.others || chunk.Sum(p) == e.digest) { // else it goes with the segment
			items = append(items, &item{digest: e.digest, plain: p, done: make(chan struct{})})
			bytes += len(p)
		}
		if bytes < writeSize && n < len(numbers)-1 {
			continue
		}
		if err := w.keep(items); err != nil {
			return err
		}
		items, bytes = nil, 0
	}
	return nil
}

// keep writes chunks that an eviction found worth it.
func (w *writer) keep(items []*item) error {
	for len(items) > 0 {
		if !w.fits(demand, items[0]) {
			w.seal(demand)
			w.c.mu.RLock()
			over := w.c.over(1)
			w.c.mu.RUnlock()
			if over {
				return errNoRoom
			}
			if err := w.begin(demand); err != nil {
				return err
			}
		}
		a := w.active[demand]
		n, _ := w.fitting(a, items)
		if err := w.append(a, items[:n]); err != nil {
			return err
		}
		w.c.mu.Lock()
		w.c.count.kept += int64(n)
		w.c.mu.Unlock()
		items = items[n:]
	}
	return nil
}

// delete removes a segment, the sidecar first: data without one is nothing.
func (w *writer) delete(s *segment) {
	c := w.c
	c.mu.Lock()
	chunks, bytes := c.t.drop(s)
	c.entries -= len(s.entries)
	c.count.chunks -= chunks
	c.count.bytes -= bytes
	c.count.evicted += chunks
	c.count.evictedBytes += bytes
	c.mu.Unlock()
	s.close()
	w.remove(indexName(s.seq))
	w.remove(dataName(s.seq))
}

func (w *writer) remove(name string) {
	if err := w.c.fs.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.undeleted = append(w.undeleted, name)
		w.failed()
	}
}
