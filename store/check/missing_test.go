package check_test

import (
	"context"
	"slices"
	"testing"

	"quarry/store"
	"quarry/store/bucket/buckettest"
	"quarry/store/check"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
)

// A missing pack is damage as long as an image needs it, and stays in the store: it
// may come back. One that no image needs is a note.
func TestAMissingPackIsDamageWhileAnImageNeedsIt(t *testing.T) {
	w := newWorld(t)
	key := buckettest.Keys(t, w.bucket, pack.KeyPrefix)[0]
	whole := buckettest.Bytes(t, w.bucket, key)
	lose := func() {
		if err := w.bucket.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	missing := func(ps []check.Problem) *check.Problem {
		i := slices.IndexFunc(ps, func(p check.Problem) bool { return p.Kind == string(packed.PackMissing) })
		if i < 0 {
			return nil
		}
		return &ps[i]
	}
	lose()
	for range 2 {
		found, _ := w.run(t)
		if p := missing(found); p == nil || p.Note || p.Object != key {
			t.Fatalf("found %+v, want %s missing", found, key)
		}
		if !slices.ContainsFunc(found, func(p check.Problem) bool { return slices.Contains(p.Images, "team/task:v1") }) {
			t.Errorf("the image is not named: %+v", found)
		}
	}
	buckettest.Put(t, w.bucket, key, whole)
	if found, _ := w.run(t); len(found) > 0 {
		t.Errorf("once it is back: %+v", found)
	}

	if _, err := w.Store.WriteStats(t.Context(), func(ctx context.Context, put store.Putter) error {
		_, err := put.Put(ctx, []byte("no image's"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	keys := buckettest.Keys(t, w.bucket, pack.KeyPrefix)
	key = keys[1-slices.Index(keys, key)]
	lose()
	found, sum := w.run(t)
	if p := missing(found); len(found) != 1 || p == nil || !p.Note || p.Object != key || sum.Problems != 0 {
		t.Errorf("found %+v, want a note of %s", found, key)
	}
}

// gc that was killed, or runs beside the check, leaves packs that it empties: what is in
// them is read as before, so it is no damage. One that is missing too is.
func TestWhatGCEmptiesIsNoDamage(t *testing.T) {
	w := newWorld(t)
	packs := w.Catalog.Packs()
	if err := w.Store.CondemnPacks(t.Context(), []chunk.Digest{packs[0].ID}); err != nil {
		t.Fatal(err)
	}
	if found, _ := w.run(t); len(found) > 0 {
		t.Errorf("found %+v", found)
	}
	if err := w.bucket.Delete(t.Context(), pack.Key(packs[0].ID)); err != nil {
		t.Fatal(err)
	}
	if found, _ := w.run(t); !slices.ContainsFunc(found, func(p check.Problem) bool { return p.Kind == "chunk-missing" }) {
		t.Errorf("without its object: found %+v", found)
	}
}
