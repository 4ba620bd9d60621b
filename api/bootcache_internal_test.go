package api

import (
	"encoding/binary"
	"testing"

	"quarry/store/chunk"
)

func TestBootstrapsThatAreKeptAreBounded(t *testing.T) {
	c := newBootCache()
	digest := func(i int) chunk.Digest { return chunk.Sum(binary.LittleEndian.AppendUint32(nil, uint32(i))) }
	const size, room = maxHeld, maxBoots / maxHeld
	for i := range room {
		c.add(&sendable{digest: digest(i), held: make([]byte, size)})
	}
	if c.get(digest(0)) == nil {
		t.Fatal("one that there is room for is not kept")
	}
	c.add(&sendable{digest: digest(room), held: make([]byte, size)})
	c.add(&sendable{digest: digest(room), held: make([]byte, size)})
	c.add(&sendable{digest: digest(room + 1)})
	for i, kept := range map[int]bool{0: true, 1: false, 2: true, room: true, room + 1: false} {
		if got := c.get(digest(i)) != nil; got != kept {
			t.Errorf("bootstrap %d: kept %t, want %t", i, got, kept)
		}
	}
	if c.bytes != maxBoots || len(c.at) != room || c.order.Len() != room {
		t.Errorf("%d bytes in %d and %d entries", c.bytes, len(c.at), c.order.Len())
	}
}
