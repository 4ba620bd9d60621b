package catalog_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
)

func TestACondemnedPackThatIsStoredAnewIsOneNoLonger(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	p := digest("p")
	must(t, c.AddPack(t.Context(), p, 100))
	must(t, c.CondemnPack(t.Context(), p))
	must(t, c.CondemnPack(t.Context(), p)) // nothing new
	must(t, c.CondemnPack(t.Context(), digest("unknown")))
	wantEntryCount(t, j, 2)
	if !open(t, j).IsPackCondemned(p) {
		t.Error("the pack is not condemned")
	}
	must(t, c.AddPack(t.Context(), p, 100))
	if open(t, j).IsPackCondemned(p) {
		t.Error("the pack is condemned although it was stored anew")
	}
}

func TestADeletedPackNeverComesBack(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	p := digest("p")
	must(t, c.AddPack(t.Context(), p, 100))
	if err := c.DeletePack(t.Context(), p); err == nil {
		t.Error("DeletePack of a pack of the catalog: got no error")
	}
	must(t, c.RetirePack(t.Context(), p))
	must(t, c.AddPack(t.Context(), p, 100)) // retired packs may
	must(t, c.RetirePack(t.Context(), p))
	must(t, c.DeletePack(t.Context(), p))
	must(t, c.DeletePack(t.Context(), p)) // nothing new
	wantErr(t, "AddPack", c.AddPack(t.Context(), p, 100), catalog.ErrPackDeleted)
	again := open(t, j)
	wantErr(t, "AddPack", again.AddPack(t.Context(), p, 100), catalog.ErrPackDeleted)
	if !again.IsPackDeleted(p) || again.IsPackDeleted(digest("q")) {
		t.Error("IsPackDeleted is not true for exactly the deleted pack")
	}
}

func TestSourcesThatLostANameAreRemembered(t *testing.T) {
	j, now := mem.New(), time.Unix(1_800_000_000, 0)
	c, err := catalog.Open(t.Context(), catalog.Config{
		Journal: j, Clock: func() time.Time { return now },
		Writer: &catalog.Writer{ID: hexID, Folder: hexID, Host: "h", PID: 1},
	})
	must(t, err)
	must(t, c.SetName(t.Context(), name("t", 1)))
	must(t, c.Pin(t.Context(), digest("pinned")))
	set := now
	now = now.Add(3 * time.Hour)
	moved := name("t", 2)
	moved.Source = digest("other")
	must(t, c.SetName(t.Context(), moved))
	left := map[chunk.Digest]time.Time{digest("t"): now}
	now = now.Add(catalog.ClockStep / 2) // within a step nothing is noted
	must(t, c.SetName(t.Context(), name("u", 1)))
	must(t, c.DeleteName(t.Context(), "repo", "u"))
	left[digest("u")] = now.Add(-catalog.ClockStep / 2)
	now = now.Add(-6 * time.Hour) // the clock was put back
	must(t, c.Unpin(t.Context(), digest("pinned")))
	left[digest("pinned")] = now
	wantErr(t, "Unpin of nothing", c.Unpin(t.Context(), digest("pinned")), catalog.ErrNotFound)

	for what, c := range map[string]*catalog.Catalog{"catalog": c, "journal": open(t, j)} {
		if diff := cmp.Diff(left, c.Left()); diff != "" {
			t.Errorf("%s: Left (-want +got):\n%s", what, diff)
		}
		if got, want := c.NameSince("repo", "t"), set.Add(3*time.Hour); !got.Equal(want) {
			t.Errorf("%s: NameSince: got %s, want %s", what, got, want)
		}
		if got := c.NameSince("repo", "u"); !got.IsZero() {
			t.Errorf("%s: NameSince of a deleted name: got %s, want none", what, got)
		}
	}
	must(t, c.DeleteImage(t.Context(), digest("t")))
	if _, ok := c.Left()[digest("t")]; ok {
		t.Error("Left has an image that was deleted")
	}
}

// TestTheFirstClockDatesWhatWasBefore: a journal of an earlier version says nothing of
// time, and what was left then must not go at once.
func TestTheFirstClockDatesWhatWasBefore(t *testing.T) {
	j, now := mem.New(), time.Unix(1_800_000_000, 0)
	old := open(t, j)
	must(t, old.SetName(t.Context(), name("t", 1)))
	must(t, old.SetName(t.Context(), name("u", 1)))
	must(t, old.DeleteName(t.Context(), "repo", "u"))
	c, err := catalog.Open(t.Context(), catalog.Config{
		Journal: j, Clock: func() time.Time { return now },
		Writer: &catalog.Writer{ID: hexID, Folder: hexID, Host: "h", PID: 1},
	})
	must(t, err)
	if !c.NameSince("repo", "t").IsZero() {
		t.Error("NameSince without a clock is not zero")
	}
	must(t, c.SetName(t.Context(), name("v", 1)))
	if got := c.Left()[digest("u")]; !got.Equal(now) {
		t.Errorf("Left: got %s, want %s", got, now)
	}
	if got := c.NameSince("repo", "t"); !got.Equal(now) {
		t.Errorf("NameSince: got %s, want %s", got, now)
	}
}

func TestPins(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	must(t, c.Pin(t.Context(), digest("a")))
	must(t, c.Pin(t.Context(), digest("a"))) // nothing new
	wantEntryCount(t, j, 1)
	if got := open(t, j).Pins(); len(got) != 1 || got[0] != digest("a") {
		t.Errorf("Pins: got %v", got)
	}
	must(t, c.Unpin(t.Context(), digest("a")))
	if err := c.Unpin(t.Context(), digest("a")); !errors.Is(err, catalog.ErrNotFound) {
		t.Errorf("Unpin: got %v", err)
	}
}

const hexID = "0123456789abcdef0123456789abcdef"
