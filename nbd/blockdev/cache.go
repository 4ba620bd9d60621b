package blockdev

import "container/list"

// cache keeps the plain bytes of the chunks used last. Not safe for concurrent
// use; the bytes are never changed, so they may outlive their place in it.
type cache struct {
	limit, used int64
	order       *list.List // of *cached, the one used last in front
	byChunk     map[int]*list.Element
}

type cached struct {
	i int
	p []byte
}

func newCache(limit int64) cache {
	if limit == 0 {
		limit = DefaultCacheBytes
	}
	return cache{limit: limit, order: list.New(), byChunk: map[int]*list.Element{}}
}

// get returns the bytes of chunk i, or nil.
func (c *cache) get(i int) []byte {
	e := c.byChunk[i]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).p
}

// add keeps the bytes of chunk i, which is not cached yet, as long as there is
// room.
func (c *cache) add(i int, p []byte) {
	c.byChunk[i] = c.order.PushFront(&cached{i: i, p: p})
	c.used += int64(len(p))
	for c.used > c.limit && c.order.Len() > 0 {
		last := c.order.Remove(c.order.Back()).(*cached)
		delete(c.byChunk, last.i)
		c.used -= int64(len(last.p))
	}
}
