package packed_test

import (
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"

	"quarry/store"
	"quarry/store/bucket/buckettest"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/packed"
)

func readOnly(c *packed.Config) { c.ReadOnly = true }

// reader returns a node that only reads what w writes, with an index of its own.
func (o *opened) reader(t *testing.T) *opened {
	t.Helper()
	return disk{o.disk.bucket, vfs.NewCrashableMem()}.open(t, readOnly)
}

func (o *opened) follow(t *testing.T) {
	t.Helper()
	if whole, err := o.Follow(t.Context(), nil); err != nil || !whole {
		t.Fatalf("follow: got %t, %v, want all", whole, err)
	}
}

// wantSame wants the reader to know just what the writer knows.
func (o *opened) wantSame(t *testing.T, w *opened) {
	t.Helper()
	if diff := cmp.Diff(w.records(t), o.records(t)); diff != "" {
		t.Errorf("the index of the reader differs (-writer +reader):\n%s", diff)
	}
}

func TestAReaderFollowsItsWriter(t *testing.T) {
	w := newDisk().open(t, packSize(20_000))
	ps := contents(0, 90)
	w.put(t, ps[:30])
	r := w.reader(t)
	r.wantAll(t, ps[:30])
	w.put(t, ps[30:60])
	if _, err := r.Get(t.Context(), chunk.Sum(ps[40]), nil); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("get before it follows: %v, want store.ErrNotFound", err)
	}
	r.follow(t)
	r.wantAll(t, ps[:60])
	mend := w.condemned(t, ps[3], ps[4], ps[40])
	r.follow(t)
	r.wantSame(t, w)
	mend()
	w.wantClean(t) // which lifts them
	r.follow(t)
	r.wantSame(t, w)
	r.wantAll(t, ps[:60])
	id := w.locate(t, ps[50]).Pack
	if err := w.catalog.RetirePack(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	r.follow(t)
	if _, err := r.Get(t.Context(), chunk.Sum(ps[50]), nil); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("get of a chunk of a retired pack: %v, want store.ErrNotFound", err)
	}
	w.put(t, ps[60:])
	r.follow(t)
	r.wantAll(t, ps[60:])
}

// TestAReaderThatWasDownKnowsWhatWasLifted: its index has lost the chunks that were
// condemned, and the journal has nothing of them any more when it comes back.
func TestAReaderThatWasDownKnowsWhatWasLifted(t *testing.T) {
	w := newDisk().open(t, packSize(20_000))
	ps := contents(0, 30)
	w.put(t, ps)
	r := w.reader(t)
	mend := w.condemned(t, ps[3], ps[20])
	r.follow(t)
	r.wantSame(t, w)
	down := r.disk.crash()
	mend()
	w.wantClean(t)
	again := disk{w.disk.bucket, down.fs}.open(t, readOnly)
	again.wantSame(t, w)
	again.wantAll(t, ps)
}

// TestAReaderChangesNothing: what it finds damaged it keeps in mind, for the bucket
// and the journal are the writer's.
func TestAReaderChangesNothing(t *testing.T) {
	w := newDisk().open(t)
	ps := contents(0, 30)
	w.put(t, ps)
	r := w.reader(t)
	before := buckettest.Entries(t, w.disk.bucket, 1)
	bad := w.damage(t, ps[7])
	for range 3 {
		if _, err := r.Get(t.Context(), chunk.Sum(ps[7]), nil); !errors.As(err, new(*store.CorruptError)) {
			t.Fatalf("get of a damaged copy: %v, want *store.CorruptError", err)
		}
	}
	for what, err := range map[string]error{
		"write":   putAll(t.Context(), r, contents(100, 1)),
		"condemn": r.Condemn(t.Context(), chunk.Sum(ps[7]), bad),
		"check":   r.Check(t.Context(), packed.CheckConfig{}, func(packed.Problem) {}),
	} {
		if !errors.Is(err, store.ErrReadOnly) {
			t.Errorf("%s: got error %v, want store.ErrReadOnly", what, err)
		}
	}
	r.rebuild(t)
	r.wantSame(t, w)
	if diff := cmp.Diff(before, buckettest.Entries(t, w.disk.bucket, 1)); diff != "" {
		t.Errorf("the journal was changed (-before +after):\n%s", diff)
	}
	buckettest.Corrupt(t, w.disk.bucket, "packs/"+bad.Pack.Hex(), bad.Off) // the same bit: it is whole again
	r.wantAll(t, ps)
	if _, err := w.Follow(t.Context(), nil); err == nil {
		t.Error("the writer followed itself")
	}
}

// TestAReaderGoesOnWhenTheBucketIsBack fails each call of a catch-up once.
func TestAReaderGoesOnWhenTheBucketIsBack(t *testing.T) {
	w := newDisk().open(t, packSize(20_000))
	ps := contents(0, 40)
	w.put(t, ps[:20])
	for k := int64(1); ; k++ {
		fault := buckettest.Faulty{Bucket: w.disk.bucket, Journal: w.disk.bucket}
		d := disk{w.disk.bucket.Clone(), vfs.NewCrashableMem()}
		fault.Bucket, fault.Journal = d.bucket, d.bucket
		r, err := d.tryOpen(t, &fault, &fault, d.fs, readOnly)
		if err != nil {
			t.Fatal(err)
		}
		more := d.open2(t)
		more.put(t, ps[20:])
		id := more.locate(t, ps[0]).Pack
		if err := more.catalog.RetirePack(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if _, err := more.index.DropPack(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		fault.Before = buckettest.FailNth(k)
		_, err = r.Follow(t.Context(), nil)
		if err != nil && !errors.Is(err, buckettest.ErrInjected) {
			t.Fatalf("call %d fails: %v", k, err)
		}
		fault.Before = nil
		r.follow(t)
		r.wantSame(t, more)
		if err == nil {
			if k < 5 {
				t.Errorf("a catch-up makes %d calls, want one for each pack at least", k)
			}
			return
		}
	}
}

// open2 opens the bucket's writer, with an index of its own.
func (d disk) open2(t *testing.T) *opened {
	t.Helper()
	return disk{d.bucket, vfs.NewCrashableMem()}.open(t, packSize(20_000))
}

// TestAReaderStopsAtANewerEntry: it serves what it knows, and skips nothing.
func TestAReaderStopsAtANewerEntry(t *testing.T) {
	w := newDisk().open(t)
	ps := contents(0, 20)
	w.put(t, ps)
	r := w.reader(t)
	entries := buckettest.Entries(t, w.disk.bucket, 1)
	if err := w.disk.bucket.Append(t.Context(), uint64(len(entries)+1), []byte(`{"v":99}`)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := r.Follow(t.Context(), nil); !errors.Is(err, catalog.ErrNewer) {
			t.Errorf("follow: got error %v, want catalog.ErrNewer", err)
		}
		r.wantAll(t, ps)
	}
}
