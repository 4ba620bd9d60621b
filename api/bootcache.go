package api

import (
	"container/list"
	"sync"

	"golang.org/x/sync/singleflight"

	"quarry/store/chunk"
)

// maxBoots bounds the compressed bootstraps that are kept: at maxHeld each, the 16
// sent last at least.
const maxBoots = 64 << 20

// bootCache keeps the bootstraps sent last, verified and compressed, for the next
// start of the same image: reading, verifying and compressing 3 MB takes longer than
// sending them. They are named by digest and never change, so nothing in it ever
// goes stale. Safe for concurrent use; what it holds is not changed.
type bootCache struct {
	flight singleflight.Group

	mu    sync.Mutex // guards the rest
	order *list.List // of *sendable, last used first
	at    map[chunk.Digest]*list.Element
	bytes int
}

func newBootCache() *bootCache {
	return &bootCache{order: list.New(), at: map[chunk.Digest]*list.Element{}}
}

// get returns a bootstrap, or nil.
func (c *bootCache) get(d chunk.Digest) *sendable {
	c.mu.Lock()
	defer c.mu.Unlock()
	el, ok := c.at[d]
	if !ok {
		return nil
	}
	c.order.MoveToFront(el)
	return el.Value.(*sendable)
}

// add keeps a bootstrap that is held compressed; any other is left out.
func (c *bootCache) add(s *sendable) {
	if s.held == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.at[s.digest]; ok {
		return
	}
	c.at[s.digest] = c.order.PushFront(s)
	for c.bytes += len(s.held); c.bytes > maxBoots; {
		old := c.order.Remove(c.order.Back()).(*sendable)
		delete(c.at, old.digest)
		c.bytes -= len(old.held)
	}
}
