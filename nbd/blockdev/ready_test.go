package blockdev_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"quarry/nbd/blockdev"
)

// What TryReadAt answers is what ReadAt would, and it asks nobody for it.
func TestReadyReadsAreThoseOfMemory(t *testing.T) {
	m := makeImage(t, 18)
	d := m.device(t)
	boot := make([]byte, len(m.boot))
	if !d.TryReadAt(boot, 0) || !bytes.Equal(boot, m.boot) {
		t.Error("the bootstrap is not ready")
	}
	data := m.img.Blob.MappedOff
	for _, off := range []int64{-1, data, data - 1, d.Size() - 1, d.Size()} {
		if d.TryReadAt(make([]byte, 2), off) {
			t.Errorf("2 bytes at %d are ready on a cold device of %d", off, d.Size())
		}
	}
	if n := m.store.batches.Load(); n > 0 {
		t.Fatalf("%d fetches", n)
	}
	checkRead(t, d, m.flat, data, 4096) // brings one chunk
	read := d.Stats().ReadBytes
	p := make([]byte, 4096)
	if !d.TryReadAt(p, data) || !bytes.Equal(p, m.flat[data:data+4096]) {
		t.Error("a chunk in memory is not ready")
	}
	if got := d.Stats().ReadBytes - read; got != 4096 {
		t.Errorf("%d bytes counted, want 4096", got)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	whole := m.device(t, func(c *blockdev.Config) { c.Memory = blockdev.NewMemory(1 << 30) })
	checkRead(t, whole, m.flat, 0, whole.Size())
	ready := 0
	for range 500 {
		off := rnd.Int64N(whole.Size())
		p := make([]byte, min(1+rnd.Int64N(100<<10), whole.Size()-off))
		if !whole.TryReadAt(p, off) {
			continue
		}
		ready++
		if !bytes.Equal(p, m.flat[off:off+int64(len(p))]) {
			t.Fatalf("%d bytes at %d are wrong", len(p), off)
		}
	}
	if ready != 500 {
		t.Errorf("%d of 500 reads of what is in memory were ready", ready)
	}
}
