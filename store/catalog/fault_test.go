package catalog_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
)

// script is a series of changes, each of which appends one entry.
func script() []func(context.Context, *catalog.Catalog) error {
	p := digest("p")
	return []func(context.Context, *catalog.Catalog) error{
		func(ctx context.Context, c *catalog.Catalog) error { return c.AddPack(ctx, p, 100) },
		func(ctx context.Context, c *catalog.Catalog) error {
			return c.Condemn(ctx, catalog.CondemnedChunk{Digest: digest("c"), Pack: p, Off: 1})
		},
		func(ctx context.Context, c *catalog.Catalog) error { return c.SetName(ctx, name("a", 1)) },
		func(ctx context.Context, c *catalog.Catalog) error { return c.SetName(ctx, name("b", 1)) },
		func(ctx context.Context, c *catalog.Catalog) error { return c.DeleteName(ctx, "repo", "a") },
		func(ctx context.Context, c *catalog.Catalog) error { return c.RetirePack(ctx, p) },
	}
}

// runScript makes the changes, each again when it fails, and returns how many failed.
func runScript(t *testing.T, c *catalog.Catalog) (failed int) {
	t.Helper()
	for i, change := range script() {
		err := change(t.Context(), c)
		if err != nil {
			failed++
			wantErr(t, fmt.Sprintf("change %d", i), err, buckettest.ErrInjected)
			err = change(t.Context(), c)
		}
		if err != nil {
			t.Fatalf("change %d, again: %v", i, err)
		}
	}
	return failed
}

func TestEveryAppendCanFail(t *testing.T) {
	clean := mem.New()
	runScript(t, open(t, clean))
	want := buckettest.Entries(t, clean, 1)
	for k := 1; k <= len(script()); k++ {
		for _, test := range []struct {
			name       string
			faults     buckettest.Faulty
			wantFailed int
		}{
			{"not applied", buckettest.Faulty{Before: buckettest.FailNth(int64(k), "Append")}, 1},
			// The catalog sees that its entry is there, so nobody else has to know.
			{"applied", buckettest.Faulty{After: buckettest.FailNth(int64(k), "Append")}, 0},
		} {
			t.Run(fmt.Sprintf("append %d fails %s", k, test.name), func(t *testing.T) {
				j := mem.New()
				f := test.faults
				f.Journal = j
				c := open(t, &f)
				if got := runScript(t, c); got != test.wantFailed {
					t.Errorf("got %d failed changes, want %d", got, test.wantFailed)
				}
				if diff := cmp.Diff(want, buckettest.Entries(t, j, 1)); diff != "" {
					t.Errorf("journal differs from one without faults (-want +got):\n%s", diff)
				}
				wantReplay(t, c, j)
			})
		}
	}
}

func TestAFailedAppendLeavesTheStateAsItWas(t *testing.T) {
	j := mem.New()
	c := open(t, &buckettest.Faulty{Journal: j, Before: buckettest.FailNth(1, "Append")})
	wantErr(t, "SetName", c.SetName(t.Context(), name("a", 1)), buckettest.ErrInjected)
	if n, ok := c.Name("repo", "a"); ok {
		t.Errorf("Name: got %v, want none", n)
	}
	must(t, c.SetName(t.Context(), name("b", 1))) // another change takes the number
	wantReplay(t, c, j)
	wantEntryCount(t, j, 1)
}

// TestUnknownOutcome lets the append be applied but reported failed, and the
// journal be unreadable when the catalog asks.
func TestUnknownOutcome(t *testing.T) {
	for _, next := range []string{"the same change", "another change"} {
		t.Run(next, func(t *testing.T) {
			j := mem.New()
			f := &buckettest.Faulty{Journal: j}
			c := open(t, f)
			f.After, f.Before = buckettest.FailNth(1, "Append"), buckettest.FailNth(1, "Read")
			err := c.SetName(t.Context(), name("a", 1))
			if !errors.Is(err, buckettest.ErrInjected) || !strings.Contains(err.Error(), "not known whether it was applied") {
				t.Errorf("SetName: got error %v, want one that says so", err)
			}
			if next == "the same change" {
				must(t, c.SetName(t.Context(), name("a", 1)))
				wantEntryCount(t, j, 1)
			} else {
				must(t, c.SetName(t.Context(), name("b", 1)))
				wantEntryCount(t, j, 2)
			}
			if _, ok := c.Name("repo", "a"); !ok {
				t.Error("the name that was set is not there")
			}
			wantReplay(t, c, j)
		})
	}
}

// lateJournal loses the first append, and delivers it just before the second:
// a request that hung somewhere in the network.
type lateJournal struct {
	bucket.Journal
	held  []byte
	calls int
}

var errTimeout = errors.New("timeout")

func (j *lateJournal) Append(ctx context.Context, n uint64, entry []byte) error {
	j.calls++
	switch j.calls {
	case 1:
		j.held = entry
		return errTimeout
	case 2:
		if err := j.Journal.Append(ctx, n, j.held); err != nil {
			return err
		}
	}
	return j.Journal.Append(ctx, n, entry)
}

func TestALateEntryIsKnownAsItsOwn(t *testing.T) {
	j := &lateJournal{Journal: mem.New()}
	c := open(t, j)
	wantErr(t, "first SetName", c.SetName(t.Context(), name("a", 1)), errTimeout)
	must(t, c.SetName(t.Context(), name("b", 1)))
	if got := len(c.Names()); got != 2 {
		t.Errorf("got %d names, want the late one and the new one", got)
	}
	wantEntryCount(t, j, 2)
	wantReplay(t, c, j)
}

func TestALateEntryChangesWhatMayFollow(t *testing.T) {
	j := &lateJournal{Journal: mem.New()}
	c := open(t, j)
	wantErr(t, "first SetName", c.SetName(t.Context(), name("a", 1)), errTimeout)
	other := name("a", 1)
	other.Source = digest("other")
	wantErr(t, "second SetName", c.SetName(t.Context(), other), catalog.ErrStale)
	wantEntryCount(t, j, 1)
	wantReplay(t, c, j)
}

// hangUpJournal applies an append, but its caller goes away while it waits.
type hangUpJournal struct {
	bucket.Journal
	hangUp func()
}

func (j *hangUpJournal) Append(ctx context.Context, n uint64, entry []byte) error {
	if err := j.Journal.Append(ctx, n, entry); err != nil {
		return err
	}
	j.hangUp()
	return ctx.Err()
}

func TestACallerThatHangsUpLeavesACatalogThatKnows(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	j := &hangUpJournal{mem.New(), cancel}
	c := open(t, j)
	must(t, c.SetName(ctx, name("a", 1)))
	wantReplay(t, c, j)
}

func TestSecondWriterFencesTheFirst(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(context.Context, *catalog.Catalog) error
	}{
		{"another change", func(ctx context.Context, c *catalog.Catalog) error { return c.SetName(ctx, name("a", 1)) }},
		{"the same change", func(ctx context.Context, c *catalog.Catalog) error { return c.AddPack(ctx, digest("p"), 1) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			j := mem.New()
			first, second := open(t, j), open(t, j)
			must(t, second.AddPack(t.Context(), digest("p"), 1))
			for range 2 { // and it stays fenced
				err := test.change(t.Context(), first)
				wantErr(t, "change of the first", err, catalog.ErrFenced)
				if err != nil && !strings.Contains(err.Error(), "journal entry 1") {
					t.Errorf("got error %v, want one that names the entry", err)
				}
			}
			if got := len(first.Packs()); got != 0 {
				t.Errorf("the fenced catalog has %d packs, want what it knew", got)
			}
			must(t, second.SetName(t.Context(), name("b", 1)))
			wantEntryCount(t, j, 2)
			wantReplay(t, second, j)
		})
	}
}

// TestFencedAfterALostAppend lets another writer take the number whose append failed.
func TestFencedAfterALostAppend(t *testing.T) {
	j := mem.New()
	first := open(t, &buckettest.Faulty{Journal: j, Before: buckettest.FailNth(1, "Append")})
	second := open(t, j)
	wantErr(t, "SetName", first.SetName(t.Context(), name("a", 1)), buckettest.ErrInjected)
	must(t, second.SetName(t.Context(), name("b", 1)))
	wantErr(t, "SetName again", first.SetName(t.Context(), name("a", 1)), catalog.ErrFenced)
}

// TestADoubtEndsWithItsNumber: what was lost as entry 1 is not ours as entry 2.
func TestADoubtEndsWithItsNumber(t *testing.T) {
	j := mem.New()
	first := open(t, &buckettest.Faulty{Journal: j, Before: buckettest.FailNth(1, "Append")})
	wantErr(t, "SetName", first.SetName(t.Context(), name("a", 1)), buckettest.ErrInjected)
	must(t, first.AddPack(t.Context(), digest("p"), 1))
	must(t, open(t, j).SetName(t.Context(), name("a", 1)))
	wantErr(t, "SetName after another writer", first.SetName(t.Context(), name("b", 1)), catalog.ErrFenced)
}

func TestAFencedCatalogConfirmsNothing(t *testing.T) {
	j := mem.New()
	first := open(t, j)
	must(t, first.AddPack(t.Context(), digest("p"), 1))
	must(t, open(t, j).RetirePack(t.Context(), digest("p")))
	wantErr(t, "SetName", first.SetName(t.Context(), name("a", 1)), catalog.ErrFenced)
	wantErr(t, "AddPack of a pack it knew", first.AddPack(t.Context(), digest("p"), 1), catalog.ErrFenced)
}

func TestManyLostAppendsStayBounded(t *testing.T) {
	j := mem.New()
	full := true
	c := open(t, &buckettest.Faulty{Journal: j, Before: func(op buckettest.Op) error {
		if full && op.Method == "Append" {
			return buckettest.ErrInjected
		}
		return nil
	}})
	for i := range 100 {
		wantErr(t, "SetName", c.SetName(t.Context(), name(fmt.Sprint(i), 1)), buckettest.ErrInjected)
	}
	full = false
	must(t, c.SetName(t.Context(), name("a", 1)))
	wantEntryCount(t, j, 1)
	wantReplay(t, c, j)
}
