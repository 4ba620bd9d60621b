package cache_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/store"
	"quarry/store/cache"
	"quarry/store/chunk"
)

// fault is a way in which an operation fails.
type fault struct {
	name    string
	err     error
	applied func(n int) int // how much of it is done all the same
	forEver bool            // all later ones fail too
}

var faults = []fault{
	{"EIO, not done", syscall.EIO, func(int) int { return 0 }, false},
	{"EIO, done", syscall.EIO, func(n int) int { return n }, false},
	{"short", syscall.ENOSPC, func(n int) int { return n / 3 }, false},
	{"EROFS from then on", syscall.EROFS, func(int) int { return 0 }, true},
}

// TestEachOperationFails has the k-th operation of a run fail, for many k: the
// cache may lose chunks, and nothing else. When the disk works again, so does the
// cache. It begins full, so that a run evicts.
func TestEachOperationFails(t *testing.T) {
	full := newMemFS()
	old := chunks(0, 210, 120_000)
	c := open(t, cache.Config{FS: full, Limit: cache.MinLimit})
	put(t, c, old...)
	closed(t, c)
	all := append(slices.Clone(old[:20]), chunks(1000, 50, 120_000)...)

	m := full.clone()
	c = open(t, cache.Config{FS: m, Limit: cache.MinLimit})
	runOn(t, c, all)
	if s := c.Stats(); s.Evicted == 0 || s.Kept == 0 {
		t.Errorf("a run evicts nothing, or keeps nothing: %+v", s)
	}
	closed(t, c)
	ops, tries := m.ops, 16
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			for i := range tries {
				k := i*ops/tries + rand.New(rand.NewPCG(uint64(i), 7)).IntN(ops/tries)
				faultAt(t, f, k, full.clone(), all)
			}
		})
	}
}

func faultAt(t *testing.T, f fault, k int, m *memFS, all []named) {
	t.Helper()
	hit := false
	m.fail = func(op, _ string, n int) (int, error) {
		if m.ops > k && (f.forEver || !hit) {
			hit = true
			return f.applied(n), f.err
		}
		return 0, nil
	}
	cfg := cache.Config{FS: m, Limit: cache.MinLimit, Retry: 1}
	c, err := cache.Open(cfg)
	if err != nil {
		if !errors.Is(err, f.err) || k > 2 {
			t.Fatalf("operation %d: Open: %v", k, err)
		}
		return
	}
	runOn(t, c, all)
	m.mu.Lock()
	m.fail = nil // the disk works again
	m.mu.Unlock()
	last := name(content(99_999, 100_000))
	put(t, c, last)
	if !hit && k < m.ops-20 || !has(t, c, last) {
		t.Fatalf("operation %d: fault hit %t; the cache must work again after it", k, hit)
	}
	closed(t, c)
	if _, peak := m.took(); peak > cfg.Limit {
		t.Fatalf("operation %d: the files took %d bytes", k, peak)
	}
	c = open(t, cfg)
	if found := readAll(t, c, all); found.wrong != 0 || !has(t, c, last) {
		t.Fatalf("operation %d: after a restart %+v", k, found)
	}
	closed(t, c)
	if now, _ := m.took(); now > cfg.Limit {
		t.Fatalf("operation %d: the files take %d bytes after a restart", k, now)
	}
}

// runOn writes and reads and pins, whatever the disk says.
func runOn(t *testing.T, c *cache.Cache, all []named) {
	t.Helper()
	local := func(err error) {
		t.Helper()
		if err != nil && !errors.Is(err, store.ErrLocalDisk) {
			t.Fatalf("%v, want store.ErrLocalDisk", err)
		}
	}
	for i, n := range all {
		local(c.Put(context.Background(), n.Digest, n.p))
		if i%30 == 3 {
			c.Pin(chunk.Digest{byte(i)}, list(all[i:i+5]))
		}
		if i%30 == 20 {
			c.Unpin(chunk.Digest{byte(i - 17)})
		}
		for _, back := range []int{0, 7} {
			n := all[max(i-back, 0)]
			p := make([]byte, len(n.p))
			err := c.ReadAt(n.Digest, p, 0)
			if err == nil && !bytes.Equal(p, n.p) {
				t.Fatalf("chunk %d: wrong bytes", i)
			}
			if !errors.Is(err, store.ErrNotFound) {
				local(err)
			}
		}
	}
}

func TestAReadThatFails(t *testing.T) {
	m := newMemFS()
	c := open(t, cache.Config{FS: m})
	n := chunks(0, 2, 5000)
	offerAll(t, c, n...)
	m.fail = func(op, _ string, _ int) (int, error) {
		if op == "read" {
			return 0, syscall.EIO
		}
		return 0, nil
	}
	err := c.ReadAt(n[0].Digest, make([]byte, 5000), 0)
	if !errors.Is(err, store.ErrLocalDisk) || !errors.Is(err, syscall.EIO) {
		t.Errorf("%v, want store.ErrLocalDisk and EIO", err)
	}
	m.fail = nil
	if has(t, c, n[0]) || !has(t, c, n[1]) {
		t.Error("the place that failed is used again, or another is not")
	}
	offerAll(t, c, n[0])
	if !has(t, c, n[0]) {
		t.Error("the chunk is not cached anew")
	}
}

// lines is a log that counts.
type lines struct {
	mu sync.Mutex
	s  []string
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.s = append(l.s, string(p))
	return len(p), nil
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.s, "")
}

func TestAFailingDiskIsLeftAloneForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, log := newMemFS(), &lines{}
		c := open(t, cache.Config{FS: m, Log: slog.New(slog.NewTextHandler(log, nil))})
		all := chunks(0, 10_000, 100)
		put(t, c, all[0])
		has(t, c, all[0])
		time.Sleep(time.Second)
		synctest.Wait() // that it was used is written
		tries, broken := 0, true
		m.fail = func(op, _ string, n int) (int, error) {
			if op == "write" && broken {
				tries++
				return 0, syscall.EIO
			}
			return 0, nil
		}
		var at []time.Duration
		start := time.Now()
		next, seen := 1, 0
		for ; time.Since(start) < 200*time.Second; next++ { // one offer each 100 ms
			c.Offer(all[next].Digest, all[next].p)
			synctest.Wait()
			if tries != seen {
				at, seen = append(at, time.Since(start)), tries
			}
			if !has(t, c, all[0]) {
				t.Fatal("what is there is not read while writing is paused")
			}
			time.Sleep(100 * time.Millisecond)
		}
		// 1, 2, 4 … 64 s apart, and some moments in which the writer waits for more.
		want := []time.Duration{0, 1, 3, 7, 15, 31, 63, 127, 191}
		if len(at) != len(want) {
			t.Fatalf("tries at %v", at)
		}
		for i := range at {
			if at[i] < want[i]*time.Second || at[i] > want[i]*time.Second+2*time.Second {
				t.Errorf("try %d at %v, want %v s", i, at[i], want[i])
			}
		}
		if s := c.Stats(); !s.Paused || s.Refused != int64(next-1) || s.WriteErrors != int64(len(want)) {
			t.Errorf("%+v", s)
		}
		if err := c.Put(t.Context(), all[next].Digest, all[next].p); !errors.Is(err, store.ErrLocalDisk) {
			t.Errorf("Put in a pause: %v", err)
		}
		m.mu.Lock()
		broken = false
		m.mu.Unlock()
		time.Sleep(64 * time.Second)
		put(t, c, all[next], all[next+1])
		if s := c.Stats(); s.Paused || s.Chunks != 3 {
			t.Errorf("after the fault: %+v", s)
		}
		if got := log.String(); strings.Count(got, "\n") != 2 || strings.Count(got, "paused") != 1 || strings.Count(got, "resumed") != 1 {
			t.Errorf("log:\n%s", got)
		}
		closed(t, c)
	})
}

// TestFullDisk fills a real disk: reads go on, some space is left to others, and
// with new space there is caching again.
func TestFullDisk(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=24m"); err != nil {
		need.Missing(t, fmt.Sprintf("the right to mount a tmpfs: %v", err))
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	free := func() int64 {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Bavail) * st.Bsize
	}
	cfg := cache.Config{Dir: dir + "/cache", Retry: time.Millisecond}
	c := open(t, cfg)
	all := chunks(0, 400, 100_000)
	failed := 0
	for _, n := range all {
		if err := c.Put(t.Context(), n.Digest, n.p); errors.Is(err, store.ErrLocalDisk) {
			failed++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	there := int64(count(t, c, all))
	if failed == 0 || there < 200 || c.Stats().WriteErrors == 0 {
		t.Errorf("%d chunks not written, %d written: a disk of 24 MiB is full", failed, there)
	}
	if got := free(); got < 24<<20/20 {
		t.Errorf("%d bytes are free, 1/20 of the disk should be", got)
	}
	// Others take even the last of it.
	hog, err := os.Create(dir + "/hog")
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = hog.Write(make([]byte, 4096))
	}
	hog.Close()
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	for _, n := range all {
		has(t, c, n)
		c.Offer(n.Digest, n.p)
	}
	if err := c.Pin(chunk.Digest{1}, list(all)); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("Pin on a full disk: %v", err)
	}
	closed(t, c)
	c = open(t, cfg)
	if got := int64(count(t, c, all)); got != there {
		t.Errorf("%d chunks are there after a restart on the full disk, want %d", got, there)
	}
	if err := os.Remove(hog.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	closed(t, c)
	cfg.Limit = cache.MinLimit // larger than the disk: it never gets to evict
	if err := os.RemoveAll(cfg.Dir); err != nil {
		t.Fatal(err)
	}
	c = open(t, cfg)
	put(t, c, all[:100]...)
	if got := count(t, c, all[:100]); got != 100 {
		t.Errorf("%d of 100 chunks are there when there is space again", got)
	}
}
