package catalog_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
)

func open(t *testing.T, j bucket.Journal) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: j})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got error %v, want %v", what, got, want)
	}
}

// contents is all that a catalog tells.
type contents struct {
	Packs     []catalog.Pack
	Condemned []catalog.CondemnedChunk
	Names     []catalog.Name
}

func contentsOf(c *catalog.Catalog) contents {
	return contents{c.Packs(), c.Condemned(), c.Names()}
}

// wantReplay checks that the journal adds up to what the catalog says.
func wantReplay(t *testing.T, c *catalog.Catalog, j bucket.Journal) {
	t.Helper()
	if diff := cmp.Diff(contentsOf(open(t, j)), contentsOf(c)); diff != "" {
		t.Errorf("the catalog differs from its journal (-journal +catalog):\n%s", diff)
	}
}

func wantEntryCount(t *testing.T, j bucket.Journal, want int) {
	t.Helper()
	if got := len(buckettest.Entries(t, j, 1)); got != want {
		t.Errorf("journal: got %d entries, want %d", got, want)
	}
}

func name(tag string, serial uint64) catalog.Name {
	return catalog.Name{Repo: "repo", Tag: tag, Source: digest(tag), Serial: serial}
}

func TestPacksAreKeptInOrder(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	want := []catalog.Pack{}
	for i := range 20 {
		p := catalog.Pack{ID: digest(fmt.Sprint(i)), Size: int64(i + 1)}
		must(t, c.AddPack(t.Context(), p.ID, p.Size))
		want = append(want, p)
	}
	must(t, c.AddPack(t.Context(), want[3].ID, want[3].Size)) // nothing new
	if diff := cmp.Diff(want, c.Packs()); diff != "" {
		t.Errorf("Packs (-want +got):\n%s", diff)
	}
	if err := c.AddPack(t.Context(), want[3].ID, 99); err == nil {
		t.Error("AddPack with another size: got no error")
	}
	must(t, c.RetirePack(t.Context(), want[0].ID))
	must(t, c.RetirePack(t.Context(), want[0].ID))
	if diff := cmp.Diff(want[1:], c.Packs()); diff != "" {
		t.Errorf("Packs after RetirePack (-want +got):\n%s", diff)
	}
	wantEntryCount(t, j, 21)
	wantReplay(t, c, j)
}

func TestCondemnedChunks(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	p, q := digest("p"), digest("q")
	must(t, c.AddPack(t.Context(), p, 100))
	bad := catalog.CondemnedChunk{Digest: digest("c"), Pack: p, Off: 50}
	same := catalog.CondemnedChunk{Digest: digest("c"), Pack: p, Off: 10}
	for range 2 { // the second time says nothing new
		must(t, c.Condemn(t.Context(), bad))
		must(t, c.Condemn(t.Context(), same))
		must(t, c.Condemn(t.Context(), catalog.CondemnedChunk{Digest: digest("c"), Pack: q, Off: 0}))
	}
	wantEntryCount(t, j, 3)
	if diff := cmp.Diff([]catalog.CondemnedChunk{same, bad}, c.Condemned()); diff != "" {
		t.Errorf("Condemned (-want +got):\n%s", diff)
	}
	if !c.IsCondemned(bad.Digest, p, 50) || c.IsCondemned(bad.Digest, p, 51) || c.IsCondemned(bad.Digest, q, 50) || c.IsCondemned(q, p, 50) {
		t.Error("IsCondemned is not true for exactly the condemned copy")
	}
	if err := c.Condemn(t.Context(), catalog.CondemnedChunk{Digest: digest("c"), Pack: p, Off: 100}); err == nil {
		t.Error("Condemn past the pack's end: got no error")
	}
	wantReplay(t, c, j)

	must(t, c.AddPack(t.Context(), p, 100)) // the pack was stored anew
	if got := c.Condemned(); len(got) != 0 {
		t.Errorf("condemned after the pack was stored anew: got %v, want none", got)
	}
	wantReplay(t, c, j)

	must(t, c.Condemn(t.Context(), bad))
	must(t, c.RetirePack(t.Context(), p))
	if got := c.Condemned(); len(got) != 0 || c.IsCondemned(bad.Digest, p, 50) {
		t.Errorf("condemned after the pack was retired: got %v, want none", got)
	}
	wantReplay(t, c, j)
}

func TestNames(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	first := name("b", 1)
	first.Statement = json.RawMessage("{ \"payload\": \"PDw+\",\n\"sig\": \"<&>\" }")
	must(t, c.SetName(t.Context(), first))
	must(t, c.SetName(t.Context(), first)) // nothing new
	must(t, c.SetName(t.Context(), name("a", 7)))
	other := name("latest", 1)
	other.Repo = "other"
	must(t, c.SetName(t.Context(), other))
	wantEntryCount(t, j, 3)

	stored := first
	stored.Statement = json.RawMessage(`{"payload":"PDw+","sig":"<&>"}`)
	got, ok := c.Name("repo", "b")
	if diff := cmp.Diff(stored, got); !ok || diff != "" {
		t.Errorf("Name: got %v (-want +got):\n%s", ok, diff)
	}
	if diff := cmp.Diff([]catalog.Name{other, name("a", 7), stored}, c.Names()); diff != "" {
		t.Errorf("Names (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"other", "repo"}, c.Repos()); diff != "" {
		t.Errorf("Repos (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a", "b"}, c.Tags("repo")); diff != "" {
		t.Errorf("Tags (-want +got):\n%s", diff)
	}
	if got := c.Tags("nothing"); len(got) != 0 {
		t.Errorf("Tags of an unknown repository: got %q, want none", got)
	}
	wantReplay(t, c, j)
}

func TestSerialsOnlyRise(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	must(t, c.SetName(t.Context(), name("t", 5)))
	moved := name("t", 5)
	moved.Source = digest("other")
	wantErr(t, "SetName with the same serial", c.SetName(t.Context(), moved), catalog.ErrStale)
	wantErr(t, "SetName with a lower serial", c.SetName(t.Context(), name("t", 4)), catalog.ErrStale)
	moved.Serial = 6
	must(t, c.SetName(t.Context(), moved))

	must(t, c.DeleteName(t.Context(), "repo", "t"))
	if n, ok := c.Name("repo", "t"); ok || len(c.Names()) != 0 {
		t.Errorf("Name after DeleteName: got %v, want none", n)
	}
	wantErr(t, "second DeleteName", c.DeleteName(t.Context(), "repo", "t"), catalog.ErrNotFound)
	if got := c.Serial("repo", "t"); got != 7 {
		t.Errorf("Serial of the deleted name: got %d, want 7", got)
	}
	wantErr(t, "SetName with the serial of the delete", c.SetName(t.Context(), name("t", 7)), catalog.ErrStale)
	wantErr(t, "SetName with it, reopened", open(t, j).SetName(t.Context(), name("t", 7)), catalog.ErrStale)
	must(t, c.SetName(t.Context(), name("t", 8)))
	if got := c.Serial("repo", "never"); got != 0 {
		t.Errorf("Serial of an unknown name: got %d, want 0", got)
	}
	wantReplay(t, c, j)
}

func TestOpenNamesTheBadEntry(t *testing.T) {
	for _, test := range []struct {
		name  string
		entry string
		want  string
	}{
		{"unknown version", `{"v":4,"type":"pack_added"}`, "journal entry 2: entry has version 4"},
		{"unknown type", `{"v":1,"type":"lease","epoch":1}`, "journal entry 2: lease: unknown entry type"},
		{"unknown field", strings.Replace(good, `"size":1`, `"size":1,"color":2`, 1), `journal entry 2: pack_added: json: unknown field "color"`},
		{"retired pack that is unknown", `{"v":1,"type":"pack_retired","pack":"` + digest("x").String() + `"}`, "journal entry 2: pack sha256:"},
		{"condemned in a pack that is unknown", `{"v":1,"type":"chunk_condemned","digest":"` + hexA + `","pack":"` + digest("x").String() + `","off":1}`, "journal entry 2: pack sha256:"},
		{"condemned past the end", `{"v":1,"type":"chunk_condemned","digest":"` + hexA + `","pack":"` + hexA + `","off":1}`, "no chunk is at 1"},
		{"deleted name that is unknown", `{"v":1,"type":"name_deleted","repo":"r","tag":"t","serial":1}`, "journal entry 2: r:t: name not found"},
	} {
		t.Run(test.name, func(t *testing.T) {
			j := mem.New()
			must(t, j.Append(t.Context(), 1, []byte(good)))
			must(t, j.Append(t.Context(), 2, []byte(test.entry)))
			_, err := catalog.Open(t.Context(), catalog.Config{Journal: j})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
			if newer := test.name == "unknown version"; errors.Is(err, catalog.ErrDamaged) == newer {
				t.Errorf("got error %v, want ErrDamaged: %t", err, !newer)
			}
		})
	}
}

// TestEveryFlippedByteIsNamedOrHarmless: an entry that decodes to something else
// is for the check to find; all else says what to do.
func TestEveryFlippedByteIsNamedOrHarmless(t *testing.T) {
	for i := range good {
		b := []byte(good)
		b[i] ^= 0x04
		j := mem.New()
		must(t, j.Append(t.Context(), 1, b))
		_, err := catalog.Open(t.Context(), catalog.Config{Journal: j})
		if err == nil || strings.Contains(err.Error(), "version") {
			continue
		}
		if !errors.Is(err, catalog.ErrDamaged) || !strings.Contains(err.Error(), "journal entry 1") || !strings.Contains(err.Error(), "backup") {
			t.Errorf("byte %d: got error %v", i, err)
		}
	}
}

func TestAWrongSizeIsCorrected(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	id := digest("p")
	must(t, c.AddPack(t.Context(), id, 7))
	must(t, c.CorrectPack(t.Context(), id, 5))
	must(t, c.CorrectPack(t.Context(), id, 5))              // nothing new
	must(t, c.CorrectPack(t.Context(), digest("other"), 5)) // not in the catalog
	if diff := cmp.Diff([]catalog.Pack{{ID: id, Size: 5}}, c.Packs()); diff != "" {
		t.Errorf("Packs (-want +got):\n%s", diff)
	}
	wantEntryCount(t, j, 2)
	wantReplay(t, c, j)
}

func TestOpenNeedsTheWholeJournal(t *testing.T) {
	j := mem.New()
	must(t, open(t, j).AddPack(t.Context(), digest("p"), 1))
	f := &buckettest.Faulty{Journal: j, After: buckettest.FailAll("Read")}
	_, err := catalog.Open(t.Context(), catalog.Config{Journal: f})
	wantErr(t, "Open", err, buckettest.ErrInjected)
}

func TestManyCallersAtOnce(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			tag := fmt.Sprint(i)
			if err := c.AddPack(t.Context(), digest(tag), 10); err != nil {
				t.Errorf("AddPack: %v", err)
			}
			if err := c.AddPack(t.Context(), digest("shared"), 10); err != nil {
				t.Errorf("AddPack: %v", err)
			}
			cc := catalog.CondemnedChunk{Digest: digest("c"), Pack: digest(tag)}
			if err := c.Condemn(t.Context(), cc); err != nil || !c.IsCondemned(cc.Digest, cc.Pack, 0) {
				t.Errorf("Condemn: %v", err)
			}
			if err := c.SetName(t.Context(), name(tag, 1)); err != nil {
				t.Errorf("SetName: %v", err)
			}
			c.Packs()
			c.Condemned()
			c.Names()
		})
	}
	wg.Wait()
	wantEntryCount(t, j, 3*16+1)
	wantReplay(t, c, j)
}

func TestCancelledContextChangesNothing(t *testing.T) {
	j := mem.New()
	c := open(t, j)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, "AddPack", c.AddPack(ctx, digest("p"), 1), context.Canceled)
	wantEntryCount(t, j, 0)
	if _, err := catalog.Open(ctx, catalog.Config{Journal: j}); !errors.Is(err, context.Canceled) {
		t.Errorf("Open: got error %v, want %v", err, context.Canceled)
	}
}
