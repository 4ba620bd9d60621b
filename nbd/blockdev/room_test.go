package blockdev_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"quarry/nbd/blockdev"
	"quarry/store/chunk"
)

// Half of a memory of 1 MiB is for what is fetched ahead; a Prefetch takes a
// quarter at once.
func TestAPrefetchThatWaitsForRoomKeepsNoneFromOthers(t *testing.T) {
	large, small := makeDirs(t, 1, 40, 15<<10), makeDirs(t, 1, 3, 512)
	synctest.Test(t, func(t *testing.T) {
		memory := blockdev.NewMemory(1 << 20)
		large.store.gate = func(ctx context.Context, _ []chunk.Digest) error { <-ctx.Done(); return ctx.Err() }
		d := large.device(t, func(c *blockdev.Config) { c.Memory = memory })
		var wg sync.WaitGroup
		for _, k := range []uint32{0, 17, 34} { // 255, 255 and 15 KiB of 512
			var ns []uint32
			for n := k; n < min(k+17, 35); n++ {
				ns = append(ns, n)
			}
			wg.Go(func() {
				if err := d.Prefetch(t.Context(), ns); err == nil {
					t.Errorf("prefetch of %v went through", ns)
				}
			})
			synctest.Wait()
		}
		if n := large.store.batches.Load(); n != 2 {
			t.Fatalf("%d requests are under way, want 2, and a third that waits", n)
		}
		other := small.device(t, func(c *blockdev.Config) { c.Memory, c.GroupBytes = memory, 1<<20 })
		checkRead(t, other, small.flat, small.dataOff(0), 512)
		synctest.Wait()
		if n := other.Stats().AheadFetched.Chunks; n != 2 {
			t.Errorf("%d neighbours of a read were fetched, want both", n)
		}
		d.Close()
		wg.Wait()
	})
}

// What one start stream announces and another does not bring is still awaited.
func TestTheEndOfOneStreamIsNotThatOfAnother(t *testing.T) {
	m := makeDirs(t, 1, 8, 4096)
	synctest.Test(t, func(t *testing.T) {
		d := m.device(t)
		first, second := d.Expect([]uint32{3}), d.Expect([]uint32{3, 4})
		defer first.End()
		if err := second.Deliver(m.img.Blob.Chunks[4].Digest, nil); !errors.Is(err, blockdev.ErrRefused) {
			t.Errorf("wrong bytes: %v", err)
		}
		second.End()
		var wg sync.WaitGroup
		wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(3), 4096) })
		synctest.Wait()
		if n := d.Stats().Requests; n != 0 {
			t.Errorf("%d requests for a chunk that a stream is about to bring", n)
		}
		m.deliver(t, first, 3)
		wg.Wait()
	})
}
