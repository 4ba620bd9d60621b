package blockdev_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
)

// makeDirs encodes a tree of directories of files of one chunk each.
func makeDirs(t testing.TB, dirs, files, length int) *image {
	t.Helper()
	m := &image{store: &memory{chunks: map[chunk.Digest][]byte{}}}
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	for k := range dirs {
		dir := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
		root.Entries = append(root.Entries, rafs.Dirent{Name: fmt.Sprintf("d%03d", k), Inode: dir})
		for n := range files {
			p := bytes.Repeat([]byte{byte(k), byte(n), byte(n >> 8), 1}, length/4)
			c := chunk.Sum(p)
			m.store.chunks[c] = p
			f := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: int64(length), Chunks: []chunk.Digest{c}}
			dir.Entries = append(dir.Entries, rafs.Dirent{Name: fmt.Sprintf("f%05d", n), Inode: f})
		}
	}
	m.encode(t, root)
	return m
}

// numbers of chunks, as the digests of a request.
func (m *image) numbers(ds []chunk.Digest) (ns []int) {
	at := map[chunk.Digest]int{}
	for i, c := range m.img.Blob.Chunks {
		at[c.Digest] = i
	}
	for _, d := range ds {
		ns = append(ns, at[d])
	}
	return ns
}

func TestNeighboursComeFromOneDirectory(t *testing.T) {
	m := makeDirs(t, 3, 10, 4096)
	for _, c := range []struct {
		read  int
		bytes int64
		want  string
	}{
		{12, 4 << 12, "[12 10 11 13]"},
		{10, 4 << 12, "[10 11 12 13]"},
		{18, 4 << 12, "[18 19]"},
		{9, 4 << 12, "[9 8]"},
		{12, 1 << 20, "[12 10 11 13 14 15 16 17 18 19]"},
		{12, -1, "[12]"},
		{12, 4095, "[12]"},
	} {
		var asked []int
		d := m.device(t, func(cfg *blockdev.Config) {
			cfg.GroupBytes = c.bytes
			cfg.Chunks = getBatch(func(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
				asked = append(asked, m.numbers(ds)...)
				return m.store.GetBatch(ctx, ds, fn)
			})
		})
		checkRead(t, d, m.flat, m.dataOff(c.read), 4096)
		d.Close()
		if got := fmt.Sprint(asked); got != c.want {
			t.Errorf("read of chunk %d with groups of %d bytes asks for %s, want %s", c.read, c.bytes, got, c.want)
		}
	}
}

func TestNeighboursNeverDelayTheReadNorFailIt(t *testing.T) {
	m := makeDirs(t, 1, 8, 4096)
	for name, neighbour := range map[string]func(ctx context.Context, fn func(error) error) error{
		"silent":  func(ctx context.Context, _ func(error) error) error { <-ctx.Done(); return ctx.Err() },
		"missing": func(_ context.Context, fn func(error) error) error { return fn(store.ErrNotFound) },
		"broken":  func(context.Context, func(error) error) error { return errors.New("cut off") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := m.device(t, func(c *blockdev.Config) {
					c.GroupBytes = 1 << 20
					c.Chunks = getBatch(func(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
						if err := fn(ds[0], m.store.chunks[ds[0]], nil); err != nil {
							return err
						}
						for _, digest := range ds[1:] {
							if err := neighbour(ctx, func(err error) error { return fn(digest, nil, err) }); err != nil {
								return err
							}
						}
						return nil
					})
				})
				start := time.Now()
				checkRead(t, d, m.flat, m.dataOff(3), 4096)
				if wait := time.Since(start); wait != 0 {
					t.Errorf("the read waited %v for its neighbours", wait)
				}
				checkRead(t, d, m.flat, m.dataOff(4), 4096) // which was fetched ahead in vain
				if wait := time.Since(start); wait > blockdev.DefaultHedge {
					t.Errorf("a read of a neighbour waited %v, want at most %v", wait, blockdev.DefaultHedge)
				}
				if s := d.Stats(); s.Errors != 0 {
					t.Errorf("got %+v, want no error", s)
				}
			})
		})
	}
}

// link is a store at the end of a link with latency and a bandwidth that all
// requests share, in the virtual time of synctest.
type link struct {
	m       *image
	latency time.Duration
	perByte time.Duration

	mu       sync.Mutex
	busy     time.Time // until when the link is taken
	requests int
}

func (l *link) GetBatch(_ context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	time.Sleep(l.latency)
	l.mu.Lock()
	l.requests++
	l.mu.Unlock()
	for _, d := range ds {
		p := l.m.store.chunks[d]
		l.mu.Lock()
		if now := time.Now(); l.busy.Before(now) {
			l.busy = now
		}
		l.busy = l.busy.Add(time.Duration(len(p)) * l.perByte)
		wait := time.Until(l.busy)
		l.mu.Unlock()
		time.Sleep(wait)
		if err := fn(d, p, nil); err != nil {
			return err
		}
	}
	return nil
}

func TestFullReadRunsAtLineSpeed(t *testing.T) {
	m := makeDirs(t, 64, 64, 16<<10) // 64 MiB
	for _, latency := range []time.Duration{0, 5 * time.Millisecond, 50 * time.Millisecond} {
		t.Run(latency.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// 1 Gbit/s of stored bytes, of which 3 make 7 plain ones: 3.4 ns a byte.
				l := &link{m: m, latency: latency, perByte: 4}
				d := m.device(t, func(c *blockdev.Config) { c.GroupBytes, c.Chunks = 0, l })
				start := time.Now()
				const step = 128 << 10 // the kernel's read-ahead
				for off := int64(0); off < d.Size(); off += step {
					checkRead(t, d, m.flat, off, min(step, d.Size()-off))
				}
				took, line := time.Since(start), time.Duration(64<<20)*l.perByte
				t.Logf("%v of %v on the line, %d requests, %+v", took, line, l.requests, d.Stats())
				// The window has to grow at first, in 5 round trips or so; with 50 ms it
				// is smaller than what the line holds.
				if most := line*105/100 + 8*latency; latency <= 5*time.Millisecond && took > most {
					t.Errorf("took %v, want at most %v", took, most)
				}
				if s := d.Stats(); s.Store.Fetched.Chunks != int64(len(m.img.Blob.Chunks)) {
					t.Errorf("%d chunks fetched, want each of %d once", s.Store.Fetched.Chunks, len(m.img.Blob.Chunks))
				}
			})
		})
	}
}

// TestSlowReadsFillTheWindowForFastOnes: large files are read faster than they
// come, with what came while small ones were read.
func TestSlowReadsFillTheWindowForFastOnes(t *testing.T) {
	m := makeDirs(t, 72, 64, 16<<10) // 72 MiB
	synctest.Test(t, func(t *testing.T) {
		l := &link{m: m, latency: 5 * time.Millisecond, perByte: 4}
		d := m.device(t, func(c *blockdev.Config) { c.GroupBytes, c.Chunks = 0, l })
		read := func(from, to int64, perByte time.Duration) time.Duration {
			start := time.Now()
			const step = 128 << 10 // the kernel's read-ahead
			for off := from; off < to; off += step {
				checkRead(t, d, m.flat, off, min(step, to-off))
				time.Sleep(step * perByte)
			}
			return time.Since(start)
		}
		const slow, fast = 48 << 20, 20 << 20
		read(0, m.dataOff(0)+slow, 8)
		took, least := read(m.dataOff(0)+slow, m.dataOff(0)+slow+fast, 1), fast*time.Nanosecond
		t.Logf("20 MiB in %v, %d requests, %+v", took, l.requests, d.Stats())
		if took > least*11/10 {
			t.Errorf("a fast read of 20 MiB took %v, want %v and at most a tenth more: it waits for the line", took, least)
		}
		synctest.Wait()
		time.Sleep(time.Second) // what is fetched ahead has come
		s := d.Stats()
		if behind := s.AheadFetched.Bytes - s.AheadUsed.Bytes; behind > 24<<20 || s.AheadUnused.Chunks > 0 {
			t.Errorf("%d bytes are fetched ahead and not read, want at most 24 MiB; %+v", behind, s)
		}
	})
}

// TestSmallFilesInOrderAreFetchedAhead: a walk over small files does not wait for
// each of them until it has read megabytes; reads with gaps are no walk.
func TestSmallFilesInOrderAreFetchedAhead(t *testing.T) {
	m := makeDirs(t, 1, 400, 4096) // 1.6 MB
	for _, c := range []struct {
		stride int
		most   int
	}{{1, 10}, {2, 200}} {
		synctest.Test(t, func(t *testing.T) {
			l := &link{m: m, latency: 5 * time.Millisecond, perByte: 4}
			d := m.device(t, func(c *blockdev.Config) { c.GroupBytes, c.Alone, c.Chunks = 4096, 1000, l })
			for i := 0; i < 400; i += c.stride {
				checkRead(t, d, m.flat, m.dataOff(i), 4096)
			}
			s := d.Stats()
			if l.requests > c.most || c.stride > 1 && s.AheadFetched.Chunks > 0 {
				t.Errorf("each chunk of %d: %d requests, want at most %d, and nothing ahead of reads with gaps; %+v", c.stride, l.requests, c.most, s)
			}
		})
	}
}

func TestDeliveriesAreVerified(t *testing.T) {
	m := makeDirs(t, 1, 8, 4096)
	d := m.device(t)
	e := d.Expect([]uint32{0, 1, 2})
	a, b, stranger := m.img.Blob.Chunks[0].Digest, m.img.Blob.Chunks[1].Digest, m.img.Blob.Chunks[7].Digest
	if err := e.Deliver(a, m.store.chunks[a]); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		d chunk.Digest
		p []byte
	}{
		"again":         {a, m.store.chunks[a]},
		"not asked for": {stranger, m.store.chunks[stranger]},
		"short":         {b, m.store.chunks[b][:4095]},
	} {
		if err := e.Deliver(c.d, c.p); !errors.Is(err, blockdev.ErrRefused) {
			t.Errorf("%s: got %v, want ErrRefused", name, err)
		}
	}
	e.End()
	if err := e.Deliver(m.img.Blob.Chunks[2].Digest, m.store.chunks[m.img.Blob.Chunks[2].Digest]); !errors.Is(err, blockdev.ErrRefused) {
		t.Errorf("after the end: got %v, want ErrRefused", err)
	}
	checkRead(t, d, m.flat, 0, d.Size())
	if s := d.Stats(); s.StartRefused != 4 || s.Start.Fetched.Chunks != 1 || s.AheadUsed.Chunks != 1 {
		t.Errorf("got %+v, want 1 chunk delivered and used, and 4 refused", s)
	}
}

func TestPrefetchWaitsWhileAReadWaits(t *testing.T) {
	m := makeDirs(t, 1, 8, 4096)
	synctest.Test(t, func(t *testing.T) {
		g := newGated(m)
		d := m.device(t, func(c *blockdev.Config) { c.Chunks = g })
		var wg sync.WaitGroup
		wg.Go(func() { checkRead(t, d, m.flat, m.dataOff(0), 1) })
		synctest.Wait()
		wg.Go(func() {
			if err := d.Prefetch(t.Context(), []uint32{1, 2, 0, 99}); err == nil {
				t.Error("the prefetch does not tell that it was cut off")
			}
		})
		synctest.Wait()
		if n := len(g.asked); n != 1 {
			t.Fatalf("%d requests while a read waits, want its own alone", n)
		}
		g.release <- nil
		synctest.Wait()
		<-g.asked
		if got := fmt.Sprint(m.numbers(<-g.asked)); got != "[1 2]" {
			t.Errorf("prefetch asks for %s, want what is missing, in order", got)
		}
		start := time.Now()
		read := make(chan struct{})
		go func() { // ends with the read
			defer close(read)
			checkRead(t, d, m.flat, m.dataOff(1), 1) // on its way, and late
		}()
		synctest.Wait()
		time.Sleep(blockdev.DefaultHedge)
		synctest.Wait()
		g.release <- errors.New("the prefetch is cut off") // it has waited longest
		g.release <- nil
		<-read
		if wait := time.Since(start); wait > blockdev.DefaultHedge {
			t.Errorf("the read waited %v for a prefetch", wait)
		}
		wg.Wait()
	})
}

func TestPrefetchIsBoundedWithoutADisk(t *testing.T) {
	m := makeDirs(t, 4, 64, 16<<10) // 4 MiB
	all := make([]uint32, len(m.img.Blob.Chunks))
	for i := range all {
		all[i] = uint32(i)
	}
	memory := blockdev.NewMemory(1 << 20)
	d := m.device(t, func(c *blockdev.Config) { c.Memory = memory })
	if err := d.Prefetch(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	if s := d.Stats(); memory.Bytes() > 1<<19 || s.AheadFetched.Bytes > 1<<20 || s.AheadUnused.Bytes > 1<<19 {
		t.Errorf("%d bytes held, %+v, want at most half of the room, and little fetched in vain", memory.Bytes(), s)
	}
	k := newDisk()
	d = m.device(t, func(c *blockdev.Config) { c.Memory, c.Disk = blockdev.NewMemory(1<<20), k })
	if err := d.Prefetch(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	d.Close() // the offers come after
	if len(k.copies) != len(all) {
		t.Errorf("%d chunks on the disk, want all %d", len(k.copies), len(all))
	}
	d = m.device(t, func(c *blockdev.Config) { c.Memory, c.Disk = blockdev.NewMemory(1<<20), k })
	if err := d.Prefetch(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	if s := d.Stats(); s.Requests != 0 {
		t.Errorf("%d requests for what is on the disk", s.Requests)
	}
}

func TestPrefetchEndsWithItsContextAndTheDevice(t *testing.T) {
	m := makeDirs(t, 1, 8, 4096)
	synctest.Test(t, func(t *testing.T) {
		d := m.device(t, func(c *blockdev.Config) { c.Chunks = newGated(m) })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.Prefetch(ctx, []uint32{1}) }() // ends with ctx
		synctest.Wait()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: got %v", err)
		}
		go func() { ended <- d.Prefetch(t.Context(), []uint32{1}) }() // ends with the device
		synctest.Wait()
		d.Close()
		if err := <-ended; err == nil {
			t.Error("prefetch of a closed device ends without an error")
		}
		if err := d.Prefetch(t.Context(), []uint32{1}); !errors.Is(err, blockdev.ErrClosed) {
			t.Errorf("after Close: got %v, want ErrClosed", err)
		}
	})
}

// TestAWaitIsBounded: reads that join one stalled fetch after another do not wait
// for ever.
func TestAWaitIsBounded(t *testing.T) {
	m := makeImage(t, 30)
	synctest.Test(t, func(t *testing.T) {
		m.store.gate = func(ctx context.Context, _ []chunk.Digest) error { <-ctx.Done(); return ctx.Err() }
		defer func() { m.store.gate = nil }()
		d := m.device(t)
		var wg sync.WaitGroup
		for range 20 { // one every 10 s
			wg.Go(func() {
				start := time.Now()
				err := d.ReadAt(t.Context(), make([]byte, 10), m.dataOff(0))
				if wait := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || wait > 2*blockdev.DefaultTimeout {
					t.Errorf("got %v after %v, want the deadline in at most two attempts", err, wait)
				}
			})
			time.Sleep(10 * time.Second)
		}
		wg.Wait()
	})
}
