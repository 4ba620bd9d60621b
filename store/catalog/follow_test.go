package catalog_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
)

// wantWhole catches up and wants all of it.
func wantWhole(t *testing.T, c *catalog.Catalog) {
	t.Helper()
	if whole, err := c.CatchUp(t.Context(), nil); err != nil || !whole {
		t.Fatalf("CatchUp: got %t, %v, want all", whole, err)
	}
}

func TestCatchUpFollowsAWriter(t *testing.T) {
	j := mem.New()
	reader := open(t, j)
	wantWhole(t, reader)
	w := openWriter(t, j, "a")
	for i, change := range script() {
		must(t, change(t.Context(), w))
		wantWhole(t, reader)
		if diff := cmp.Diff(contentsOf(w), contentsOf(reader)); diff != "" {
			t.Fatalf("after change %d the reader differs (-writer +reader):\n%s", i, diff)
		}
	}
	if got, want := reader.Epoch(), w.Epoch(); got != want {
		t.Errorf("epoch: got %+v, want %+v", got, want)
	}
	if got, want := reader.Applied(), uint64(len(script())+1); got != want {
		t.Errorf("applied: got entry %d, want %d", got, want)
	}
}

func TestCatchUpTellsOfEachEntryOnce(t *testing.T) {
	j := mem.New()
	reader := open(t, j)
	w := open(t, j)
	for i := range 5 {
		must(t, w.SetName(t.Context(), name(fmt.Sprint(i), 1)))
	}
	var left []int
	stop := errors.New("stop")
	see := func(_ catalog.Entry, n int) error {
		if left = append(left, n); n == 2 {
			return stop
		}
		return nil
	}
	_, err := reader.CatchUp(t.Context(), see)
	wantErr(t, "CatchUp", err, stop)
	if _, err := reader.CatchUp(t.Context(), func(_ catalog.Entry, n int) error { left = append(left, n); return nil }); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{4, 3, 2, 1, 0}, left); diff != "" {
		t.Errorf("entries left (-want +got):\n%s", diff)
	}
}

func TestCatchUpStopsAtWhatItCannotRead(t *testing.T) {
	for _, test := range []struct {
		name, entry string
		want        error
	}{
		{"a newer entry", `{"v":4,"type":"x"}`, catalog.ErrNewer},
		{"a damaged entry", `{"v":1,"type":"pack_`, catalog.ErrDamaged},
		{"an entry that cannot follow", `{"v":1,"type":"pack_retired","pack":"` + hexA + `"}`, catalog.ErrDamaged},
	} {
		t.Run(test.name, func(t *testing.T) {
			j := mem.New()
			reader := open(t, j)
			must(t, open(t, j).SetName(t.Context(), name("a", 1)))
			must(t, j.Append(t.Context(), 2, []byte(test.entry)))
			for range 2 {
				_, err := reader.CatchUp(t.Context(), nil)
				wantErr(t, "CatchUp", err, test.want)
			}
			if got := reader.Applied(); got != 1 {
				t.Errorf("applied entry %d, want the one before", got)
			}
		})
	}
}

// TestCatchUpKnowsTheJournalItReads: an empty folder in the place of the bucket, or
// a journal that was put back, is not a journal without news.
func TestCatchUpKnowsTheJournalItReads(t *testing.T) {
	good := mem.New()
	w := open(t, good)
	must(t, w.SetName(t.Context(), name("a", 1)))
	before := good.Clone()
	must(t, w.SetName(t.Context(), name("b", 1)))
	other := before.Clone()
	must(t, open(t, other).SetName(t.Context(), name("c", 1)))
	for what, j := range map[string]bucket.Journal{"an empty one": mem.New(), "one put back": before, "another one": other} {
		t.Run(what, func(t *testing.T) {
			s := &switchJournal{good}
			reader := open(t, s)
			s.Journal = j
			_, err := reader.CatchUp(t.Context(), nil)
			wantErr(t, "CatchUp", err, catalog.ErrDiverged)
			s.Journal = good
			wantWhole(t, reader)
		})
	}
}

type switchJournal struct{ bucket.Journal }

func TestCatchUpGoesOnAfterAnError(t *testing.T) {
	j := mem.New()
	away := false
	reader := open(t, &buckettest.Faulty{Journal: j, Before: func(op buckettest.Op) error {
		if away {
			return buckettest.ErrInjected
		}
		return nil
	}})
	must(t, open(t, j).SetName(t.Context(), name("a", 1)))
	away = true
	_, err := reader.CatchUp(t.Context(), nil)
	wantErr(t, "CatchUp", err, buckettest.ErrInjected)
	away = false
	wantWhole(t, reader)
	if got := len(reader.Names()); got != 1 {
		t.Errorf("got %d names, want 1", got)
	}
}

// TestCatchUpIsBounded: a node that was away for long takes a part at a time.
func TestCatchUpIsBounded(t *testing.T) {
	j := mem.New()
	reader := open(t, j)
	w := open(t, j)
	const n = 4096 + 10
	for i := range n {
		must(t, w.SetName(t.Context(), name(fmt.Sprint(i), 1)))
	}
	if whole, err := reader.CatchUp(t.Context(), nil); err != nil || whole || reader.Applied() != 4096 {
		t.Errorf("first part: got %t, %v, %d entries", whole, err, reader.Applied())
	}
	wantWhole(t, reader)
	if got := reader.Applied(); got != n {
		t.Errorf("applied %d entries, want %d", got, n)
	}
}
