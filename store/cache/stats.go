package cache

import "time"

// Stats counts what a cache holds and what it did since Open.
type Stats struct {
	Limit       int64 // bytes
	DiskBytes   int64 // what the files take of it now, in whole pages
	Bytes       int64 // of the cached chunks
	Chunks      int64
	Segments    int64
	QueuedBytes int64 // offered and not yet written

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
	refused                     int64
	kept, evicted, evictedBytes int64
	writeErrors                 int64
}

// onDisk is what the files take of the disk; mu is held.
func (c *Cache) onDisk() int64 {
	n := c.pinFiles
	for _, s := range c.t.segs {
		if s != nil {
			n += s.dataEnd + align(s.indexEnd)
		}
	}
	return n
}

// Stats returns the counters.
func (c *Cache) Stats() Stats {
	c.mu.RLock()
	defer c.mu.RUnlock()
	s := Stats{
		Limit:        c.sizes.limit,
		DiskBytes:    c.onDisk(),
		Bytes:        c.count.bytes,
		Chunks:       c.count.chunks,
		QueuedBytes:  c.queueBytes,
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
