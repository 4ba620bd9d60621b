package blockdev

import (
	"container/heap"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"quarry/store/chunk"
)

// Tier is where a chunk's bytes came from.
type Tier string

// The tiers, the nearest first.
const (
	TierMemory Tier = "memory" // the reader's memory
	TierDisk   Tier = "disk"   // the worker's cache disk
	TierStart  Tier = "start"  // delivered by a start stream
	TierStore  Tier = "store"  // a store node
)

// maxSlow is how many of the slowest reads a device remembers: a screen of them.
const maxSlow = 32

// Count counts chunks, or the reads of one, and their plain bytes.
type Count struct {
	Chunks int64
	Bytes  int64
}

// TierStats says what one tier gave. A read that touches three chunks counts as
// three.
type TierStats struct {
	Reads     int64 // answered
	ReadBytes int64 // of those answers
	Fetched   Count // whole chunks taken from it; memory has none
}

// Stats counts what a device did since New.
type Stats struct {
	ReadBytes int64 // asked of the device
	OwnBytes  int64 // of those, what is of the bootstrap, or zeros
	Touched   Count // distinct chunks that reads touched
	Memory    TierStats
	Disk      TierStats
	Start     TierStats
	Store     TierStats

	Requests     int64 // GetBatch calls
	DiskCorrupt  int64 // bad copies found on the disk and dropped
	DiskFailed   int64 // reads the disk failed or left unanswered
	StartRefused int64 // deliveries that were wrong or not asked for

	// Hedged are chunks that reads asked for although they were on their way, since
	// those were late. Twice are chunks that came both ways: Fetched counts them twice.
	Hedged Count
	Twice  Count

	AheadFetched Count // before any read asked for it
	AheadUsed    Count // of those, read later
	AheadUnused  Count // of those, gone from memory unread
	AheadFailed  int64 // chunks that could not be had, which failed no read

	// Errors counts the chunks that reads needed and could not get. Config.OnError is
	// told why.
	Errors int64
}

type count struct{ chunks, bytes atomic.Int64 }

func (c *count) add(n int64) {
	c.chunks.Add(1)
	c.bytes.Add(n)
}

func (c *count) load() Count { return Count{c.chunks.Load(), c.bytes.Load()} }

type tierCounters struct {
	reads, readBytes atomic.Int64
	fetched          count
}

func (c *tierCounters) load() TierStats {
	return TierStats{c.reads.Load(), c.readBytes.Load(), c.fetched.load()}
}

// aheadCounters follow what was fetched before a read asked for it.
type aheadCounters struct {
	fetched, used, unused count
	failed                atomic.Int64
}

type counters struct {
	readBytes, ownBytes, requests, missed, diskCorrupt, diskFailed, startRefused, errs atomic.Int64
	touched, hedged, twice                                                             count
	memory, disk, start, store                                                         tierCounters
	ahead                                                                              aheadCounters
}

func (c *counters) tier(t Tier) *tierCounters {
	switch t {
	case TierDisk:
		return &c.disk
	case TierStart:
		return &c.start
	case TierStore:
		return &c.store
	}
	return &c.memory
}

// read counts n bytes that a tier answered with.
func (c *counters) read(t Tier, n int) {
	k := c.tier(t)
	k.reads.Add(1)
	k.readBytes.Add(int64(n))
}

// Stats returns the counters.
func (d *Device) Stats() Stats {
	c := &d.count
	return Stats{
		ReadBytes: c.readBytes.Load(), OwnBytes: c.ownBytes.Load(), Touched: c.touched.load(),
		Memory: c.memory.load(), Disk: c.disk.load(), Start: c.start.load(), Store: c.store.load(),
		Requests: c.requests.Load(), DiskCorrupt: c.diskCorrupt.Load(), DiskFailed: c.diskFailed.Load(),
		StartRefused: c.startRefused.Load(), Hedged: c.hedged.load(), Twice: c.twice.load(),
		AheadFetched: c.ahead.fetched.load(), AheadUsed: c.ahead.used.load(), AheadUnused: c.ahead.unused.load(),
		AheadFailed: c.ahead.failed.Load(), Errors: c.errs.Load(),
	}
}

// SlowRead is one chunk that a read had to wait for.
type SlowRead struct {
	Number int // of the chunk in the image's chunk table
	Chunk  chunk.Digest
	Path   string // first file of the image that uses it; "" when not known
	Tier   Tier   // that answered; "" when none did
	Wait   time.Duration
	When   time.Time // it was answered
}

// slowest keeps the slowest reads.
type slowest struct {
	enough atomic.Int64 // what a read must have waited to be among them

	mu    sync.Mutex // guards reads
	reads slowHeap
}

type slowRead struct {
	i    int
	tier Tier
	wait time.Duration
	when time.Time
}

// slowHeap has the fastest of the slow reads in front.
type slowHeap []slowRead

func (h slowHeap) Len() int           { return len(h) }
func (h slowHeap) Less(i, j int) bool { return h[i].wait < h[j].wait }
func (h slowHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *slowHeap) Push(v any)        { *h = append(*h, v.(slowRead)) }
func (h *slowHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// note remembers that a read waited for chunk i since start.
func (s *slowest) note(i int, tier Tier, start time.Time) {
	now := time.Now()
	wait := now.Sub(start)
	if int64(wait) < s.enough.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	heap.Push(&s.reads, slowRead{i, tier, wait, now})
	if len(s.reads) > maxSlow {
		heap.Pop(&s.reads)
	}
	if len(s.reads) == maxSlow {
		s.enough.Store(int64(s.reads[0].wait))
	}
}

// Slowest returns the reads that waited longest, the slowest first.
func (d *Device) Slowest() []SlowRead {
	d.slow.mu.Lock()
	reads := slices.Clone(d.slow.reads)
	d.slow.mu.Unlock()
	slices.SortFunc(reads, func(a, b slowRead) int { return int(b.wait - a.wait) })
	out := make([]SlowRead, len(reads))
	for k, r := range reads {
		out[k] = SlowRead{r.i, d.chunks[r.i].Digest, d.paths.of(r.i), r.tier, r.wait, r.when}
	}
	return out
}
