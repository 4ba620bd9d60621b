package packed_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/ranges"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
	"quarry/store/storetest"
)

// cached is a store over a bucket that is read through a range cache.
type cached struct {
	*opened
	cache *ranges.Cache
	dir   string
	reads *atomic.Int64 // of the bucket
	away  *atomic.Bool  // the bucket cannot be read
}

// openCached opens the store of d, which has been made, and its range cache in dir.
func (d disk) openCached(t *testing.T, dir string, change ...func(*packed.Config)) *cached {
	t.Helper()
	c := &cached{dir: dir, reads: new(atomic.Int64), away: new(atomic.Bool)}
	b := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket, Before: func(op buckettest.Op) error {
		if op.Method != "ReadAt" {
			return nil
		}
		c.reads.Add(1)
		if c.away.Load() {
			return buckettest.ErrInjected
		}
		return nil
	}}
	var err error
	if c.cache, err = ranges.Open(ranges.Config{Bucket: b, Dir: dir, Limit: 1 << 30}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.cache.Close() })
	with := append(change, func(cfg *packed.Config) { cfg.Ranges = c.cache })
	if c.opened, err = d.tryOpen(t, b, b, d.crash().fs, with...); err != nil {
		t.Fatal(err)
	}
	c.reads.Store(0)
	return c
}

func TestConformanceWithARangeCache(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Harness {
		o := newDisk().openCached(t, t.TempDir(), packSize(300_000))
		return storetest.Harness{
			Getter: o, BatchGetter: o, Store: o,
			Damage: func(t *testing.T, d chunk.Digest) {
				locs, found, err := o.index.LookupBatch(t.Context(), []chunk.Digest{d})
				if err != nil || !found[0] {
					t.Fatalf("look up %s: %v, %v", d, found, err)
				}
				key := pack.Key(locs[0].Pack)
				buckettest.Corrupt(t, o.disk.bucket, key, locs[0].Off)
				o.cache.Drop(bucket.Object{Key: key}, locs[0].Off, int64(locs[0].Stored))
			},
		}
	})
}

// Readers that each want other chunks of an image, and let go of them at once, have the
// bucket read no byte twice; a restart changes nothing, and neither does a bucket that
// is away then.
func TestABurstReadsThePacksOnce(t *testing.T) {
	d := newDisk()
	ps := slices.Concat(contents(0, 270), [][]byte{storetest.Content(1000, 5<<20)})
	d.open(t, packSize(1<<20)).put(t, ps)
	dir := t.TempDir()
	o := d.openCached(t, dir)
	blocks := int64(0) // at most, when no two are read together
	for _, p := range o.catalog.Packs() {
		blocks += p.Size>>16 + 1
	}
	burst := func(o *cached) {
		t.Helper()
		var g errgroup.Group
		for i := range 256 {
			g.Go(func() error {
				part := ps[i:min(len(ps), i+20)]
				var ds []chunk.Digest
				for _, p := range part {
					ds = append(ds, chunk.Sum(p))
				}
				return o.GetBatch(t.Context(), ds, func(d chunk.Digest, p []byte, err error) error {
					if err == nil && chunk.Sum(p) != d {
						err = errors.New("wrong bytes")
					}
					return err
				})
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	burst(o)
	if n := o.reads.Load(); n == 0 || n > blocks {
		t.Errorf("%d reads of the bucket, its packs have %d blocks", n, blocks)
	}
	before := o.reads.Load()
	burst(o)
	if n := o.reads.Load() - before; n != 0 {
		t.Errorf("%d reads of the bucket by a second burst", n)
	}
	if err := o.cache.Close(); err != nil {
		t.Fatal(err)
	}
	o = d.openCached(t, dir)
	o.away.Store(true)
	burst(o)
	if n := o.reads.Load(); n != 0 {
		t.Errorf("%d reads of the bucket after a restart", n)
	}
}

// A cache whose every byte is wrong gives no wrong byte and no error, has nothing
// condemned, and is mended by the reads that found it. While the bucket is away the error
// is the bucket's: of the chunk it says nothing.
func TestADamagedRangeCacheGivesRightBytes(t *testing.T) {
	d := newDisk()
	ps := contents(0, 100)
	d.open(t).put(t, ps)
	var ds []chunk.Digest
	for _, p := range ps {
		ds = append(ds, chunk.Sum(p))
	}
	for how, read := range map[string]func(o *cached) error{
		"Get": func(o *cached) error {
			for i, d := range ds {
				if p, err := o.Get(t.Context(), d, nil); err != nil || !bytes.Equal(p, ps[i]) {
					return fmt.Errorf("chunk %d: %w", i, err)
				}
			}
			return nil
		},
		"GetBatch": func(o *cached) error {
			return o.GetBatch(t.Context(), ds, func(d chunk.Digest, p []byte, err error) error {
				if err == nil && chunk.Sum(p) != d {
					err = errors.New("wrong bytes")
				}
				return err
			})
		},
		"StoredBatch": func(o *cached) error {
			return o.StoredBatch(t.Context(), ds, func(d chunk.Digest, s packed.Stored, err error) error {
				if err != nil {
					return err
				}
				p, err := pack.Decode(nil, s.Codec, s.Bytes, s.Len)
				if err == nil && chunk.Sum(p) != d {
					err = errors.New("wrong bytes")
				}
				return err
			})
		},
	} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			o := d.openCached(t, dir)
			if err := read(o); err != nil {
				t.Fatal(err)
			}
			if err := o.cache.Close(); err != nil {
				t.Fatal(err)
			}
			damageFiles(t, dir)
			o = d.openCached(t, dir)
			o.away.Store(true)
			for try := range 3 {
				if err := read(o); !errors.Is(err, buckettest.ErrInjected) || errors.As(err, new(*store.CorruptError)) {
					t.Errorf("read %d while the bucket is away: got error %v, want the bucket's", try, err)
				}
			}
			o.away.Store(false)
			o.reads.Store(0)
			blocks := int64(0)
			for _, p := range o.catalog.Packs() {
				blocks += p.Size>>16 + 1
			}
			for try := range 3 {
				if err := read(o); err != nil {
					t.Errorf("read %d: %v", try, err)
				}
			}
			if n := o.reads.Load(); n == 0 || n > blocks {
				t.Errorf("%d reads of the bucket for %d damaged blocks", n, blocks)
			}
			if n := len(o.catalog.Condemned()); n != 0 {
				t.Errorf("%d chunks are condemned", n)
			}
			o.reads.Store(0)
			if err := read(o); err != nil || o.reads.Load() != 0 {
				t.Errorf("%d reads of the bucket once the cache is mended, error %v", o.reads.Load(), err)
			}
		})
	}
}

// damageFiles flips each byte that a range cache has of packs.
func damageFiles(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(dir + "/*.chunks")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files in the cache, error %v", len(files), err)
	}
	for _, name := range files {
		raw, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for i := range raw {
			raw[i] ^= 0x55
		}
		if err := os.WriteFile(name, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// What is wrong in the bucket is condemned although the cache has the same wrong bytes,
// and read again once it is right.
func TestADamagedPackIsFoundBehindTheRangeCache(t *testing.T) {
	d := newDisk()
	ps := contents(0, 50)
	first := d.open(t)
	first.put(t, ps)
	loc := first.damage(t, ps[7])
	o := d.openCached(t, t.TempDir())
	for _, p := range ps[:7] {
		if _, err := o.Get(t.Context(), chunk.Sum(p), nil); err != nil {
			t.Fatal(err) // the block of all is in the cache now
		}
	}
	var damage *store.CorruptError
	if _, err := o.Get(t.Context(), chunk.Sum(ps[7]), nil); !errors.As(err, &damage) {
		t.Errorf("got error %v, want damage", err)
	}
	if c := o.catalog.Condemned(); len(c) != 1 || c[0].Off != loc.Off {
		t.Errorf("condemned are %v", c)
	}
	o.put(t, ps[7:8])
	o.wantAll(t, ps)
}
