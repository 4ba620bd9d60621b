package blockdev_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"quarry/nbd/blockdev"
	"quarry/store/chunk"
)

// deliver brings a chunk to those who expect it.
func (m *image) deliver(t *testing.T, e *blockdev.Expected, i int) {
	t.Helper()
	digest := m.img.Blob.Chunks[i].Digest
	if err := e.Deliver(digest, m.store.chunks[digest]); err != nil {
		t.Error(err)
	}
}

func TestReadWaitsForAnExpectedChunkWhileOthersCome(t *testing.T) {
	const hedge, most = blockdev.DefaultHedge, time.Second
	m := makeDirs(t, 1, 32, 4096)
	for _, c := range []struct {
		name     string
		then     func(d *blockdev.Device, e *blockdev.Expected)
		wait     time.Duration
		requests int64
		hedged   int64
	}{
		{"it is delivered", func(_ *blockdev.Device, e *blockdev.Expected) {
			time.Sleep(time.Millisecond)
			m.deliver(t, e, 3)
		}, time.Millisecond, 0, 0},
		{"nothing comes", func(*blockdev.Device, *blockdev.Expected) {}, hedge, 1, 1},
		{"the stream ends", func(_ *blockdev.Device, e *blockdev.Expected) { time.Sleep(time.Millisecond); e.End() }, time.Millisecond, 1, 0},
		{"wrong bytes are delivered", func(_ *blockdev.Device, e *blockdev.Expected) {
			if err := e.Deliver(m.img.Blob.Chunks[3].Digest, make([]byte, 4096)); !errors.Is(err, blockdev.ErrRefused) {
				t.Errorf("wrong bytes: got %v, want ErrRefused", err)
			}
		}, 0, 1, 0},
		{"another is delivered, and then nothing", func(_ *blockdev.Device, e *blockdev.Expected) {
			time.Sleep(hedge / 2)
			m.deliver(t, e, 4)
		}, hedge/2 + hedge, 1, 1},
		{"others are delivered before it", func(_ *blockdev.Device, e *blockdev.Expected) {
			for _, i := range []int{4, 5, 6, 7, 3} {
				time.Sleep(hedge - 1)
				m.deliver(t, e, i)
			}
		}, 5 * (hedge - 1), 0, 0},
		{"others trickle", func(_ *blockdev.Device, e *blockdev.Expected) {
			for i := 4; i < 24; i++ {
				time.Sleep(hedge - 1)
				m.deliver(t, e, i)
			}
		}, most, 1, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := m.device(t)
				numbers := []uint32{3, 3, 1 << 30}
				for n := range uint32(32) {
					numbers = append(numbers, n)
				}
				e := d.Expect(numbers)
				defer e.End()
				start := time.Now()
				var wg sync.WaitGroup
				wg.Go(func() {
					checkRead(t, d, m.flat, m.dataOff(3), 4096)
					if wait := time.Since(start); wait != c.wait {
						t.Errorf("the read waited %v, want %v", wait, c.wait)
					}
				})
				synctest.Wait()
				c.then(d, e)
				wg.Wait()
				if s := d.Stats(); s.Requests != c.requests || s.Errors != 0 || s.Hedged.Chunks != c.hedged || s.Twice.Chunks != 0 {
					t.Errorf("got %+v, want %d requests, %d hedged", s, c.requests, c.hedged)
				}
			})
		})
	}
}

// TestAStreamThatStallsOrTricklesDelaysOnce: what one read has waited for in vain
// the next ones do not wait for.
func TestAStreamThatStallsOrTricklesDelaysOnce(t *testing.T) {
	m := makeDirs(t, 1, 32, 4096)
	for name, trickle := range map[string]bool{"it stalls": false, "it trickles": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := m.device(t)
				e := d.Expect([]uint32{0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25})
				defer e.End()
				var wg sync.WaitGroup
				defer wg.Wait()
				wg.Go(func() {
					for i := 10; trickle && i < 26; i++ {
						time.Sleep(blockdev.DefaultHedge - 1)
						m.deliver(t, e, i)
					}
				})
				checkRead(t, d, m.flat, m.dataOff(0), 1)
				start := time.Now()
				for i := 1; i < 4; i++ {
					checkRead(t, d, m.flat, m.dataOff(i), 1)
				}
				if wait := time.Since(start); wait != 0 {
					t.Errorf("three reads waited %v for a stream that an earlier one has waited for in vain", wait)
				}
				if s := d.Stats(); s.Hedged.Chunks != 4 || s.Hedged.Bytes != 4*4096 || s.Store.Fetched.Chunks != 4 {
					t.Errorf("got %+v, want 4 chunks hedged", s)
				}
			})
		})
	}
}

// TestWhatIsFarBehindIsNotWaitedFor: a read waits for at most 8 MiB of others.
func TestWhatIsFarBehindIsNotWaitedFor(t *testing.T) {
	m := makeDirs(t, 1, 514, 16<<10)
	numbers := make([]uint32, 514)
	for i := range numbers {
		numbers[i] = uint32(i)
	}
	synctest.Test(t, func(t *testing.T) {
		d := m.device(t)
		e := d.Expect(numbers)
		defer e.End()
		start := time.Now()
		checkRead(t, d, m.flat, m.dataOff(513), 1)
		if wait, s := time.Since(start), d.Stats(); wait != 0 || s.Hedged.Chunks != 1 {
			t.Errorf("the read of what is behind 513 others waited %v: %+v", wait, s)
		}
		m.deliver(t, e, 0)
		var wg sync.WaitGroup
		wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(512), 1) })
		synctest.Wait()
		m.deliver(t, e, 512)
		wg.Wait()
		if s := d.Stats(); s.Hedged.Chunks != 1 || s.Requests != 1 {
			t.Errorf("the read of what is behind 511 others did not wait: %+v", s)
		}
	})
}

// TestWhatComesTwiceIsCounted: less Twice, each chunk was fetched once, whichever
// of two ways was quicker.
func TestWhatComesTwiceIsCounted(t *testing.T) {
	m := makeDirs(t, 1, 8, 4096)
	for name, first := range map[string]int{"the request ahead first": 0, "the hedge first": 1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var release [2]chan struct{}
				for k := range release {
					release[k] = make(chan struct{})
				}
				n := 0 // one request after the other begins
				d := m.device(t, func(c *blockdev.Config) {
					c.Chunks = getBatch(func(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
						k := n
						n++
						<-release[k]
						return m.store.GetBatch(ctx, ds, fn)
					})
				})
				var wg sync.WaitGroup
				wg.Go(func() {
					if err := d.Prefetch(t.Context(), []uint32{5, 6}); err != nil {
						t.Error(err)
					}
				})
				synctest.Wait()
				wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(5), 1) })
				time.Sleep(2 * blockdev.DefaultHedge)
				synctest.Wait()
				close(release[first])
				synctest.Wait()
				close(release[1-first])
				wg.Wait()
				synctest.Wait()
				s := d.Stats()
				one := blockdev.Count{Chunks: 1, Bytes: 4096}
				if s.Hedged != one || s.Twice != one || s.Store.Fetched.Chunks-s.Twice.Chunks != 2 {
					t.Errorf("got %+v, want one of 2 chunks hedged, and to have come twice", s)
				}
			})
		})
	}
}
