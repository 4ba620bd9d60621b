package cache_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"quarry/internal/proc"
	"quarry/store"
	"quarry/store/cache"
	"quarry/store/chunk"
)

// The contract of a device's disk tier.
var _ interface {
	ReadAt(d chunk.Digest, p []byte, off int64) error
	Offer(d chunk.Digest, p []byte)
	Drop(d chunk.Digest)
} = (*cache.Cache)(nil)

// content is the chunk of a number, always the same.
func content(n, size int) []byte {
	p := make([]byte, size+8)
	seed := [32]byte{}
	binary.LittleEndian.PutUint64(seed[:], uint64(n))
	rand.NewChaCha8(seed).Read(p)
	return p[:size:size]
}

// named is a chunk with its digest.
type named struct {
	chunk.Digest
	p []byte
}

func name(p []byte) named { return named{chunk.Sum(p), p} }

// chunks makes n chunks of a size, different from all with another first number.
func chunks(first, n, size int) []named {
	list := make([]named, n)
	for i := range list {
		list[i] = name(content(first+i, size))
	}
	return list
}

// list is what to pin for chunks.
func list(cs []named) []cache.Chunk {
	l := []cache.Chunk{}
	for _, c := range cs {
		l = append(l, cache.Chunk{Digest: c.Digest, Len: uint32(len(c.p))})
	}
	return l
}

// large is a limit that no test comes near to.
const large = 10 << 30

// open opens a cache, of a large limit unless cfg has one.
func open(t testing.TB, cfg cache.Config) *cache.Cache {
	t.Helper()
	if cfg.Limit == 0 {
		cfg.Limit = large
	}
	c, err := cache.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func put(t testing.TB, c *cache.Cache, cs ...named) {
	t.Helper()
	for _, n := range cs {
		if err := c.Put(context.Background(), n.Digest, n.p); err != nil {
			t.Fatal(err)
		}
	}
}

// offerAll offers chunks and waits until they are written.
func offerAll(t testing.TB, c *cache.Cache, cs ...named) {
	t.Helper()
	for _, n := range cs {
		c.Offer(n.Digest, n.p)
	}
	put(t, c, cs...)
}

func closed(t testing.TB, c *cache.Cache) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// has reads a whole chunk, and fails for wrong bytes.
func has(t testing.TB, c *cache.Cache, n named) bool {
	t.Helper()
	p := make([]byte, len(n.p))
	err := c.ReadAt(n.Digest, p, 0)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	if err == nil && !bytes.Equal(p, n.p) {
		t.Fatalf("chunk %s has other bytes", n.Digest)
	}
	return err == nil
}

func count(t testing.TB, c *cache.Cache, cs []named) int {
	t.Helper()
	n := 0
	for _, ch := range cs {
		if c.Has(ch.Digest) {
			n++
		}
	}
	return n
}

// folders are the file systems that every test of reading runs on.
func folders(t *testing.T, run func(t *testing.T, cfg cache.Config)) {
	t.Run("direct", func(t *testing.T) { run(t, cache.Config{Dir: t.TempDir()}) })
	t.Run("buffered", func(t *testing.T) { run(t, cache.Config{Dir: t.TempDir(), Buffered: true}) })
	t.Run("memory", func(t *testing.T) { run(t, cache.Config{FS: newMemFS()}) })
}

func TestAllRangesOfAllSizesAreReadBeforeAndAfterARestart(t *testing.T) {
	folders(t, func(t *testing.T, cfg cache.Config) {
		c := open(t, cfg)
		var all []named
		for i, size := range []int{1, 511, 512, 4095, 4096, 4097, 8192, 100_000, chunk.DefaultSize, chunk.DefaultSize + 1, 1 << 20, 3<<20 + 5, chunk.MaxSize} {
			all = append(all, name(content(i, size)))
		}
		offerAll(t, c, all...)
		for range 2 {
			for _, n := range all {
				if !has(t, c, n) {
					t.Fatalf("the chunk of %d bytes is missing", len(n.p))
				}
				rnd := rand.New(rand.NewPCG(1, uint64(len(n.p))))
				for range 50 {
					off := rnd.IntN(len(n.p) + 1)
					p := make([]byte, rnd.IntN(min(len(n.p)-off, 600_000)+1))
					if err := c.ReadAt(n.Digest, p, int64(off)); err != nil || !bytes.Equal(p, n.p[off:off+len(p)]) {
						t.Fatalf("%d bytes at %d of %d: %v, or other bytes", len(p), off, len(n.p), err)
					}
				}
				for _, r := range [][2]int{{0, len(n.p) + 1}, {len(n.p), 1}, {-1, 1}} {
					if err := c.ReadAt(n.Digest, make([]byte, r[1]), int64(r[0])); !errors.Is(err, store.ErrNotFound) {
						t.Errorf("%d bytes at %d of %d: %v, want ErrNotFound", r[1], r[0], len(n.p), err)
					}
				}
			}
			closed(t, c)
			if err := c.ReadAt(all[0].Digest, make([]byte, 1), 0); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("read after Close: %v", err)
			}
			c = open(t, cfg)
		}
		if s := c.Stats(); s.Chunks != int64(len(all)) || s.Segments != 1 {
			t.Errorf("%d chunks in %d segments after two restarts, want %d in 1", s.Chunks, s.Segments, len(all))
		}
	})
}

func TestWhatIsOfferedIsReadWhileTheDiskStands(t *testing.T) {
	m, gate := newMemFS(), make(chan struct{})
	c := open(t, cache.Config{FS: m})
	m.before = func(op, _ string) {
		if op == "create" {
			<-gate
		}
	}
	cs := chunks(0, 200, chunk.DefaultSize) // 50 MiB; the queue takes 32
	for _, n := range cs {
		c.Offer(n.Digest, n.p) // blocks for ever if it waits for the disk
	}
	for _, n := range cs[:100] {
		c.OfferSpeculative(n.Digest, n.p)
	}
	s := c.Stats()
	if s.QueuedBytes != 32<<20 || s.Refused != 200-128 {
		t.Errorf("%d bytes queued, %d chunks refused; want 32 MiB and 72", s.QueuedBytes, s.Refused)
	}
	for i, n := range cs {
		if got := has(t, c, n); got != (i < 128) {
			t.Errorf("chunk %d: read %t", i, got)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Put(ctx, cs[199].Digest, cs[199].p); !errors.Is(err, context.Canceled) {
		t.Errorf("Put to a full queue: %v, want the context's error", err)
	}
	if err := c.Give(ctx, cs[199].Digest, cs[199].p); !errors.Is(err, context.Canceled) {
		t.Errorf("Give to a full queue: %v, want the context's error", err)
	}
	given := make(chan error)
	go func() { given <- c.Give(t.Context(), cs[198].Digest, cs[198].p) }()
	c.Drop(cs[5].Digest)
	close(gate)
	if err := <-given; err != nil || !has(t, c, cs[198]) {
		t.Errorf("Give once there was room: %v", err)
	}
	closed(t, c)
	c = open(t, cache.Config{FS: m})
	for i, n := range cs {
		if got := has(t, c, n); got != (i < 128 && i != 5 || i == 198) {
			t.Errorf("chunk %d after a restart: read %t", i, got)
		}
	}
}

// TestChunksAndUsesAreWrittenTogether: what comes in short time costs one write,
// and who waits for his own does not wait for more.
func TestChunksAndUsesAreWrittenTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemFS()
		c := open(t, cache.Config{FS: m})
		n := chunks(0, 301, 5000)
		put(t, c, n[300])
		ops := map[string]int{}
		m.fail = func(op, _ string, _ int) (int, error) {
			ops[op]++
			return 0, nil
		}
		each := func(do func(named)) {
			for _, n := range n[:300] {
				do(n)
				time.Sleep(time.Millisecond)
			}
			time.Sleep(time.Second)
			synctest.Wait()
		}
		each(func(n named) { c.OfferSpeculative(n.Digest, n.p) })
		if ops["write"] > 4*4 || c.Stats().QueuedBytes > 0 {
			t.Errorf("%v for 300 chunks in 300 ms, %d bytes wait, want at most 4 writes of data, of an index, of a header", ops, c.Stats().QueuedBytes)
		}
		clear(ops)
		each(func(n named) { c.Touch(n.Digest) })
		if ops["open"] > 4 {
			t.Errorf("%v for 300 uses in 300 ms, want an index opened at most 4 times", ops)
		}
		start := time.Now()
		put(t, c, chunks(1000, 10, 5000)...)
		if took := time.Since(start); took > 0 {
			t.Errorf("10 Puts waited %v for others", took)
		}
	})
}

func TestSpeculationLeavesRoomInTheQueue(t *testing.T) {
	m, gate := newMemFS(), make(chan struct{})
	c := open(t, cache.Config{FS: m})
	m.before = func(op, _ string) {
		if op == "create" {
			<-gate
		}
	}
	for _, n := range chunks(0, 200, chunk.DefaultSize) {
		c.OfferSpeculative(n.Digest, n.p)
	}
	asked := chunks(1000, 64, chunk.DefaultSize)
	for _, n := range asked {
		c.Offer(n.Digest, n.p)
	}
	if got := count(t, c, asked); got != 64 {
		t.Errorf("%d of 64 chunks were queued behind speculation", got)
	}
	close(gate)
}

func TestDropped(t *testing.T) {
	folders(t, func(t *testing.T, cfg cache.Config) {
		c := open(t, cfg)
		n := chunks(0, 3, 5000)
		offerAll(t, c, n...)
		c.Drop(n[1].Digest)
		c.Drop(chunk.Digest{1})
		check := func(second bool) {
			t.Helper()
			if !has(t, c, n[0]) || has(t, c, n[1]) != second || !has(t, c, n[2]) {
				t.Errorf("chunks 0 and 2 must be there, and chunk 1: %t", second)
			}
		}
		check(false)
		closed(t, c)
		c = open(t, cfg)
		check(false)
		offerAll(t, c, n[1])
		check(true)
		closed(t, c)
		c = open(t, cfg)
		check(true)
	})
}

func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	c := open(t, cache.Config{Dir: dir})
	if _, err := cache.Open(cache.Config{Dir: dir, Limit: large}); !errors.Is(err, proc.ErrLocked) || !strings.Contains(err.Error(), dir) {
		t.Errorf("second Open: %v, want proc.ErrLocked and the folder's name", err)
	}
	closed(t, c)
	closed(t, open(t, cache.Config{Dir: dir}))
}

func TestWhatCannotBeOpened(t *testing.T) {
	for _, limit := range []int64{0, 1, cache.MinLimit - 1, cache.MaxLimit + 1, -1} {
		if _, err := cache.Open(cache.Config{Dir: t.TempDir(), Limit: limit}); err == nil || !strings.Contains(err.Error(), "limit") {
			t.Errorf("limit %d: %v", limit, err)
		}
	}
	file := t.TempDir() + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := cache.Open(cache.Config{Dir: file, Limit: large}); err == nil {
		t.Error("a file was opened as a cache")
	}
}

func TestChunksThatAreNotKept(t *testing.T) {
	c := open(t, cache.Config{FS: newMemFS(), Limit: cache.MinLimit})
	for _, size := range []int{0, chunk.DefaultSize + 1} {
		n := name(content(1, size))
		c.Offer(n.Digest, n.p)
		if err := c.Put(t.Context(), n.Digest, n.p); err == nil || errors.Is(err, store.ErrLocalDisk) {
			t.Errorf("put of %d bytes into the smallest cache: %v", size, err)
		}
	}
	if s := c.Stats(); s.Refused != 2 || s.Chunks != 0 {
		t.Errorf("%+v", s)
	}
}

func TestManyUseItAtOnce(t *testing.T) {
	folders(t, func(t *testing.T, cfg cache.Config) {
		cfg.Limit = cache.MinLimit
		c := open(t, cfg)
		all := chunks(0, 600, 100_000) // twice the limit
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(9, uint64(g)))
				for range 400 {
					n := all[rnd.IntN(len(all))]
					switch rnd.IntN(8) {
					case 0:
						c.OfferSpeculative(n.Digest, n.p)
					case 1:
						c.Drop(n.Digest)
					case 2:
						c.Touch(n.Digest)
						c.Stats()
					case 3:
						if err := c.Put(t.Context(), n.Digest, n.p); err != nil && !strings.Contains(err.Error(), "found bad") {
							t.Error(err)
						}
					case 4:
						if err := c.Pin(all[g].Digest, list(all[10*g:10*g+10])); err != nil {
							t.Error(err)
						}
						if rnd.IntN(2) == 0 {
							c.Unpin(all[g].Digest)
						}
						c.Pinned()
					default:
						if !has(t, c, n) {
							c.Offer(n.Digest, n.p)
						}
					}
				}
			})
		}
		wg.Wait()
		closed(t, c)
		if m, ok := cfg.FS.(*memFS); ok {
			if _, peak := m.took(); peak > cfg.Limit {
				t.Errorf("the files took %d bytes", peak)
			}
		}
		c = open(t, cfg)
		there := 0
		for _, n := range all {
			if has(t, c, n) {
				there++
			}
		}
		if s := c.Stats(); there == 0 || s.Chunks != int64(there) {
			t.Errorf("%d chunks can be read, the cache counts %d", there, s.Chunks)
		}
	})
}
