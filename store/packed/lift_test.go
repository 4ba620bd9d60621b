package packed_test

import (
	"errors"
	"testing"

	"quarry/store"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// condemned damages chunks and reads them, and returns what puts the right bytes
// back.
func (o *opened) condemned(t *testing.T, ps ...[]byte) (mend func()) {
	t.Helper()
	was := map[string][]byte{}
	for _, key := range o.disk.packs(t) {
		was[key] = buckettest.Bytes(t, o.disk.bucket, key)
	}
	for _, p := range ps {
		o.damage(t, p)
		if _, err := o.Get(t.Context(), chunk.Sum(p), nil); !errors.As(err, new(*store.CorruptError)) {
			t.Fatalf("get: %v, want *store.CorruptError", err)
		}
	}
	if n := len(o.catalog.Condemned()); n != len(ps) {
		t.Fatalf("%d copies are condemned, want %d", n, len(ps))
	}
	return func() {
		for key, p := range was {
			buckettest.Put(t, o.disk.bucket, key, p)
		}
	}
}

func (o *opened) rebuild(t *testing.T) {
	t.Helper()
	if _, err := o.Rebuild(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
}

var lifts = map[string]func(*testing.T, *opened){
	"check":   func(t *testing.T, o *opened) { o.wantClean(t) },
	"rebuild": func(t *testing.T, o *opened) { o.rebuild(t) },
}

func TestACondemnedCopyThatIsGoodAgainIsLifted(t *testing.T) {
	ps := contents(0, 30)
	for name, lift := range lifts {
		t.Run(name, func(t *testing.T) {
			o := newDisk().open(t, packSize(20_000))
			o.put(t, ps)
			mend := o.condemned(t, ps[3], ps[4], ps[20])
			for _, notYet := range lifts { // bad copies stay condemned
				notYet(t, o)
				if n := len(o.catalog.Condemned()); n != 3 {
					t.Fatalf("%d copies are condemned, want 3", n)
				}
			}
			mend()
			if _, err := o.Get(t.Context(), chunk.Sum(ps[3]), nil); !errors.Is(err, store.ErrNotFound) {
				t.Errorf("get before it was proved: %v, want store.ErrNotFound", err)
			}
			lift(t, o)
			if c := o.catalog.Condemned(); len(c) != 0 {
				t.Errorf("condemned: %v", c)
			}
			o.wantAll(t, ps)
			again := o.disk.crash().open(t)
			again.wantAll(t, ps)
			again.wantClean(t)
			again.rebuild(t)
			again.wantAll(t, ps)
		})
	}
}

func TestOfTwoCondemnedCopiesTheGoodOneIsLifted(t *testing.T) {
	ps := contents(0, 30)
	for name, lift := range lifts {
		t.Run(name, func(t *testing.T) {
			o := newDisk().open(t)
			o.put(t, ps)
			mend := o.condemned(t, ps[3], ps[4])
			bad := o.catalog.Condemned()[0] // the pack's first
			if bad.Digest != chunk.Sum(ps[3]) {
				t.Fatalf("%s is condemned at %d", bad.Digest, bad.Off)
			}
			mend()
			buckettest.Corrupt(t, o.disk.bucket, pack.Key(bad.Pack), bad.Off)
			lift(t, o)
			for _, o := range []*opened{o, o.disk.crash().open(t)} {
				if !o.catalog.IsCondemned(bad.Digest, bad.Pack, bad.Off) || len(o.catalog.Condemned()) != 1 {
					t.Errorf("condemned: %v, want %v", o.catalog.Condemned(), bad)
				}
				if _, err := o.Get(t.Context(), bad.Digest, nil); !errors.Is(err, store.ErrNotFound) {
					t.Errorf("get of the bad one: %v, want store.ErrNotFound", err)
				}
				o.wantAll(t, ps[:3])
				o.wantAll(t, ps[4:])
				o.wantClean(t)
			}
		})
	}
}

// A pack with condemned chunks whose others are all elsewhere is not given up while
// it is missing: it may come back with good bytes.
func TestAMissingPackWithCondemnedChunksIsNotRetired(t *testing.T) {
	o := newDisk().open(t)
	ps := contents(0, 3)
	o.put(t, ps)
	mend := o.condemned(t, ps...)
	o.disk.away(t, o.disk.packs(t)...)
	for range 2 {
		if ps := o.check(t, false); len(ps) != 1 {
			t.Errorf("check found %v", ps)
		}
	}
	mend()
	o.wantClean(t)
	o.wantAll(t, ps)
}

// The journal's append fails in the middle of a lift: whatever became of it, no bad
// copy is given, and the next check ends it.
func TestALiftThatFailsIsFinishedByTheNext(t *testing.T) {
	ps := contents(0, 30)
	for k := int64(1); k <= 2; k++ {
		d := newDisk()
		f := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket}
		o, err := d.tryOpen(t, f, f, d.fs)
		if err != nil {
			t.Fatal(err)
		}
		o.put(t, ps)
		mend := o.condemned(t, ps[3], ps[4])
		bad := o.catalog.Condemned()[0]
		mend()
		buckettest.Corrupt(t, d.bucket, pack.Key(bad.Pack), bad.Off)
		f.Before = buckettest.FailNth(k, "Append")
		if _, err := o.Rebuild(t.Context(), nil); !errors.Is(err, buckettest.ErrInjected) {
			t.Fatalf("fault %d: rebuild: %v, want the injected error", k, err)
		}
		f.Before = nil
		again := d.crash().open(t)
		if p, err := again.Get(t.Context(), bad.Digest, nil); err == nil {
			t.Errorf("fault %d: %d bytes of a bad copy", k, len(p))
		}
		again.check(t, false)
		again.wantAll(t, ps[:3])
		again.wantAll(t, ps[4:])
		again.wantClean(t)
	}
}
