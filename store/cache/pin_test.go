package cache_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"quarry/store/cache"
	"quarry/store/chunk"
)

// TestALowerLimitKeepsPins opens a cache whose pins fill its share with a quarter
// of its limit, and then as it was: no pin is lost, and the limits hold.
func TestALowerLimitKeepsPins(t *testing.T) {
	m := newMemFS()
	high := cache.Config{FS: m, Limit: 4 * cache.MinLimit}
	c := open(t, high)
	small, large := chunks(0, 30, 100_000), chunks(100, 500, 100_000)
	for i, mine := range [][]named{small, large} {
		if err := c.Pin(chunk.Digest{byte(i + 1)}, list(mine)); err != nil {
			t.Fatal(err)
		}
	}
	offerAll(t, c, append(small, large...)...)
	closed(t, c)
	var log bytes.Buffer
	low := cache.Config{FS: m, Limit: cache.MinLimit, Log: slog.New(slog.NewTextHandler(&log, nil))}
	c = open(t, low)
	if n, _ := m.took(); n > low.Limit {
		t.Errorf("opened, the files take %d bytes of %d", n, low.Limit)
	}
	for _, word := range []string{"--unpin", "--cache-size", "pinned_bytes"} {
		if !strings.Contains(log.String(), word) {
			t.Errorf("%q is missing in the log:\n%s", word, log.String())
		}
	}
	for i := range 800 {
		put(t, c, chunks(10_000+i, 1, 100_000)...)
		if i%4 == 0 {
			put(t, c, large[i/4])
		}
		if n, _ := m.took(); n > low.Limit {
			t.Fatalf("the files take %d bytes of %d", n, low.Limit)
		}
	}
	p := c.Pinned()
	if len(p) != 2 || p[0].Chunks != 30 || p[1].Chunks != 500 || p[1].Cached >= 500 || p[1].CachedBytes >= p[1].Bytes {
		t.Errorf("with the lower limit: %+v; want both pins, not all of it cached", p)
	}
	var limit *cache.PinLimitError
	if err := c.Pin(chunk.Digest{3}, list(chunks(5000, 1, 100))); !errors.As(err, &limit) {
		t.Errorf("another pin: %v, want none beyond the limit", err)
	}
	if err := c.Pin(chunk.Digest{2}, list(large[:499])); !errors.As(err, &limit) || len(c.Pinned()) != 2 || c.Pinned()[1].Chunks != 500 {
		t.Errorf("a refused change of a pin: %v, %+v", err, c.Pinned())
	}
	closed(t, c)
	c = open(t, high)
	put(t, c, append(small, large...)...)
	for i := range 1500 {
		put(t, c, chunks(50_000+i, 1, 100_000)...)
	}
	for _, p := range c.Pinned() {
		if p.Cached != p.Chunks {
			t.Errorf("as before: %+v; want all of it", p)
		}
	}
}

// TestPinsWhoseListsAreTooManyAreNoReasonToDeleteThem opens a cache whose lists
// alone are more than a lower limit can hold.
func TestPinsWhoseListsAreTooManyAreNoReasonToDeleteThem(t *testing.T) {
	m := newMemFS()
	high := cache.Config{FS: m, Limit: 64 * cache.MinLimit}
	c := open(t, high)
	var long []cache.Chunk
	for i := range 60_000 { // 2 MB of list
		long = append(long, cache.Chunk{Digest: chunk.Digest{1, byte(i), byte(i >> 8), byte(i >> 16)}, Len: 1})
	}
	images := 6
	for i := range images {
		if err := c.Pin(chunk.Digest{byte(i + 1)}, long); err != nil {
			t.Fatal(err)
		}
	}
	closed(t, c)
	var limit *cache.PinLimitError
	if c, err := cache.Open(cache.Config{FS: m, Limit: cache.MinLimit}); !errors.As(err, &limit) || !limit.Lists || !strings.Contains(err.Error(), "--cache-size") {
		t.Errorf("opened as %v, error %v; want a limit", c, err)
	}
	// With more, segments make room for the lists.
	low := cache.Config{FS: m, Limit: 2 * cache.MinLimit}
	c = open(t, low)
	for i := range 800 {
		put(t, c, chunks(10_000+i, 1, 100_000)...)
		if n, _ := m.took(); n > low.Limit {
			t.Fatalf("the files take %d bytes of %d", n, low.Limit)
		}
	}
	closed(t, c)
	if c = open(t, high); len(c.Pinned()) != images {
		t.Errorf("%d images are pinned, want %d", len(c.Pinned()), images)
	}
}

func TestAPinThatCannotBeReadNowIsThereLater(t *testing.T) {
	m := newMemFS()
	c := open(t, cache.Config{FS: m})
	if err := c.Pin(chunk.Digest{1}, list(chunks(0, 3, 10))); err != nil {
		t.Fatal(err)
	}
	closed(t, c)
	m.fail = func(op, name string, _ int) (int, error) {
		if op == "read" && strings.HasSuffix(name, ".pin") {
			return 0, syscall.EIO
		}
		return 0, nil
	}
	c = open(t, cache.Config{FS: m})
	if len(c.Pinned()) != 0 {
		t.Error("the disk did not fail: nothing is shown")
	}
	closed(t, c)
	m.fail = nil
	if c = open(t, cache.Config{FS: m}); len(c.Pinned()) != 1 {
		t.Error("the pin is gone")
	}
}

// TestWhatIsProtectedStaysWhileItIs brings in an image that fits, beside one
// whose chunks have all been used.
func TestWhatIsProtectedStaysWhileItIs(t *testing.T) {
	for what, pin := range map[string]int{"beside used chunks": 0, "and pinned ones": 60} {
		t.Run(what, func(t *testing.T) {
			m := newMemFS()
			c := open(t, cache.Config{FS: m, Limit: cache.MinLimit})
			old := chunks(0, 200, 100_000)
			offerAll(t, c, old...)
			for _, n := range old {
				has(t, c, n)
			}
			if err := c.Pin(chunk.Digest{1}, list(old[:pin])); err != nil {
				t.Fatal(err)
			}
			fresh := chunks(1000, 200-2*pin, 100_000) // up to 20 MB of 32 MiB
			release := c.Protect(list(fresh))
			for i, n := range fresh {
				put(t, c, n, chunks(5000+i, 1, 100_000)[0])
				for _, o := range old { // it stays in use
					c.Touch(o.Digest)
				}
			}
			if got := count(t, c, fresh); got != len(fresh) {
				t.Errorf("%d of %d protected chunks are there", got, len(fresh))
			}
			if got := count(t, c, old[:pin]); got != pin {
				t.Errorf("%d of %d pinned chunks are there", got, pin)
			}
			// More than there is room for: pins go before.
			more := chunks(20_000, 400, 100_000)
			releaseMore := c.Protect(list(more))
			put(t, c, more...)
			if got := count(t, c, old[:pin]); got != pin {
				t.Errorf("%d of %d pinned chunks are there", got, pin)
			}
			releaseMore()
			release()
			release()
			for i := range 1000 {
				put(t, c, chunks(40_000+i, 1, 100_000)...)
			}
			if got := count(t, c, fresh) + count(t, c, more); got != 0 {
				t.Errorf("%d chunks are there that nothing protects any more", got)
			}
			if _, peak := m.took(); peak > cache.MinLimit {
				t.Errorf("the files took %d bytes", peak)
			}
		})
	}
}

// TestDiskBytesAreThoseOfTheDisk also while segments fill, and with pins.
func TestDiskBytesAreThoseOfTheDisk(t *testing.T) {
	m := newMemFS()
	c := open(t, cache.Config{FS: m, Limit: cache.MinLimit})
	if err := c.Pin(chunk.Digest{1}, list(chunks(0, 200, 100))); err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		put(t, c, chunks(i, 1, 1+i*500)...)
		if now, _ := m.took(); c.Stats().DiskBytes != now {
			t.Fatalf("after %d chunks: %d bytes, the files take %d", i+1, c.Stats().DiskBytes, now)
		}
	}
}
