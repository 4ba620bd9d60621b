package ranges_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/internal/proc"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	bucketmem "quarry/store/bucket/mem"
	"quarry/store/bucket/ranges"
	"quarry/store/cache"
)

const (
	key = "packs/aa"
	// block is the package's unit.
	block = 64 << 10
)

// counted is a bucket that counts how often each byte was asked for, in blocks, and
// may do something before a read.
type counted struct {
	bucket.Bucket
	before func(ctx context.Context, off int64) error

	mu    sync.Mutex // guards asked
	asked map[int64]int
	odd   []string // reads that are no whole blocks
}

func (c *counted) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	o, err := c.Stat(context.WithoutCancel(ctx), key)
	if err != nil {
		return err
	}
	c.mu.Lock()
	for n := off / block; n*block < off+int64(len(p)); n++ {
		c.asked[n]++
	}
	if end := off + int64(len(p)); off%block != 0 || end%block != 0 && end != o.Size {
		c.odd = append(c.odd, fmt.Sprintf("%d bytes at %d", len(p), off))
	}
	c.mu.Unlock()
	if c.before != nil {
		if err := c.before(ctx, off); err != nil {
			return err
		}
	}
	return c.Bucket.ReadAt(ctx, key, p, off)
}

func (c *counted) reads() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.asked {
		n += k
	}
	return n
}

// object is a bucket with one object of size bytes.
func object(t testing.TB, size int) (*counted, bucket.Object, []byte) {
	t.Helper()
	want := make([]byte, size)
	rand.NewChaCha8([32]byte{1}).Read(want)
	b := bucketmem.New()
	buckettest.Put(t, b, key, want)
	return &counted{Bucket: b, asked: map[int64]int{}}, bucket.Object{Key: key, Size: int64(size)}, want
}

func open(t testing.TB, cfg ranges.Config) *ranges.Cache {
	t.Helper()
	if cfg.Limit == 0 {
		cfg.Limit = 1 << 30
	}
	c, err := ranges.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// someRange is a part of size bytes of up to 256 KiB.
func someRange(rnd *rand.Rand, size int) (off int64, n int) {
	n = 1 + rnd.IntN(min(size, 256<<10))
	return int64(rnd.IntN(size - n + 1)), n
}

func wantRange(ctx context.Context, c *ranges.Cache, o bucket.Object, want []byte, off int64, n int) error {
	p := make([]byte, n)
	if _, err := c.ReadAt(ctx, o, p, off); err != nil {
		return err
	}
	if !bytes.Equal(p, want[off:off+int64(n)]) {
		return fmt.Errorf("%d bytes at %d are wrong", n, off)
	}
	return nil
}

// A burst of readers that want ranges of one cold object, each its own and in its own
// order, has each block read from the bucket once; and so has one that follows, also
// after a restart.
func TestABurstReadsEachBlockOnce(t *testing.T) {
	b, o, want := object(t, 6<<20+12345)
	cfg := ranges.Config{Bucket: b, Dir: t.TempDir()}
	burst := func(c *ranges.Cache) {
		t.Helper()
		var g errgroup.Group
		for i := range 256 {
			g.Go(func() error {
				rnd := rand.New(rand.NewPCG(uint64(i), 0))
				for range 2 {
					off, n := someRange(rnd, len(want))
					if err := wantRange(t.Context(), c, o, want, off, n); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	c := open(t, cfg)
	burst(c)
	if err := wantRange(t.Context(), c, o, want, 0, len(want)); err != nil {
		t.Fatal(err)
	}
	blocks := (len(want) + block - 1) / block
	if got := b.reads(); got != blocks {
		t.Errorf("%d blocks were read, the object has %d", got, blocks)
	}
	if len(b.odd) != 0 {
		t.Errorf("reads that are no whole blocks: %q", b.odd)
	}
	burst(c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	burst(open(t, cfg))
	if got := b.reads(); got != blocks {
		t.Errorf("%d blocks were read after a restart, want no more than the %d before", got, blocks)
	}
}

// A folder that somebody damaged gives wrong bytes once: Drop has them read anew.
func TestDroppedBlocksAreReadAnew(t *testing.T) {
	b, o, want := object(t, 1<<20)
	cfg := ranges.Config{Bucket: b, Dir: t.TempDir()}
	c := open(t, cfg)
	if err := wantRange(t.Context(), c, o, want, 0, len(want)); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(cfg.Dir + "/*.chunks")
	if err != nil || len(files) != 1 {
		t.Fatalf("%d data files, error %v", len(files), err)
	}
	raw, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	for i := range raw {
		raw[i] ^= 1
	}
	if err := os.WriteFile(files[0], raw, 0o600); err != nil {
		t.Fatal(err)
	}
	c = open(t, cfg)
	if err := wantRange(t.Context(), c, o, want, 0, len(want)); err == nil {
		t.Fatal("the damage is nowhere")
	}
	before := b.reads()
	c.Drop(o, block+1, block) // of blocks 1 and 2
	for off, ok := range map[int64]bool{0: false, block: true, 2 * block: true, 3 * block: false} {
		if err := wantRange(t.Context(), c, o, want, off, block); (err == nil) != ok {
			t.Errorf("block at %d after Drop: %v", off, err)
		}
	}
	if got := b.reads() - before; got != 2 {
		t.Errorf("%d blocks were read anew, want 2", got)
	}
}

// What the bucket says of an object is what the reader is told, and none of it stays.
func TestWhatIsNotThere(t *testing.T) {
	b, o, want := object(t, 3*block)
	c := open(t, ranges.Config{Bucket: b, Dir: t.TempDir()})
	longer := bucket.Object{Key: key, Size: 10 * block} // it is cut off
	if err := wantRange(t.Context(), c, longer, want, 2*block, block); err != nil {
		t.Errorf("before the end of an object that is cut off: %v", err)
	}
	for _, r := range []struct{ off, n int64 }{{3*block - 1, 2}, {5 * block, 1}, {o.Size, 1}, {20 * block, 1}} {
		if _, err := c.ReadAt(t.Context(), longer, make([]byte, r.n), r.off); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes at %d: got error %v, want %v", r.n, r.off, err, io.ErrUnexpectedEOF)
		}
	}
	late := bucket.Object{Key: "packs/late", Size: block}
	if _, err := c.ReadAt(t.Context(), late, make([]byte, 10), 0); !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("an object that is not there: got error %v, want %v", err, bucket.ErrNotFound)
	}
	buckettest.Put(t, b.Bucket, late.Key, want[:block])
	if err := wantRange(t.Context(), c, late, want, 0, block); err != nil {
		t.Errorf("once it is there: %v", err)
	}
}

// Who is told that the bucket could not be read may ask at once, and the bucket is asked.
func TestAnErrorIsNobodysButTheirsWhoWaitedForIt(t *testing.T) {
	b, o, want := object(t, 1000*block)
	away := errors.New("away")
	b.before = func(context.Context, int64) error { return away }
	c := open(t, ranges.Config{Bucket: b, Dir: t.TempDir()})
	for n := range o.Size / block {
		if err := wantRange(t.Context(), c, o, want, n*block, block); !errors.Is(err, away) {
			t.Fatalf("got error %v, want %v", err, away)
		}
		before := b.reads()
		wantRange(t.Context(), c, o, want, n*block, block)
		if b.reads() == before {
			t.Fatalf("block %d: the second read did not ask the bucket", n)
		}
	}
}

// The bytes that many wait for come although the one that asked for them has left.
func TestAReaderThatLeavesTakesNobodyAlong(t *testing.T) {
	b, o, want := object(t, 4*block)
	begun, go_ := make(chan struct{}), make(chan struct{})
	b.before = func(ctx context.Context, _ int64) error {
		close(begun)
		<-go_
		return ctx.Err()
	}
	c := open(t, ranges.Config{Bucket: b, Dir: t.TempDir()})
	ctx, leave := context.WithCancel(t.Context())
	var g errgroup.Group
	g.Go(func() error {
		if err := wantRange(ctx, c, o, want, 0, len(want)); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("the one that left: got error %v, want %w", err, context.Canceled)
		}
		close(go_)
		return nil
	})
	<-begun
	leave()
	g.Go(func() error { return wantRange(t.Context(), c, o, want, 10, len(want)-10) })
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := b.reads(); got != 4 {
		t.Errorf("%d blocks were read, want 4", got)
	}
}

// Readers that come and leave do not pile up reads of the bucket: beyond a number,
// those that nobody wants are ended, and read again for who wants them later.
func TestReadsThatNobodyWantsAreBounded(t *testing.T) {
	const blocks, most = 200, 64
	b, o, want := object(t, blocks*block)
	var mu sync.Mutex
	ended := 0
	goOn := make(chan struct{})
	b.before = func(ctx context.Context, _ int64) error {
		select {
		case <-goOn:
		case <-ctx.Done():
		}
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil {
			ended++
		}
		return ctx.Err()
	}
	c := open(t, ranges.Config{Bucket: b, Dir: t.TempDir()})
	left, leave := context.WithCancel(t.Context())
	leave()
	for n := range int64(blocks) {
		if _, err := c.ReadAt(left, o, make([]byte, 1), n*block); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	close(goOn)
	if err := wantRange(t.Context(), c, o, want, 0, len(want)); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if ended > blocks-most || b.reads() > 2*blocks-most {
		t.Errorf("%d reads were ended, and %d blocks read for %d", ended, b.reads(), blocks)
	}
	if ended == 0 {
		t.Errorf("all %d reads went on", blocks)
	}
}

// An object larger than the cache is read through it, and the folder stays in bounds.
func TestTheFolderStaysWithinItsLimit(t *testing.T) {
	b, o, want := object(t, 40<<20)
	cfg := ranges.Config{Bucket: b, Dir: t.TempDir(), Limit: cache.MinLimit}
	c := open(t, cfg)
	for range 2 {
		if err := wantRange(t.Context(), c, o, want, 0, len(want)); err != nil {
			t.Fatal(err)
		}
		if size := sizeOf(t, cfg.Dir); size > cfg.Limit {
			t.Errorf("the folder has %d bytes, %d are allowed", size, cfg.Limit)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if size := sizeOf(t, cfg.Dir); size > cfg.Limit || size < cfg.Limit/2 {
		t.Errorf("the folder has %d bytes at the end, %d are allowed", size, cfg.Limit)
	}
}

// Blocks that are read again and again stay while many others come and go.
func TestWhatIsInUseIsReadOnceWhileOthersAreEvicted(t *testing.T) {
	const hot, cold = 5, 2 * cache.MinLimit / block
	b, o, want := object(t, (hot+cold)*block)
	c := open(t, ranges.Config{Bucket: b, Dir: t.TempDir(), Limit: cache.MinLimit})
	for n := range int64(cold) {
		if err := wantRange(t.Context(), c, o, want, 0, hot*block); err != nil {
			t.Fatal(err)
		}
		if err := wantRange(t.Context(), c, o, want, (hot+n)*block, block); err != nil {
			t.Fatal(err)
		}
	}
	for n := range int64(hot) {
		if b.asked[n] != 1 {
			t.Errorf("block %d was read %d times from the bucket", n, b.asked[n])
		}
	}
	before := b.reads()
	if err := wantRange(t.Context(), c, o, want, hot*block, cold/4*block); err != nil {
		t.Fatal(err)
	}
	if b.reads() == before {
		t.Error("nothing was evicted")
	}
}

func sizeOf(t *testing.T, dir string) (size int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && d.IsDir() {
			return nil
		}
		if err != nil {
			return err
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was evicted
		}
		if err == nil {
			size += info.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return size
}

// On a full disk everything is read from the bucket.
func TestAFullDisk(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"); err != nil {
		need.Missing(t, fmt.Sprintf("the right to mount a tmpfs: %v", err))
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	b, o, want := object(t, 8<<20)
	c := open(t, ranges.Config{Bucket: b, Dir: dir + "/cache"})
	for range 2 {
		if err := wantRange(t.Context(), c, o, want, 0, len(want)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if blocks := len(want) / block; b.reads() < 2*blocks-4<<20/block {
		t.Errorf("%d blocks were read twice by %d reads: a disk of 4 MiB has them", blocks, b.reads())
	}
}

func TestOneProcessAtATime(t *testing.T) {
	b, _, _ := object(t, 1)
	cfg := ranges.Config{Bucket: b, Dir: t.TempDir(), Limit: 1 << 30}
	open(t, cfg)
	if _, err := ranges.Open(cfg); !errors.Is(err, proc.ErrLocked) {
		t.Errorf("a second one: got error %v, want %v", err, proc.ErrLocked)
	}
}
