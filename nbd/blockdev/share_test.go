package blockdev_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
)

// gated is a store whose requests wait until the test lets them go.
type gated struct {
	m       *image
	release chan error // one value for each request
	asked   chan []chunk.Digest
}

func newGated(m *image) *gated {
	return &gated{m, make(chan error), make(chan []chunk.Digest, 1000)}
}

func (g *gated) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	g.asked <- ds
	select {
	case err := <-g.release:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	return g.m.store.GetBatch(ctx, ds, fn)
}

// twoDevices are devices of one image with one memory, as two images that have
// every chunk in common, each with a store of its own.
func twoDevices(t *testing.T, m *image) (d [2]*blockdev.Device, g [2]*gated) {
	memory := blockdev.NewMemory(0)
	for k := range d {
		g[k] = newGated(m)
		d[k] = m.device(t, func(c *blockdev.Config) { c.Memory, c.Chunks = memory, g[k] })
	}
	return d, g
}

func TestTwoImagesMakeOneFetch(t *testing.T) {
	m := makeImage(t, 30)
	synctest.Test(t, func(t *testing.T) {
		d, g := twoDevices(t, m)
		var wg sync.WaitGroup
		for n := range 32 {
			wg.Go(func() { checkRead(t, d[n%2], m.flat, m.dataOff(3), 100) })
		}
		synctest.Wait()
		if n := len(g[0].asked) + len(g[1].asked); n != 1 {
			t.Fatalf("%d requests under way for one chunk, want 1", n)
		}
		select {
		case g[0].release <- nil:
		case g[1].release <- nil:
		}
		wg.Wait()
		if a, b := d[0].Stats(), d[1].Stats(); a.Requests+b.Requests != 1 || a.Store.Reads != 16 || b.Store.Reads != 16 {
			t.Errorf("got %+v and %+v, want 1 request that answers 16 reads of each", a, b)
		}
	})
}

func TestAnotherImagesTroubleIsNotOurs(t *testing.T) {
	m := makeImage(t, 30)
	for name, trouble := range map[string]func(d *blockdev.Device, g *gated){
		"its store fails":      func(_ *blockdev.Device, g *gated) { g.release <- errors.New("no route") },
		"its store lacks it":   func(_ *blockdev.Device, g *gated) { g.release <- store.ErrNotFound },
		"its device is closed": func(d *blockdev.Device, _ *gated) { d.Close() },
		"its store is silent":  func(*blockdev.Device, *gated) { time.Sleep(6 * time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, g := twoDevices(t, m)
				var wg sync.WaitGroup
				wg.Go(func() { d[0].ReadAt(t.Context(), make([]byte, 10), m.dataOff(3)) }) // may fail
				synctest.Wait()
				for range 5 {
					wg.Go(func() { checkRead(t, d[1], m.flat, m.dataOff(3), 10) })
				}
				synctest.Wait()
				if len(g[1].asked) != 0 {
					t.Fatal("the second image asks although the first does")
				}
				trouble(d[0], g[0])
				synctest.Wait()
				g[1].release <- nil
				wg.Wait()
				if s := d[1].Stats(); s.Requests != 1 || s.Errors != 0 {
					t.Errorf("got %+v, want 1 request of its own for 5 reads, and no error", s)
				}
			})
		})
	}
}

// TestTheSlowFetchIsServedByTheQuick: a device that took over another's chunk
// serves that other's reads too.
func TestTheSlowFetchIsServedByTheQuick(t *testing.T) {
	m := makeImage(t, 30)
	synctest.Test(t, func(t *testing.T) {
		d, g := twoDevices(t, m)
		var wg sync.WaitGroup
		wg.Go(func() { checkRead(t, d[0], m.flat, m.dataOff(3), 10) })
		synctest.Wait()
		wg.Go(func() { checkRead(t, d[1], m.flat, m.dataOff(3), 10) })
		time.Sleep(6 * time.Second)
		synctest.Wait()
		g[1].release <- nil
		wg.Wait() // the first device's store never answers
	})
}

// TestATakeoverThatFailsHarmsNobody: the first device's fetch, which the second one
// took over in vain, ends its own reads.
func TestATakeoverThatFailsHarmsNobody(t *testing.T) {
	m := makeImage(t, 30)
	synctest.Test(t, func(t *testing.T) {
		d, g := twoDevices(t, m)
		var wg sync.WaitGroup
		wg.Go(func() { checkRead(t, d[0], m.flat, m.dataOff(3), 10) })
		synctest.Wait()
		wg.Go(func() {
			if err := d[1].ReadAt(t.Context(), make([]byte, 10), m.dataOff(3)); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("the second device got %v, want its store's answer", err)
			}
		})
		time.Sleep(6 * time.Second)
		synctest.Wait()
		g[1].release <- store.ErrNotFound
		synctest.Wait()
		g[0].release <- nil
		wg.Wait()
	})
}

// TestAnotherImagesLengthIsNotOurs: a chunk table that lies about a length gets an
// error, wherever the chunk is found, and the honest image its bytes.
func TestAnotherImagesLengthIsNotOurs(t *testing.T) {
	m := makeImage(t, 30)
	i := m.fullChunk(0)
	img, blob := *m.img, *m.img.Blob
	img.Blob, blob.Chunks = &blob, append([]rafs.Chunk(nil), blob.Chunks...)
	blob.Chunks[i].Len--
	synctest.Test(t, func(t *testing.T) {
		memory, g := blockdev.NewMemory(0), newGated(m)
		honest := m.device(t, func(c *blockdev.Config) { c.Memory, c.Chunks = memory, g })
		liar := m.device(t, func(c *blockdev.Config) { c.Memory, c.Image = memory, &img })
		lie := func(where string) {
			var re *blockdev.ReadError
			err := liar.ReadAt(t.Context(), make([]byte, 100), m.dataOff(i))
			if !errors.As(err, &re) || re.Outcome != store.Corrupt {
				t.Errorf("a wrong length, the chunk is %s: got %v, want a corrupt chunk", where, err)
			}
		}
		lie("at the store")
		var wg sync.WaitGroup
		wg.Go(func() { checkRead(t, honest, m.flat, m.dataOff(i), 100) })
		synctest.Wait()
		wg.Go(func() { lie("on its way to another image") })
		synctest.Wait()
		g.release <- nil
		wg.Wait()
		lie("in memory")
		checkRead(t, honest, m.flat, m.dataOff(i), 100)
	})
}

func TestHundredStalledFetchesHoldUpNoOther(t *testing.T) {
	m := makeImage(t, 400)
	synctest.Test(t, func(t *testing.T) {
		chunks := m.img.Blob.Chunks
		stalled := map[chunk.Digest]bool{}
		for i := 0; i < 200; i += 2 {
			stalled[chunks[i].Digest] = true
		}
		heal := make(chan struct{})
		d := m.device(t, func(c *blockdev.Config) {
			c.GroupBytes = 0 // with neighbours
			c.Chunks = getBatch(func(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
				for _, digest := range ds {
					if stalled[digest] {
						<-heal
					}
					if err := fn(digest, m.store.chunks[digest], nil); err != nil {
						return err
					}
				}
				return nil
			})
		})
		var wg sync.WaitGroup
		for i := 0; i < 200; i += 2 {
			wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(i), 100) })
		}
		synctest.Wait()
		for i := 1; i < len(chunks); i++ { // hangs when it waits for one of the 100
			if !stalled[chunks[i].Digest] {
				checkRead(t, d, m.flat, m.dataOff(i), 100)
			}
		}
		close(heal)
		wg.Wait()
	})
}

func TestOutcomesAreCountedAndTold(t *testing.T) {
	m := makeImage(t, 30)
	chunks := m.img.Blob.Chunks
	errs := map[store.Outcome]error{
		store.Corrupt:      &store.CorruptError{Want: chunks[0].Digest},
		store.Missing:      store.ErrNotFound,
		store.Unreachable:  store.ErrUnreachable,
		store.Unauthorised: store.ErrUnauthorised,
	}
	for want, err := range errs {
		t.Run(string(want), func(t *testing.T) {
			var told *blockdev.ReadError
			d := m.device(t, func(c *blockdev.Config) {
				c.OnError = func(e *blockdev.ReadError) { told = e }
				c.Chunks = getBatch(func(context.Context, []chunk.Digest, func(chunk.Digest, []byte, error) error) error { return err })
			})
			var re *blockdev.ReadError
			if got := d.ReadAt(t.Context(), make([]byte, 1), m.dataOff(0)); !errors.As(got, &re) || re != told || re.Outcome != want {
				t.Errorf("got %v, told %v, want outcome %s", got, told, want)
			}
			if s := d.Stats(); s.Errors != 1 {
				t.Errorf("got %+v", s)
			}
			if slow := d.Slowest(); len(slow) != 1 || slow[0].Tier != "" || slow[0].Number != 0 || slow[0].Path == "" {
				t.Errorf("the slowest reads are %+v, want the failed one", slow)
			}
		})
	}
}

func TestTouchIsToldOnceAndInOrder(t *testing.T) {
	m := makeImage(t, 60)
	var touched []int
	d := m.device(t, func(c *blockdev.Config) {
		c.GroupBytes = 0
		c.OnTouch = func(i int) { touched = append(touched, i) }
	})
	for _, i := range []int{5, 3, 5, 9, 3} {
		checkRead(t, d, m.flat, m.dataOff(i), 1)
	}
	if len(touched) != 3 || touched[0] != 5 || touched[1] != 3 || touched[2] != 9 {
		t.Errorf("touched %v, want 5, 3, 9: neighbours that were fetched with them are not touched", touched)
	}
	if s := d.Stats(); s.Touched.Chunks != 3 {
		t.Errorf("got %+v", s.Touched)
	}
}

func TestSlowestReadsNameTheirFile(t *testing.T) {
	m := makeImage(t, 60)
	synctest.Test(t, func(t *testing.T) {
		delay := map[chunk.Digest]time.Duration{}
		for i, c := range m.img.Blob.Chunks {
			delay[c.Digest] = time.Duration(i) * time.Millisecond
		}
		m.store.gate = func(_ context.Context, ds []chunk.Digest) error { time.Sleep(delay[ds[0]]); return nil }
		defer func() { m.store.gate = nil }()
		d := m.device(t)
		for i := range m.img.Blob.Chunks {
			checkRead(t, d, m.flat, m.dataOff(i), 1)
		}
		slow := d.Slowest()
		if len(slow) != 32 {
			t.Fatalf("%d slow reads kept, want 32", len(slow))
		}
		for k, r := range slow {
			i := len(m.img.Blob.Chunks) - 1 - k
			if r.Number != i || r.Wait != time.Duration(i)*time.Millisecond || r.Tier != blockdev.TierStore || r.Path == "" {
				t.Errorf("slow read %d is %+v, want chunk %d", k, r, i)
			}
		}
	})
}
