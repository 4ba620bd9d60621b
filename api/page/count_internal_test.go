package page

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/chunk"
)

// parts is a list of chunks of 10 stored bytes each.
func parts(names ...uint64) (list []part) {
	for _, n := range names {
		list = append(list, part{n, 10})
	}
	return list
}

func TestAnImageIsAloneWithWhatNoOtherHas(t *testing.T) {
	a, b, c, d := chunk.Digest{1}, chunk.Digest{2}, chunk.Digest{3}, chunk.Digest{4}
	n := newCount(100)
	for _, im := range []struct {
		id   chunk.Digest
		list []part
	}{
		{a, parts(1, 2, 3, 4)},
		{b, parts(1, 2, 3, 5)}, // three of four are a's
		{c, parts(6, 7, 8, 1)}, // one of four is
		{d, parts(1, 2, 3, 5)}, // all are, or b's
	} {
		if !n.add(im.id, im.list) {
			t.Fatalf("image %v was not taken", im.id)
		}
	}
	got := n.comparison()
	if diff := cmp.Diff(got.alone, map[chunk.Digest]int64{a: 10, b: 0, c: 30, d: 0}); diff != "" {
		t.Error(diff)
	}
	if len(got.families) != 1 {
		t.Fatalf("%d families, want one of a, b and d", len(got.families))
	}
	f := got.families[0]
	if diff := cmp.Diff(f.members, []chunk.Digest{a, b, d}); diff != "" || f.stored != 120 || f.saved != 70 {
		t.Errorf("%d of %d bytes saved, want 70 of 120; members: %s", f.saved, f.stored, diff)
	}
}

func TestACountHasABound(t *testing.T) {
	n := newCount(5)
	if !n.add(chunk.Digest{1}, parts(1, 2, 3)) || !n.add(chunk.Digest{2}, parts(1, 2, 3, 4, 5)) {
		t.Fatal("five distinct chunks were too many")
	}
	if n.add(chunk.Digest{3}, parts(6)) {
		t.Error("a sixth chunk was taken")
	}
}
