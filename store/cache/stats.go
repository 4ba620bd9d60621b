package cache

import "time"

// Stats counts what a cache holds and what it did since Open.
type Stats struct {
	Limit       int64 // bytes
	DiskBytes   int64 // what the segments take of it, or will when they are full
	Bytes       int64 // of the cached chunks
	Chunks      int64
	Segments    int64
	QueuedBytes int64 // offered and not yet written

	Hits, HitBytes int64
	Misses         int64 // reads of chunks that are not there, or not readable
	Dropped        int64 // copies found bad

	Refused      int64 // offers that were not written: queue full, disk failing, chunk too large
	Kept         int64 // chunks that survived an eviction
	Evicted      int64 // chunks
	EvictedBytes int64
	WriteErrors  int64
	Paused       bool // nothing is written for a while after a write failed

	PinnedImages int64
	PinnedBytes  int64 // of the chunks that are pinned, in whole pages, cached or not
	MaxPinned    int64
}

// counters are those of Stats that Cache.mu guards.
type counters struct {
	chunks, bytes               int64
	dropped, refused            int64
	kept, evicted, evictedBytes int64
	writeErrors                 int64
}

// Stats returns the counters.
func (c *Cache) Stats() Stats {
	c.mu.RLock()
	defer c.mu.RUnlock()
	s := Stats{
		Limit:        c.sizes.limit,
		DiskBytes:    c.taken(),
		Bytes:        c.count.bytes,
		Chunks:       c.count.chunks,
		QueuedBytes:  c.queueBytes,
		Hits:         c.hits.Load(),
		HitBytes:     c.hitBytes.Load(),
		Misses:       c.misses.Load(),
		Dropped:      c.count.dropped,
		Refused:      c.count.refused,
		Kept:         c.count.kept,
		Evicted:      c.count.evicted,
		EvictedBytes: c.count.evictedBytes,
		WriteErrors:  c.count.writeErrors,
		Paused:       time.Now().Before(c.pausedTill),
		PinnedImages: int64(len(c.images)),
		PinnedBytes:  c.pinnedBytes,
		MaxPinned:    c.sizes.pinned,
	}
	for _, seg := range c.t.segs {
		if seg != nil {
			s.Segments++
		}
	}
	return s
}
