package packed_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"quarry/chunkindex"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	bucketmem "quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
	"quarry/store/storetest"
)

// disk is what survives a crash: bucket with journal, and the index's folder.
type disk struct {
	bucket *bucketmem.Bucket
	fs     *vfs.MemFS
}

func newDisk() disk { return disk{bucketmem.New(), vfs.NewCrashableMem()} }

// crash returns what a power cut would leave now: what was not synced is lost.
func (d disk) crash() disk {
	return disk{d.bucket.Clone(), d.fs.CrashClone(vfs.CrashCloneCfg{})}
}

// opened is a store with its parts at hand.
type opened struct {
	*packed.Store
	disk    disk
	catalog *catalog.Catalog
	index   *chunkindex.Index
}

func (d disk) open(t testing.TB, change ...func(*packed.Config)) *opened {
	t.Helper()
	o, err := d.tryOpen(t, d.bucket, d.bucket, d.fs, change...)
	if err != nil {
		t.Fatalf("open store: %v", err)
	}
	return o
}

// tryOpen opens the store with decorated parts.
func (d disk) tryOpen(t testing.TB, b bucket.Bucket, j bucket.Journal, fs vfs.FS, change ...func(*packed.Config)) (*opened, error) {
	t.Helper()
	ctx := context.Background()
	cat, err := catalog.Open(ctx, catalog.Config{Journal: j})
	if err != nil {
		return nil, err
	}
	ix, err := chunkindex.Open(chunkindex.Config{Dir: "index", FS: fs, CacheSize: 1 << 20, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { ix.Close() })
	cfg := packed.Config{Bucket: b, Catalog: cat, Index: ix, TmpDir: t.TempDir(), Workers: 2, Now: everLater()}
	for _, f := range change {
		f(&cfg)
	}
	s, err := packed.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &opened{s, d, cat, ix}, nil
}

// everLater is a clock that goes on by a minute each time, so that every read asks
// for packs that are late.
func everLater() func() time.Time {
	var n atomic.Int64
	return func() time.Time { return time.Unix(60*n.Add(1), 0) }
}

// packSize makes packs that small, so that a Write makes several.
func packSize(n int64) func(*packed.Config) {
	return func(c *packed.Config) { c.PackSize = n }
}

// contents returns n different chunks, compressible and not, of many sizes.
func contents(first, n int) [][]byte {
	var ps [][]byte
	for i := first; i < first+n; i++ {
		ps = append(ps, storetest.Content(uint64(i+1), 1+(i*i*37)%9000))
	}
	return ps
}

func putAll(ctx context.Context, s store.Store, ps [][]byte) error {
	return s.Write(ctx, func(ctx context.Context, w store.Putter) error {
		for _, p := range ps {
			if _, err := w.Put(ctx, p); err != nil {
				return err
			}
		}
		return nil
	})
}

func (o *opened) put(t testing.TB, ps [][]byte) {
	t.Helper()
	if err := putAll(t.Context(), o, ps); err != nil {
		t.Fatalf("write: %v", err)
	}
}

func (o *opened) wantAll(t testing.TB, ps [][]byte) {
	t.Helper()
	for _, p := range ps {
		got, err := o.Get(t.Context(), chunk.Sum(p), nil)
		if err != nil {
			t.Fatalf("get: %v", err)
		}
		if !bytes.Equal(got, p) {
			t.Fatalf("get returned %d wrong bytes", len(got))
		}
	}
}

func (o *opened) check(t testing.TB, quick bool) []packed.Problem {
	t.Helper()
	var ps []packed.Problem
	err := o.Check(t.Context(), packed.CheckConfig{Quick: quick}, func(p packed.Problem) { ps = append(ps, p) })
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	return ps
}

func (o *opened) wantClean(t testing.TB) {
	t.Helper()
	for _, p := range o.check(t, false) {
		t.Errorf("check found %s", p)
	}
}

// records returns the whole index.
func (o *opened) records(t testing.TB) []chunkindex.Record {
	t.Helper()
	var rs []chunkindex.Record
	for r, err := range o.index.All(t.Context()) {
		if err != nil {
			t.Fatalf("list index: %v", err)
		}
		rs = append(rs, r)
	}
	return rs
}

func (o *opened) locate(t testing.TB, p []byte) chunkindex.Location {
	t.Helper()
	locs, found, err := o.index.LookupBatch(t.Context(), []chunk.Digest{chunk.Sum(p)})
	if err != nil || !found[0] {
		t.Fatalf("look up: found %v, error %v", found, err)
	}
	return locs[0]
}

// damage flips a stored byte of a chunk.
func (o *opened) damage(t testing.TB, p []byte) chunkindex.Location {
	t.Helper()
	loc := o.locate(t, p)
	buckettest.Corrupt(t, o.disk.bucket, pack.Key(loc.Pack), loc.Off)
	return loc
}
