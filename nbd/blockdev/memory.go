package blockdev

import (
	"container/list"
	"sync"
	"sync/atomic"
	"time"

	"quarry/store/chunk"
)

const (
	// DefaultMemoryBytes is twice what a trace brings of a cold command before it
	// is read: `pip --version` touches 25 MB of plain chunks, and half of the room is
	// for chunks that nobody has read yet. The rest bridges the time until the other
	// pages of a chunk are read.
	DefaultMemoryBytes = 64 << 20
	// spentShare of the room is for chunks of which the kernel was given every block,
	// 8 MiB by default: it caches them itself, and no page is to be in memory twice.
	// What is kept serves what asks twice at once, such as two images with a chunk in
	// common.
	spentShare = 8
	// staleAfter is how long what was fetched ahead keeps others from being fetched
	// further ahead: programs read what a list brings for them within half a minute, or
	// not at all.
	staleAfter = 30 * time.Second
)

// Memory keeps verified plain chunks for the devices that share it, and knows
// which are on their way, so that no two devices fetch one chunk at the same
// time: chunks are named by their content. Its bytes are bounded. When room is
// needed, first go chunks of which every block was read, then those that were fetched
// ahead and not asked for, then those used longest ago. Safe for concurrent use; a
// chunk's bytes are never changed, so they may outlive their place here.
type Memory struct {
	limit int64
	tags  *blockTags
	// ahead bounds the bytes that are fetched before anybody asked, to half of
	// the room: more would push out what has not been used yet.
	ahead     *room
	diskSlots chan struct{} // reads of disks; see Device.diskRead
	diskAway  atomic.Int64  // until when disks are not asked, in Unix nanoseconds

	mu                  sync.Mutex // guards what follows
	bytes               int64
	spent, unused, live class
	at                  map[chunk.Digest]*held
	flights             map[chunk.Digest]*flight // chunks that reads wait for
	coming              map[chunk.Digest]*coming // chunks that come without having been asked for
}

// class is held chunks of one kind, the one used last in front.
type class struct {
	order list.List // of *held
	bytes int64
}

// held is a chunk in memory.
type held struct {
	d     chunk.Digest
	p     []byte
	came  time.Time
	given []uint64 // bit set of the blocks that were read
	left  int64    // blocks that were not
	ahead *aheadCounters
	class *class
	elem  *list.Element
}

// flight is one chunk that reads wait for. What follows done is set before it is
// closed and not changed after.
type flight struct {
	d     chunk.Digest
	i     int     // the owner's number of it
	owner *Device // which fetches it
	other *flight // another device's, in whose place it is
	done  chan struct{}
	p     []byte
	tier  Tier
	err   error // *ReadError
}

// NewMemory returns a memory of at most limit bytes; 0 means DefaultMemoryBytes,
// less than 0 one that keeps nothing and so fetches nothing ahead.
func NewMemory(limit int64) *Memory {
	if limit == 0 {
		limit = DefaultMemoryBytes
	}
	return &Memory{
		limit: limit, tags: newBlockTags(), ahead: newRoom(max(limit/2, 0)),
		diskSlots: make(chan struct{}, maxDiskReads),
		at:        map[chunk.Digest]*held{}, flights: map[chunk.Digest]*flight{}, coming: map[chunk.Digest]*coming{},
	}
}

// Bytes returns how many bytes of chunks are held.
func (m *Memory) Bytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bytes
}

// view returns the bytes of a chunk of which [in, in+n) is read, or nil, and
// whether this is the first read of what was fetched ahead. Another image's table
// may lie about the length: then it is not this image's chunk.
func (m *Memory) view(d chunk.Digest, length uint32, in, n int64) (p []byte, first bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.at[d]
	if h == nil || len(h.p) != int(length) {
		return nil, false
	}
	return h.p, m.give(h, in, n)
}

// holds reports whether a chunk is held.
func (m *Memory) holds(d chunk.Digest, length uint32) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.at[d]
	return h != nil && len(h.p) == int(length)
}

// given says that [in, in+n) of a chunk was read from elsewhere, and reports
// whether it was the first read of what was fetched ahead.
func (m *Memory) given(d chunk.Digest, in, n int64) (first bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h := m.at[d]
	return h != nil && m.give(h, in, n)
}

// give notes a read of a held chunk, and reports whether it is the first of what
// was fetched ahead. Called with mu held.
func (m *Memory) give(h *held, in, n int64) (first bool) {
	if first = h.ahead != nil; first {
		h.ahead.used.add(int64(len(h.p)))
		h.ahead = nil
	}
	for k := in / blockSize; k*blockSize < in+n; k++ {
		if bit := uint64(1) << (k % 64); h.given[k/64]&bit == 0 {
			h.given[k/64] |= bit
			h.left--
		}
	}
	if h.left > 0 {
		m.move(h, &m.live)
		return first
	}
	m.move(h, &m.spent)
	for m.spent.bytes > m.limit/spentShare {
		m.evict(&m.spent)
	}
	return first
}

// move makes h the chunk used last of a class. Called with mu held.
func (m *Memory) move(h *held, to *class) {
	if h.class == to {
		to.order.MoveToFront(h.elem)
		return
	}
	if h.class != nil {
		h.class.order.Remove(h.elem)
		h.class.bytes -= int64(len(h.p))
	}
	h.class, h.elem = to, to.order.PushFront(h)
	to.bytes += int64(len(h.p))
}

// evict drops the chunk of a class that was used longest ago and reports whether
// there was one. Called with mu held.
func (m *Memory) evict(c *class) bool {
	e := c.order.Back()
	if e == nil {
		return false
	}
	h := c.order.Remove(e).(*held)
	c.bytes -= int64(len(h.p))
	m.bytes -= int64(len(h.p))
	delete(m.at, h.d)
	if h.ahead != nil {
		h.ahead.unused.add(int64(len(h.p)))
	}
	return true
}

// arrival is a verified chunk and where it comes from.
type arrival struct {
	d      chunk.Digest
	p      []byte // not changed any more
	tier   Tier
	flight *flight        // that fetched it
	coming *coming        // or what announced it
	ahead  *aheadCounters // nil when a read asked for it
	// patient chunks wait for room: they come in the order in which they are going
	// to be used, so a later one must not push out an earlier.
	patient bool
}

// arrived is what a chunk met when it came.
type arrived struct {
	fresh  bool // it was not here
	waited bool // a read has waited for it
	again  bool // a store gave it another way while this one was under way
}

// arrive ends what waits for a chunk and keeps its bytes.
func (m *Memory) arrive(a arrival) (got arrived) {
	m.mu.Lock()
	defer m.mu.Unlock()
	got.waited = m.flights[a.d] != nil
	got.again = a.flight != nil && isClosed(a.flight.done) || a.coming != nil && a.coming.came
	for f := m.flights[a.d]; f != nil; f = f.other {
		f.end(a)
	}
	if a.flight != nil {
		a.flight.end(a) // when another device has taken its place
	}
	delete(m.flights, a.d)
	if c := m.coming[a.d]; c != nil {
		c.came = a.tier != TierDisk
		m.endComing(c)
	}
	if m.at[a.d] != nil {
		return got
	}
	got.fresh = true
	if got.waited && a.ahead != nil {
		a.ahead.used.add(int64(len(a.p)))
		a.ahead = nil
	}
	m.keep(a)
	return got
}

// end gives a flight its bytes, unless it has ended. Called with the memory's mu
// held.
func (f *flight) end(a arrival) {
	if !isClosed(f.done) {
		f.p, f.tier = a.p, a.tier
		close(f.done)
	}
}

// keep puts a chunk in memory as far as there is room. Called with mu held.
func (m *Memory) keep(a arrival) {
	size := int64(len(a.p))
	for m.bytes+size > m.limit && m.evict(&m.spent) {
	}
	if a.ahead != nil {
		for !a.patient && m.unused.bytes+size > m.limit/2 && m.evict(&m.unused) {
		}
		if m.unused.bytes+size > m.limit/2 || a.patient && m.bytes+size > m.limit {
			a.ahead.unused.add(size)
			return
		}
	}
	for m.bytes+size > m.limit && (m.evict(&m.unused) || m.evict(&m.live)) {
	}
	if m.bytes+size > m.limit {
		return
	}
	n := blocksOf(size)
	h := &held{d: a.d, p: a.p, came: time.Now(), given: make([]uint64, (n+63)/64), left: n, ahead: a.ahead}
	m.at[a.d] = h
	m.bytes += size
	if a.ahead != nil {
		m.move(h, &m.unused)
	} else {
		m.move(h, &m.live)
	}
}

// spare returns how many bytes may be fetched ahead without pushing out any that
// were fetched ahead before and may be read yet. What nobody has read for long
// makes room for a step.
func (m *Memory) spare() int64 {
	left := m.ahead.left()
	m.mu.Lock()
	defer m.mu.Unlock()
	for left-m.unused.bytes < maxStep {
		e := m.unused.order.Back()
		if e == nil || time.Since(e.Value.(*held).came) < staleAfter {
			break
		}
		m.evict(&m.unused)
	}
	return left - m.unused.bytes
}

// full reports whether chunks that wait for room would find none.
func (m *Memory) full() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	room := m.limit - m.bytes + m.spent.bytes
	return room < chunk.DefaultSize || m.limit/2-m.unused.bytes < chunk.DefaultSize
}

// fail ends a flight whose chunk cannot be had. Nothing of the error is kept.
func (m *Memory) fail(f *flight, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if isClosed(f.done) {
		return // it has come another way
	}
	if m.flights[f.d] == f { // another device may have taken its place
		delete(m.flights, f.d)
	}
	f.err = err
	close(f.done)
}

// expect says that a chunk is on its way, unless it is here or somebody fetches
// it already; it reports whether it was said.
func (m *Memory) expect(c *coming) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.at[c.d] != nil || m.flights[c.d] != nil || m.coming[c.d] != nil {
		return false
	}
	m.coming[c.d] = c
	return true
}

// unexpect says that a chunk does not come any more.
func (m *Memory) unexpect(c *coming) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.coming[c.d] == c {
		m.endComing(c)
	}
}

// endComing wakes those who wait for a chunk that is on its way. Called with mu
// held.
func (m *Memory) endComing(c *coming) {
	delete(m.coming, c.d)
	close(c.done)
}

// met splits flights that have not ended into those whose chunk is on its way
// anyway, and the rest.
func (m *Memory) met(fs []*flight) (onWay []awaited, rest []*flight) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range fs {
		if isClosed(f.done) {
			continue
		}
		if c := m.coming[f.d]; c != nil {
			onWay = append(onWay, awaited{f, c})
		} else {
			rest = append(rest, f)
		}
	}
	return onWay, rest
}
