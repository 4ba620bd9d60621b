package cache_test

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"quarry/store/cache"
	"quarry/store/chunk"
)

// folderSize is what a folder's files take, the larger of length and blocks.
func folderSize(t *testing.T, dir string) int64 {
	t.Helper()
	total := int64(0)
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		st, err := os.Stat(path)
		if err == nil {
			total += max(st.Size(), st.Sys().(*syscall.Stat_t).Blocks*512)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return total
}

func TestTheFolderStaysWithinItsLimit(t *testing.T) {
	for what, cfg := range map[string]cache.Config{"direct": {}, "buffered": {Buffered: true}} {
		t.Run(what, func(t *testing.T) {
			cfg.Dir, cfg.Limit = t.TempDir(), cache.MinLimit
			c := open(t, cfg)
			rnd := rand.New(rand.NewPCG(1, 1))
			for i := range 60 { // each 1.2 to 2.2 MiB, twice the limit and more
				var some []named
				for k := range 17 {
					some = append(some, name(content(1000*i+k, 1+rnd.IntN(chunk.DefaultSize))))
				}
				offerAll(t, c, some...)
				for _, n := range some[:6] {
					c.ReadAt(n.Digest, make([]byte, 10), 0)
				}
				if size := folderSize(t, cfg.Dir); size > cfg.Limit {
					t.Fatalf("the folder has %d bytes, its limit is %d", size, cfg.Limit)
				}
			}
			s := c.Stats()
			if s.Evicted == 0 || s.Kept == 0 || s.Bytes < cfg.Limit/2 {
				t.Errorf("a test of eviction needs some, and a cache of use holds half of its limit: %+v", s)
			}
		})
	}
}

// TestTheLimitHoldsAtEveryMoment watches each write, in a folder whose chunks are
// of the sizes that waste most.
func TestTheLimitHoldsAtEveryMoment(t *testing.T) {
	for what, size := range map[string]int{"one byte": 1, "one page": page, "a page and a byte": page + 1, "the largest": chunk.DefaultSize, "mixed": 0} {
		t.Run(what, func(t *testing.T) {
			m := newMemFS()
			c := open(t, cache.Config{FS: m, Limit: cache.MinLimit})
			rnd := rand.New(rand.NewPCG(1, 2))
			for i := 0; c.Stats().EvictedBytes == 0 || c.Stats().Evicted < 2*c.Stats().Chunks; i++ {
				n := size
				if n == 0 {
					n = 1 + rnd.IntN(chunk.DefaultSize)
				}
				p := content(i, n)
				if n == 1 {
					p = content(i, 8) // there are not many chunks of one byte
				}
				ch := name(p)
				c.Offer(ch.Digest, ch.p)
				if rnd.IntN(3) > 0 {
					c.Touch(ch.Digest)
				}
				if i%64 == 0 {
					put(t, c, ch)
				}
			}
			if _, peak := m.took(); peak > cache.MinLimit {
				t.Errorf("the files took %d bytes, the limit is %d", peak, int64(cache.MinLimit))
			}
		})
	}
}

func TestWhatWasUsedOutlivesWhatWasNot(t *testing.T) {
	for what, wasUsed := range map[string]func(i int) bool{
		"each third":          func(i int) bool { return i%3 == 0 },
		"the whole oldest":    func(i int) bool { return i < 20 },
		"all but a few of it": func(i int) bool { return i < 17 },
	} {
		t.Run(what, func(t *testing.T) {
			cfg := cache.Config{FS: newMemFS(), Limit: cache.MinLimit}
			c := open(t, cfg)
			old := chunks(0, 60, 100_000) // 20 in each of the first segments
			offerAll(t, c, old...)
			var inUse, others []named
			for i, n := range old {
				if wasUsed(i) {
					has(t, c, n)
					inUse = append(inUse, n)
				} else if i >= 20 {
					others = append(others, n)
				}
			}
			closed(t, c) // who was used is known after a restart
			c = open(t, cfg)
			for i := 0; c.Has(old[59].Digest); i++ {
				offerAll(t, c, chunks(1000+i, 1, 100_000)...)
			}
			if got := count(t, c, inUse); got != len(inUse) {
				t.Errorf("%d of %d used chunks are there", got, len(inUse))
			}
			if got := count(t, c, others); got != 0 {
				t.Errorf("%d unused chunks are there, though as old", got)
			}
		})
	}
}

func TestASecondChanceIsNotAThird(t *testing.T) {
	c := open(t, cache.Config{FS: newMemFS(), Limit: cache.MinLimit})
	old := chunks(0, 10, 100_000)
	offerAll(t, c, old...)
	for _, n := range old {
		has(t, c, n)
	}
	for i := 0; count(t, c, old) > 0; i++ {
		if i == 2000 {
			t.Fatal("chunks that were used once stay for ever")
		}
		offerAll(t, c, chunks(1000+i, 1, 100_000)...)
	}
}

func TestUnusedSpeculationGoesFirst(t *testing.T) {
	m := newMemFS()
	cfg := cache.Config{FS: m, Limit: cache.MinLimit}
	c := open(t, cfg)
	old := chunks(0, 80, 100_000)
	offerAll(t, c, old...)
	guessed := chunks(1000, 100, 100_000) // younger than old, 5 segments
	for _, n := range guessed {
		c.OfferSpeculative(n.Digest, n.p)
	}
	put(t, c, guessed...)
	for i, n := range guessed { // each fifth is used, by reading or otherwise
		if i%10 == 0 {
			has(t, c, n)
		} else if i%10 == 5 {
			c.Touch(n.Digest)
		}
	}
	closed(t, c)
	c = open(t, cfg)
	for i := 0; c.Stats().Evicted < 60; i++ {
		offerAll(t, c, chunks(5000+i, 1, 100_000)...)
	}
	if got := count(t, c, old); got != 80 {
		t.Errorf("%d of 80 chunks that were asked for are there", got)
	}
	unused := 0
	for i, n := range guessed {
		if c.Has(n.Digest) && i%5 != 0 {
			unused++
		} else if !c.Has(n.Digest) && i%5 == 0 {
			t.Errorf("speculative chunk %d was used, and is gone", i)
		}
	}
	if unused > 20 {
		t.Errorf("%d of 80 unused speculative chunks are left, %d chunks were evicted", unused, c.Stats().Evicted)
	}
}

func TestSpeculationThatWasRightIsLikeTheRest(t *testing.T) {
	c := open(t, cache.Config{FS: newMemFS(), Limit: cache.MinLimit})
	guessed := chunks(0, 60, 100_000)
	for _, n := range guessed {
		c.OfferSpeculative(n.Digest, n.p)
	}
	put(t, c, guessed...)
	for _, n := range guessed[:50] {
		c.Touch(n.Digest)
	}
	old := chunks(1000, 170, 100_000)
	offerAll(t, c, old...)
	wrong := chunks(2000, 200, 100_000)
	for _, n := range wrong {
		c.OfferSpeculative(n.Digest, n.p)
		put(t, c, n)
	}
	// Room was needed for what was guessed later and never used: that went.
	if got := count(t, c, guessed); got < 50 {
		t.Errorf("%d of 60 chunks of good speculation are there", got)
	}
	if got := count(t, c, wrong); got > 60 {
		t.Errorf("%d of 200 chunks of bad speculation are there", got)
	}
}

func TestPinnedChunksStay(t *testing.T) {
	m := newMemFS()
	cfg := cache.Config{FS: m, Limit: cache.MinLimit}
	c := open(t, cfg)
	rest := chunks(0, 200, 100_000)
	mine := rest[3:90:90]
	img := chunk.Sum([]byte("image"))
	if err := c.Pin(img, append(list(mine), list(mine)...)); err != nil { // before they are there
		t.Fatal(err)
	}
	offerAll(t, c, rest...)
	for round := range 3 {
		for i := range 400 {
			put(t, c, chunks(10_000*(round+1)+i, 1, 100_000)...)
		}
		if got := count(t, c, mine); got != len(mine) {
			t.Fatalf("round %d: %d of %d pinned chunks are there", round, got, len(mine))
		}
		for _, n := range mine {
			has(t, c, n)
		}
		p := c.Pinned()
		if len(p) != 1 || p[0] != (cache.Pinned{Image: img, Chunks: len(mine), Bytes: int64(100_000 * len(mine)), Cached: len(mine), CachedBytes: int64(100_000 * len(mine))}) {
			t.Errorf("Pinned: %+v", p)
		}
		closed(t, c) // a pin outlives its process, and a crash
		m = m.crashKeepingAll()
		cfg.FS = m
		c = open(t, cfg)
	}
	if err := c.Unpin(img); err != nil {
		t.Fatal(err)
	}
	for i := range 1500 {
		put(t, c, chunks(90_000+i, 1, 100_000)...)
	}
	if got := count(t, c, mine); got != 0 || len(c.Pinned()) != 0 || c.Stats().PinnedBytes != 0 {
		t.Errorf("%d chunks are there after Unpin, pins: %+v", got, c.Stats())
	}
	if _, peak := m.took(); peak > cfg.Limit {
		t.Errorf("the files took %d bytes", peak)
	}
}

// crashKeepingAll is a crash of a disk that had written everything but what must
// be synced to be sure.
func (m *memFS) crashKeepingAll() *memFS {
	left := newMemFS()
	for name, f := range m.names {
		if strings.HasSuffix(name, ".pin") && m.synced[name] != f {
			continue
		}
		g := &inode{f.data, f.data, true}
		left.names[name], left.synced[name] = g, g
	}
	return left
}

func TestPinningIsBounded(t *testing.T) {
	m := newMemFS()
	c := open(t, cache.Config{FS: m, Limit: cache.MinLimit})
	room := c.Stats().MaxPinned
	if room < cache.MinLimit/4 {
		t.Fatalf("only %d bytes can be pinned", room)
	}
	all := chunks(0, int(room)/102_400, 100_000) // 25 pages each
	images := []chunk.Digest{{1}, {2}, {3}, {4}}
	if err := c.Pin(images[0], list(all)); err != nil {
		t.Fatal(err)
	}
	if err := c.Pin(images[1], list(all[7:])); err != nil { // shared chunks count once
		t.Fatal(err)
	}
	before := c.Stats()
	var limit *cache.PinLimitError
	err := c.Pin(images[2], list(chunks(5000, 1, 100_000)))
	if !errors.As(err, &limit) || limit.Max != room || limit.Need <= room || limit.Lists || !strings.Contains(err.Error(), "--cache-size") {
		t.Errorf("one chunk too many: %v", err)
	}
	if after := c.Stats(); after != before {
		t.Errorf("a refused pin changed the cache: %+v, then %+v", before, after)
	}
	// Everything is pinned that can be, and is there; others still come and go.
	for i := range 1200 {
		put(t, c, all[i%len(all)], chunks(9000+i, 1, 150_000)[0])
	}
	if got := count(t, c, all); got != len(all) {
		t.Errorf("%d of %d pinned chunks are there", got, len(all))
	}
	if _, peak := m.took(); peak > cache.MinLimit {
		t.Errorf("the files took %d bytes", peak)
	}
	// Lists are bounded on their own: these chunks are pinned already.
	long := list(all)
	for i := range 20_000 {
		err = c.Pin(chunk.Digest{9, byte(i), byte(i >> 8)}, long)
		if err != nil {
			break
		}
	}
	if !errors.As(err, &limit) || !limit.Lists {
		t.Errorf("endless lists: %v", err)
	}
	if now, _ := m.took(); now > cache.MinLimit {
		t.Errorf("the files take %d bytes", now)
	}
	for _, bad := range []cache.Chunk{{Len: 0}, {Len: chunk.MaxSize + 1}} {
		if err := c.Pin(images[3], []cache.Chunk{bad}); err == nil {
			t.Errorf("a chunk of %d bytes was pinned", bad.Len)
		}
	}
}

// TestPinsThatLieAboutLengths pins far more than may be: the limit holds, the
// pins do not.
func TestPinsThatLieAboutLengths(t *testing.T) {
	m := newMemFS()
	c := open(t, cache.Config{FS: m, Limit: cache.MinLimit})
	all := chunks(0, 500, 100_000)
	liars := list(all)
	for i := range liars {
		liars[i].Len = 1
	}
	if err := c.Pin(chunk.Digest{1}, liars); err != nil {
		t.Fatal(err)
	}
	put(t, c, all...)
	put(t, c, all...)
	if _, peak := m.took(); peak > cache.MinLimit {
		t.Errorf("the files took %d bytes", peak)
	}
}

func TestAPinThatCannotBeWrittenIsNone(t *testing.T) {
	for _, op := range []string{"create", "write", "sync"} {
		m := newMemFS()
		c := open(t, cache.Config{FS: m})
		m.fail = func(o, name string, n int) (int, error) {
			if o == op && strings.HasSuffix(name, ".pin") {
				return n / 2, syscall.EIO
			}
			return 0, nil
		}
		if err := c.Pin(chunk.Digest{1}, list(chunks(0, 3, 10))); !errors.Is(err, syscall.EIO) {
			t.Errorf("%s fails: %v", op, err)
		}
		if len(c.Pinned()) != 0 || c.Stats().PinnedBytes != 0 {
			t.Errorf("%s fails: pinned all the same", op)
		}
		closed(t, c)
		m.fail = nil
		c = open(t, cache.Config{FS: m})
		if len(c.Pinned()) != 0 {
			t.Errorf("%s fails: pinned after a restart", op)
		}
	}
}

func TestALowerLimitEvicts(t *testing.T) {
	dir := t.TempDir()
	c := open(t, cache.Config{Dir: dir, Limit: 512 << 20})
	all := chunks(0, 1200, 100_000)
	for i := 0; i < len(all); i += 100 {
		offerAll(t, c, all[i:i+100]...)
	}
	mine := all[900:1000]
	if err := c.Pin(chunk.Digest{1}, list(mine)); err != nil {
		t.Fatal(err)
	}
	if err := c.Pin(chunk.Digest{2}, list(all[:500])); err != nil {
		t.Fatal(err)
	}
	closed(t, c)
	for _, limit := range []int64{64 << 20, cache.MinLimit} {
		c = open(t, cache.Config{Dir: dir, Limit: limit})
		if size := folderSize(t, dir); size > limit {
			t.Errorf("limit %d: the folder has %d bytes", limit, size)
		}
		p := c.Pinned()
		if len(p) != 2 || p[0].Image != (chunk.Digest{1}) || p[0].Chunks != 100 || p[1].Chunks != 500 || p[0].Cached+p[1].Cached < 100 {
			t.Errorf("limit %d: %+v; want both pins, with chunks", limit, p)
		}
		for i := range 400 {
			put(t, c, chunks(10_000+i, 1, 100_000)...)
		}
		if size := folderSize(t, dir); size > limit {
			t.Errorf("limit %d: the folder has %d bytes after writes", limit, size)
		}
		for _, n := range all {
			has(t, c, n)
		}
		closed(t, c)
	}
}
