package blockdev

import (
	"container/list"
	"sync"

	"quarry/store/chunk"
)

// DefaultCacheBytes holds 512 chunks of 256 KiB, what a command such as
// `pip --version` touches. The kernel caches pages above it, so it only has
// to bridge the reads of one chunk.
const DefaultCacheBytes = 128 << 20

// Cache keeps the verified plain bytes of the chunks used last. Devices share
// one: chunks are named by their content, so images that have a chunk in common
// have its bytes in common. Safe for concurrent use; the bytes are never
// changed, so they may outlive their place in it.
type Cache struct {
	limit int64

	mu    sync.Mutex // guards what follows
	used  int64
	order *list.List // of *cached, the one used last in front
	at    map[chunk.Digest]*list.Element
}

type cached struct {
	d chunk.Digest
	p []byte
}

// NewCache returns a cache of at most limit bytes; 0 means DefaultCacheBytes,
// less than 0 one that keeps nothing.
func NewCache(limit int64) *Cache {
	if limit == 0 {
		limit = DefaultCacheBytes
	}
	return &Cache{limit: limit, order: list.New(), at: map[chunk.Digest]*list.Element{}}
}

// get returns the bytes of a chunk, or nil.
func (c *Cache) get(d chunk.Digest) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.at[d]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).p
}

// add keeps the bytes of a chunk as long as there is room.
func (c *Cache) add(d chunk.Digest, p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at[d] != nil {
		return // another device was first
	}
	c.at[d] = c.order.PushFront(&cached{d: d, p: p})
	c.used += int64(len(p))
	for c.used > c.limit && c.order.Len() > 0 {
		last := c.order.Remove(c.order.Back()).(*cached)
		delete(c.at, last.d)
		c.used -= int64(len(last.p))
	}
}
