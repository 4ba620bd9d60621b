package packed_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
)

// away takes packs out of the bucket and returns what brings them back.
func (d disk) away(t testing.TB, keys ...string) (back func(disk)) {
	t.Helper()
	was := map[string][]byte{}
	for _, key := range keys {
		was[key] = buckettest.Bytes(t, d.bucket, key)
		if err := d.bucket.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	return func(d disk) {
		for key, p := range was {
			buckettest.Put(t, d.bucket, key, p)
		}
	}
}

func (d disk) packs(t testing.TB) []string {
	t.Helper()
	return buckettest.Keys(t, d.bucket, pack.KeyPrefix)
}

// wantUnreadable reads every chunk in every way, many at the same time.
func (o *opened) wantUnreadable(t *testing.T, ps [][]byte) {
	t.Helper()
	var ds []chunk.Digest
	for _, p := range ps {
		ds = append(ds, chunk.Sum(p))
	}
	unreadable := func(d chunk.Digest, p []byte, err error) error {
		if p != nil || !errors.As(err, new(*store.CorruptError)) {
			return fmt.Errorf("chunk %s: %d bytes, error %v, want *store.CorruptError", d, len(p), err)
		}
		return nil
	}
	var g errgroup.Group
	for range 8 {
		g.Go(func() error { return o.GetBatch(t.Context(), ds, unreadable) })
		for _, d := range ds {
			g.Go(func() error {
				p, err := o.Get(t.Context(), d, nil)
				return unreadable(d, p, err)
			})
		}
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if c := o.catalog.Condemned(); len(c) != 0 {
		t.Errorf("condemned: %v", c)
	}
}

func TestPacksThatComeBackAreReadAgain(t *testing.T) {
	ps := contents(0, 30)
	cutAt := func(n func(size int) int64) func(t *testing.T, o *opened) func(disk) {
		return func(t *testing.T, o *opened) func(disk) {
			key := o.disk.packs(t)[0]
			whole := buckettest.Bytes(t, o.disk.bucket, key)
			truncate(t, o.disk.bucket, key, n(len(whole)))
			return func(d disk) { buckettest.Put(t, d.bucket, key, whole) }
		}
	}
	cut := cutAt(func(int) int64 { return pack.HeaderSize + 1 })
	cutLater := cutAt(func(size int) int64 { return int64(size / 2) })
	one := func(t *testing.T, o *opened) func(disk) { return o.disk.away(t, o.disk.packs(t)[0]) }
	all := func(t *testing.T, o *opened) func(disk) { return o.disk.away(t, o.disk.packs(t)...) }
	for name, tc := range map[string]struct {
		away  func(t *testing.T, o *opened) func(disk)
		while func(t *testing.T, o *opened) *opened // what is done meanwhile
	}{
		"one pack":  {one, nil},
		"all packs": {all, nil},
		"a part":    {cut, nil},
		"one pack, and the store is restarted": {one, func(t *testing.T, o *opened) *opened {
			return o.disk.crash().open(t)
		}},
		"one pack, and it is checked": {one, func(t *testing.T, o *opened) *opened {
			o.wantFindings(t, false, finding{packed.PackMissing, chunk.Digest{}, packed.None})
			o.wantFindings(t, true, finding{packed.PackMissing, chunk.Digest{}, packed.None})
			return o
		}},
		"all packs, and they are checked": {all, func(t *testing.T, o *opened) *opened {
			o.check(t, false)
			return o.disk.crash().open(t)
		}},
		"one pack, and the index is made anew": {one, rebuilt},
		"all packs, and the index is made anew": {all, func(t *testing.T, o *opened) *opened {
			rebuilt(t, o)
			o.check(t, false)
			return o
		}},
		"a part, and the index is made anew": {cut, rebuilt},
		"a part, the index is made anew and the store is restarted": {cutLater, func(t *testing.T, o *opened) *opened {
			rebuilt(t, o)
			return o.disk.crash().open(t)
		}},
		"a part, the index is made anew and checked and the store is restarted": {cutLater, func(t *testing.T, o *opened) *opened {
			rebuilt(t, o)
			o.check(t, true)
			o.check(t, false)
			return o.disk.crash().open(t)
		}},
		"all packs, and the index is lost": {all, func(t *testing.T, o *opened) *opened {
			return disk{o.disk.bucket, vfs.NewCrashableMem()}.open(t)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			o := newDisk().open(t, packSize(20_000))
			o.put(t, ps)
			back := tc.away(t, o)
			var lost [][]byte
			for _, p := range ps {
				if _, err := o.Get(t.Context(), chunk.Sum(p), nil); err != nil {
					lost = append(lost, p)
				}
			}
			if len(lost) == 0 {
				t.Fatal("every chunk can be read: this tests nothing")
			}
			o.wantUnreadable(t, lost)
			if tc.while != nil {
				o = tc.while(t, o)
				for _, p := range lost {
					if got, err := o.Get(t.Context(), chunk.Sum(p), nil); err == nil {
						t.Errorf("got %d bytes of a pack that is away", len(got))
					}
				}
				if c := o.catalog.Condemned(); len(c) != 0 {
					t.Errorf("condemned: %v", c)
				}
			}
			have := must(o.Has(t.Context(), digests(lost)))
			for i := range have {
				if have[i] {
					t.Errorf("chunk %d is said to be held", i)
				}
			}
			back(o.disk)
			o.wantAll(t, ps)
			for i, ok := range must(o.Has(t.Context(), digests(ps))) {
				if !ok {
					t.Errorf("chunk %d is said not to be held", i)
				}
			}
			o.wantClean(t)
			again := o.disk.crash().open(t)
			again.wantAll(t, ps)
			again.wantClean(t)
		})
	}
}

func rebuilt(t *testing.T, o *opened) *opened {
	t.Helper()
	told := 0
	if _, err := o.Rebuild(t.Context(), func(packed.Problem) { told++ }); err != nil || told == 0 {
		t.Fatalf("rebuild: %d problems, error %v", told, err)
	}
	return o
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func digests(ps [][]byte) []chunk.Digest {
	var ds []chunk.Digest
	for _, p := range ps {
		ds = append(ds, chunk.Sum(p))
	}
	return ds
}

// Nobody has to read or check before: the Write finds out by itself.
func TestAWriteStoresWhatIsMissingAnew(t *testing.T) {
	ps := contents(0, 30)
	for name, tc := range map[string]struct {
		lose func(t *testing.T, o *opened)
		also bool // the missing packs are made again as they were
	}{
		"one pack of several": {func(t *testing.T, o *opened) {
			o.disk.away(t, o.disk.packs(t)[0])
		}, false},
		"all packs": {func(t *testing.T, o *opened) {
			o.disk.away(t, o.disk.packs(t)...)
		}, true},
		"all packs, the index made anew": {func(t *testing.T, o *opened) {
			o.disk.away(t, o.disk.packs(t)...)
			rebuilt(t, o)
		}, true},
		"the end of a pack": {func(t *testing.T, o *opened) {
			key := o.disk.packs(t)[0]
			truncate(t, o.disk.bucket, key, int64(len(buckettest.Bytes(t, o.disk.bucket, key)))/2)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := newDisk().open(t, packSize(20_000))
			o.put(t, ps)
			tc.lose(t, o)
			o.put(t, append(ps, ps...)) // each twice: what was just stored anew is not stored again
			o.wantAll(t, ps)
			if tc.also {
				o.wantClean(t)
			}
			o.check(t, false)
			o.wantClean(t)
			n := len(o.records(t))
			o.put(t, ps)
			again := o.disk.crash().open(t)
			again.wantAll(t, ps)
			again.wantClean(t)
			if got := len(again.records(t)); got != n || n != len(ps) {
				t.Errorf("%d chunks in the index, want %d", got, len(ps))
			}
		})
	}
}

// The pack whose chunks were stored anew may come back all the same.
func TestAPackThatComesBackAfterItsChunksWereStoredAnew(t *testing.T) {
	o := newDisk().open(t, packSize(20_000))
	ps := contents(0, 30)
	o.put(t, ps)
	key := pack.Key(o.locate(t, ps[0]).Pack)
	back := o.disk.away(t, key)
	o.put(t, ps[1:]) // into other packs than they were in
	o.put(t, ps)
	before := o.records(t)
	back(o.disk)
	o.wantAll(t, ps)
	o.wantClean(t)
	if _, err := o.Rebuild(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, o.records(t)); diff != "" {
		t.Errorf("rebuilt index differs:\n%.1000s", diff)
	}
	o.disk.away(t, key)
	o.wantAll(t, ps)
	o.wantClean(t) // which retires it
	if packs := o.catalog.Packs(); len(packs) != len(o.disk.packs(t)) {
		t.Errorf("%d packs in the journal, %d in the bucket", len(packs), len(o.disk.packs(t)))
	}
}

// A chunk in two packs, of which the index has the later one: when that is missing,
// the first does not make it known.
func TestAChunkInTwoPacksWhoseLaterOneIsMissing(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 200)
	o.put(t, ps)
	first := o.locate(t, ps[0]).Pack
	back := o.disk.away(t, pack.Key(first))
	o.put(t, ps[:10])
	later := o.locate(t, ps[0]).Pack
	back(o.disk)
	for range 2 { // the second time by the digests of the first pack
		o.put(t, ps)
	}
	o.disk.away(t, pack.Key(later))
	// It is not read here: that would tell the Write.
	if _, err := o.disk.bucket.Stat(t.Context(), pack.Key(o.locate(t, ps[0]).Pack)); !errors.Is(err, bucket.ErrNotFound) || first == later {
		t.Fatalf("the chunk can be read (%v): this tests nothing", err)
	}
	o.put(t, ps)
	o.wantAll(t, ps)
}

// A link in the place of a pack keeps its chunks out of use as long as it is there.
func TestAPackThatIsNoObjectIsMissing(t *testing.T) {
	d := newDisk()
	f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
	o, err := d.tryOpen(t, f, f, d.fs)
	if err != nil {
		t.Fatal(err)
	}
	ps := contents(0, 5)
	o.put(t, ps)
	key, planted := pack.Key(o.locate(t, ps[0]).Pack), true
	f.Before = func(op buckettest.Op) error {
		switch {
		case op.Key != key:
		case op.Method == "Put":
			planted = false
		case planted:
			return fmt.Errorf("%w: a link", bucket.ErrDamaged)
		}
		return nil
	}
	for range 2 {
		for _, p := range ps {
			if _, err := o.Get(t.Context(), chunk.Sum(p), nil); !errors.As(err, new(*store.CorruptError)) {
				t.Errorf("get: %v, want *store.CorruptError", err)
			}
		}
		o.wantFindings(t, true, finding{packed.PackMissing, chunk.Digest{}, packed.None})
		o.wantFindings(t, false, finding{packed.PackMissing, chunk.Digest{}, packed.None})
	}
	o.put(t, ps)
	o.wantAll(t, ps)
	o.wantClean(t)
}

// A bucket that cannot be asked says nothing of what it holds: nothing is stored
// twice for it, and nothing is promised.
func TestAWriteEndsWhenItCannotBeToldWhetherAPackIsThere(t *testing.T) {
	d := newDisk()
	ps := contents(0, 5)
	d.open(t).put(t, ps)
	d = d.crash()
	f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
	o, err := d.tryOpen(t, f, f, d.fs)
	if err != nil {
		t.Fatal(err)
	}
	before := d.packs(t)
	f.Before = buckettest.FailAll("Stat")
	if err := putAll(t.Context(), o, ps); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("write: %v, want the injected error", err)
	}
	if _, err := o.Has(t.Context(), digests(ps)); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("has: %v, want the injected error", err)
	}
	if diff := cmp.Diff(before, d.packs(t)); diff != "" {
		t.Errorf("packs (-before +after):\n%s", diff)
	}
}

// twice stores chunks in a first pack and, while that is away, in others. It returns
// with all of them away, what brings the first back, and what brings the others.
func (o *opened) twice(t *testing.T, ps [][]byte) (first chunk.Digest, backFirst, backRest func()) {
	t.Helper()
	o.put(t, ps)
	first = o.locate(t, ps[0]).Pack
	backOne := o.disk.away(t, pack.Key(first))
	o.put(t, slices.Concat(contents(100, 1), ps)) // another pack than the first
	back := o.disk.away(t, o.disk.packs(t)...)
	return first, func() { backOne(o.disk) }, func() { back(o.disk) }
}

// A pack whose chunks are in others too is needed while those are away.
func TestACheckWhileAllPacksAreAwayRetiresNone(t *testing.T) {
	for _, quick := range []bool{false, true} {
		o := newDisk().open(t)
		ps := contents(0, 30)
		first, backFirst, _ := o.twice(t, ps)
		o.check(t, quick)
		if !o.catalog.HasPack(first) {
			t.Errorf("quick %v: the first pack is retired", quick)
		}
		backFirst()
		o.rebuild(t)
		o.wantAll(t, ps)
	}
}

func TestACheckUsesTheCopyThatIsThere(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 30)
	_, backFirst, backRest := o.twice(t, ps)
	backFirst()
	o.wantUnreadable(t, ps[:1])
	o.check(t, true)
	o.wantAll(t, ps)
	backRest()
	o.wantAll(t, ps)
	o.wantClean(t)
}

// A check that finds the only other copy damaged retires no pack that may have a
// good one.
func TestAMissingPackIsKeptWhileItsOtherCopyIsDamaged(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 30)
	first, backFirst, backRest := o.twice(t, ps)
	backRest()
	o.damage(t, ps[0])
	for range 2 { // the second time it is condemned
		o.check(t, false)
		if !o.catalog.HasPack(first) {
			t.Fatal("the first pack is retired")
		}
	}
	backFirst()
	o.check(t, false)
	o.wantAll(t, ps)
}
