package chunkindex_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// has asks for the chunks in batches, in order, and fails when HasBatch and
// LookupBatch differ. It returns how many there are.
func has(t testing.TB, x *chunkindex.Index, es []pack.Entry) int {
	t.Helper()
	n := 0
	for batch := range slices.Chunk(es, 100) {
		_, want := lookup(t, x, batch)
		var ds []chunk.Digest
		for _, e := range batch {
			ds = append(ds, e.Digest)
		}
		got, in, err := x.HasBatch(t.Context(), ds)
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("HasBatch says %v, LookupBatch %v, error %v", got, want, err)
		}
		wantHolders(t, x, batch, got, in)
		for _, ok := range got {
			if ok {
				n++
			}
		}
	}
	return n
}

// wantHolders fails unless in are packs of the index, and those of every chunk's
// Location among them.
func wantHolders(t testing.TB, x *chunkindex.Index, batch []pack.Entry, found []bool, in []chunk.Digest) {
	t.Helper()
	applied := x.AppliedPacks()
	for _, id := range in {
		if !slices.Contains(applied, id) {
			t.Fatalf("HasBatch names %s, which is no pack of the index", id)
		}
	}
	if slices.Contains(found, true) != (len(in) > 0) {
		t.Fatalf("HasBatch finds %v in %d packs", found, len(in))
	}
	locs, _ := lookup(t, x, batch)
	for i, loc := range locs {
		if found[i] && !slices.Contains(in, loc.Pack) {
			t.Fatalf("HasBatch does not name pack %s", loc.Pack)
		}
	}
}

func TestARemovedChunkIsNotThereForASibling(t *testing.T) {
	fs := vfs.NewMem()
	x := open(t, fs)
	p1, p2, es := digest(-1), digest(-2), entries(0, 1000)
	insert(t, x, p1, es)
	// The last are in the second pack too, and the index has them there.
	insert(t, x, p2, es[900:])
	if n := has(t, x, es); n != 1000 || x.Siblings() != 2 {
		t.Fatalf("%d of 1000 are there, %d packs were read", n, x.Siblings())
	}
	if ok, err := x.DeleteIf(t.Context(), es[0].Digest, chunkindex.At(p1, es[0])); !ok || err != nil {
		t.Fatalf("delete: %t, %v", ok, err)
	}
	if n := has(t, x, es); n != 999 || x.Siblings() != 0 {
		t.Fatalf("%d are there after one was deleted, %d packs were read", n, x.Siblings())
	}
	p3, more := digest(-3), entries(5000, 200)
	insert(t, x, p3, more)
	if n := has(t, x, more); n != 200 || x.Siblings() != 1 {
		t.Fatalf("%d are there of a pack after the deletion, %d packs were read", n, x.Siblings())
	}
	x.Close()
	x = open(t, fs)
	if n := has(t, x, slices.Concat(es, more)); n != 1199 || x.Siblings() != 1 {
		t.Fatalf("%d are there after a restart, %d packs were read", n, x.Siblings())
	}
	// What the first pack has of the second's is gone from the index.
	if n, err := x.DropPack(t.Context(), p2); n != 100 || err != nil {
		t.Fatalf("dropped %d, %v", n, err)
	}
	if n := has(t, x, slices.Concat(es, more)); n != 1099 || x.Siblings() != 0 {
		t.Fatalf("%d are there after a pack was dropped, %d packs were read", n, x.Siblings())
	}
	if err := x.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := has(t, x, slices.Concat(es, more)); n != 0 {
		t.Fatalf("%d are there after a reset", n)
	}
	insert(t, x, p1, es)
	if n := has(t, x, es); n != 1000 || x.Siblings() != 1 {
		t.Fatalf("%d are there after a rebuild, %d packs were read", n, x.Siblings())
	}
}

// The digests of a pack are in memory, or read anew, when a later pack takes some:
// HasBatch then names the later one.
func TestAChunkThatMovesToALaterPackIsNoSiblingOfTheFirst(t *testing.T) {
	fs := vfs.NewMem()
	x := open(t, fs)
	es := entries(0, 3000)
	for p := range 10 {
		insert(t, x, digest(-1-p), es[p*300:][:300])
	}
	has(t, x, es)
	insert(t, x, digest(-20), es[2850:2900]) // of one pack
	for p := range 10 {                      // of all
		insert(t, x, digest(-30-p), []pack.Entry{es[p*300+240], es[p*300+241]})
	}
	if has(t, x, es); x.Siblings() != 4 {
		t.Errorf("%d packs were read, want 4", x.Siblings())
	}
	var some []pack.Entry
	for p := range 9 {
		some = append(some, es[p*300+260])
	}
	insert(t, x, digest(-50), some) // of too many to read: only the tenth and the one of 50 have siblings now
	for range 2 {
		for range 2 {
			if n := has(t, x, es); n != len(es) || x.Siblings() != 2 {
				t.Errorf("%d are there, %d packs were read", n, x.Siblings())
			}
		}
		x.Close()
		x = open(t, fs)
	}
}

func TestChunksOfMorePacksThanAreKept(t *testing.T) {
	x := open(t, vfs.NewMem())
	var all []pack.Entry
	for p := range 9 {
		es := entries(p*500, 500)
		insert(t, x, digest(-1-p), es)
		all = append(all, es...)
	}
	for range 2 {
		if n := has(t, x, slices.Concat(all, entries(1_000_000, 300))); n != len(all) {
			t.Errorf("%d are there, want %d", n, len(all))
		}
		rand.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	}
}

// An index of the first schema says nothing of what was removed from it.
func TestAnIndexOfTheFirstVersionIsRead(t *testing.T) {
	fs := vfs.NewMem()
	x := open(t, fs)
	es := entries(0, 500)
	insert(t, x, digest(-1), es)
	x.Close()
	db, err := pebble.Open("index", &pebble.Options{FS: fs, Logger: quiet{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(db.Set([]byte("v"), []byte("1"), pebble.Sync), db.Delete(append([]byte{'c'}, es[7].Digest[:]...), pebble.Sync), db.Close()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		x = open(t, fs)
		if n := has(t, x, es); n != 499 || x.Siblings() != 0 {
			t.Errorf("%d are there, %d packs were read", n, x.Siblings())
		}
		x.Close()
	}
}
