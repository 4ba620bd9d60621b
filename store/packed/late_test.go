package packed_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
)

// Reads of what nobody has ask for the packs that are late once in a while, Has and
// Write each time.
func TestReadsAskForLatePacksOnceInAWhile(t *testing.T) {
	d := newDisk()
	now := time.Unix(1000, 0)
	o := d.open(t, packSize(20_000))
	ps := contents(0, 30)
	o.put(t, ps)
	d = o.disk.crash()
	late := d.packs(t)
	back := d.away(t, late...)
	rebuilt(t, d.open(t))
	d = d.crash()

	var stats atomic.Int64
	f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket, Before: func(op buckettest.Op) error {
		if op.Method == "Stat" {
			stats.Add(1)
		}
		return nil
	}}
	o, err := d.tryOpen(t, f, f, d.fs, packSize(20_000), func(c *packed.Config) {
		c.Now = func() time.Time { return now }
	})
	if err != nil {
		t.Fatal(err)
	}
	unknown := chunk.Sum([]byte("nobody has this"))
	read := func() {
		for range 50 {
			if _, err := o.Get(t.Context(), unknown, nil); !errors.Is(err, store.ErrNotFound) {
				t.Fatalf("get: %v, want store.ErrNotFound", err)
			}
			err := o.GetBatch(t.Context(), []chunk.Digest{unknown}, func(_ chunk.Digest, _ []byte, err error) error { return err })
			if !errors.Is(err, store.ErrNotFound) {
				t.Fatalf("get batch: %v, want store.ErrNotFound", err)
			}
		}
	}
	var got []int64 // questions, by round
	round := func(f func()) {
		stats.Store(0)
		f()
		got = append(got, stats.Load())
	}
	round(read)
	round(read)
	now = now.Add(time.Second)
	round(read)
	now = now.Add(-time.Hour) // a clock that was put back
	round(read)
	for range 2 {
		round(func() {
			if must(o.Has(t.Context(), []chunk.Digest{unknown}))[0] {
				t.Error("has what nobody has")
			}
		})
	}
	n := int64(len(late))
	if diff := cmp.Diff([]int64{n, 0, n, n, n, n}, got); diff != "" || n < 2 {
		t.Errorf("questions for %d late packs (-want +got):\n%s", n, diff)
	}
	back(d)
	now = now.Add(time.Second)
	o.wantAll(t, ps)
}

// While one read asks for the packs that are late, others wait for what it finds.
func TestReadsWaitForTheOneThatAsksForLatePacks(t *testing.T) {
	d := newDisk()
	o := d.open(t)
	ps := contents(0, 5)
	o.put(t, ps)
	d = d.crash()
	back := d.away(t, d.packs(t)...)
	rebuilt(t, d.open(t))
	d = d.crash()
	f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
	o, err := d.tryOpen(t, f, f, d.fs, func(c *packed.Config) { c.Now = time.Now })
	if err != nil {
		t.Fatal(err)
	}
	back(d)
	asks, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	f.Before = func(op buckettest.Op) error {
		if op.Method == "Stat" {
			once.Do(func() { close(asks); <-goOn })
		}
		return nil
	}
	var g errgroup.Group
	get := func(p []byte) {
		g.Go(func() error {
			_, err := o.Get(t.Context(), chunk.Sum(p), nil)
			return err
		})
	}
	get(ps[0])
	<-asks
	for _, p := range ps {
		get(p)
	}
	time.Sleep(20 * time.Millisecond) // for them to begin; what they find does not depend on it
	close(goOn)
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// A copy in a pack that is cut off can be proved again. That puts no part of the
// pack into the index: the rest would then be missed when it is whole.
func TestALiftInALatePackLeavesItLate(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 30)
	o.put(t, ps)
	last := o.locate(t, ps[4])
	o.condemned(t, ps[3], ps[4])()
	key := pack.Key(o.locate(t, ps[0]).Pack)
	whole := buckettest.Bytes(t, o.disk.bucket, key)
	truncate(t, o.disk.bucket, key, pack.HeaderSize+1)
	rebuilt(t, o)
	buckettest.Put(t, o.disk.bucket, key, whole[:last.Off+int64(last.Stored)])
	o.check(t, false)
	if c := o.catalog.Condemned(); len(c) != 0 {
		t.Fatalf("condemned: %v: this tests nothing", c)
	}
	again := o.disk.crash().open(t)
	buckettest.Put(t, again.disk.bucket, key, whole)
	again.wantAll(t, ps)
	again.wantClean(t)
}

// The pack is put back in the middle of a check, before any of its reads: what is
// said to be condemned is.
func TestACheckTellsOfNothingCondemnedThatIsNot(t *testing.T) {
	for n := int64(1); ; n++ {
		d := newDisk()
		var reads atomic.Int64
		reached := false
		var whole []byte
		var key string
		f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
		o, err := d.tryOpen(t, f, f, d.fs)
		if err != nil {
			t.Fatal(err)
		}
		o.put(t, contents(0, 12))
		key = d.packs(t)[0]
		whole = buckettest.Bytes(t, d.bucket, key)
		truncate(t, d.bucket, key, int64(len(whole)/2))
		f.Before = func(op buckettest.Op) error {
			if op.Key == key && (op.Method == "ReadAt" || op.Method == "Stat") && reads.Add(1) == n {
				reached = true
				buckettest.Put(t, d.bucket, key, whole)
			}
			return nil
		}
		said := 0
		for _, p := range o.check(t, false) {
			if p.Action != packed.Condemned {
				continue
			}
			said++
			if !o.catalog.IsCondemned(p.Chunk, p.Pack, p.Off) {
				t.Errorf("put back before read %d: check says %s", n, p)
			}
		}
		if !reached {
			if said == 0 {
				t.Error("nothing was condemned at all")
			}
			return
		}
	}
}

// What has the place of a late pack is no reason to take it for applied, nor to read
// all of it, before it is whole.
func TestALatePackIsTakenInWhenItIsWhole(t *testing.T) {
	for name, tc := range map[string]struct {
		first func(p []byte) []byte // what comes before the pack itself
		read  bool                  // it may be read
	}{
		"cut off":             {func(p []byte) []byte { return p[:len(p)-100] }, false},
		"room made before it": {func(p []byte) []byte { return make([]byte, len(p)) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDisk()
			o := d.open(t)
			ps := contents(0, 30)
			o.put(t, ps)
			d = o.disk.crash()
			key := d.packs(t)[0]
			whole := buckettest.Bytes(t, d.bucket, key)
			d.away(t, key)
			rebuilt(t, d.open(t))
			d = d.crash()
			var reads atomic.Int64
			f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket, Before: func(op buckettest.Op) error {
				if op.Key == key && op.Method != "Stat" {
					reads.Add(1)
				}
				return nil
			}}
			o, err := d.tryOpen(t, f, f, d.fs)
			if err != nil {
				t.Fatal(err)
			}
			buckettest.Put(t, d.bucket, key, tc.first(whole))
			if must(o.Has(t.Context(), []chunk.Digest{chunk.Sum(ps[0])}))[0] {
				t.Error("has a chunk that is not there")
			}
			if n := reads.Load(); n > 0 && !tc.read {
				t.Errorf("%d reads of a pack that is cut off", n)
			}
			if err := d.bucket.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			buckettest.Put(t, d.bucket, key, whole)
			if !must(o.Has(t.Context(), []chunk.Digest{chunk.Sum(ps[0])}))[0] {
				t.Error("a chunk of the whole pack is not there")
			}
			o.wantAll(t, ps)
		})
	}
}
