package catalog_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
)

// writer is a writer whose ids are made of one digit.
func writer(digit string) *catalog.Writer {
	return &catalog.Writer{ID: strings.Repeat(digit, 32), Folder: strings.Repeat(digit, 32), Host: "host-" + digit, PID: 7}
}

func openWriter(t *testing.T, j bucket.Journal, digit string) *catalog.Catalog {
	t.Helper()
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: j, Writer: writer(digit), Now: func() time.Time {
		return time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)
	}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestAWriterBeginsItsEpochBeforeItsFirstChange(t *testing.T) {
	j := mem.New()
	must(t, open(t, j).AddPack(t.Context(), digest("p"), 1)) // of a quarry that knew no epochs
	c := openWriter(t, j, "a")
	must(t, c.AddPack(t.Context(), digest("p"), 1)) // nothing new: no epoch either
	wantEntryCount(t, j, 1)
	must(t, c.SetName(t.Context(), name("a", 1)))
	must(t, c.SetName(t.Context(), name("b", 1)))
	wantEntryCount(t, j, 4)
	must(t, c.Claim(t.Context())) // it has it
	wantEntryCount(t, j, 4)
	want := catalog.Epoch{N: 1, Writer: writer("a").ID, Folder: writer("a").Folder, Host: "host-a", PID: 7, Time: time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)}
	for what, got := range map[string]catalog.Epoch{"its own": c.Epoch(), "reopened": open(t, j).Epoch()} {
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s epoch (-want +got):\n%s", what, diff)
		}
	}
	wantReplay(t, c, j)
}

func TestAClaimFencesTheWriterBefore(t *testing.T) {
	for name, change := range map[string]func(*catalog.Catalog) error{
		"a change":                  func(c *catalog.Catalog) error { return c.SetName(t.Context(), name("z", 1)) },
		"a change that is none":     func(c *catalog.Catalog) error { return c.AddPack(t.Context(), digest("p"), 1) },
		"a question":                func(c *catalog.Catalog) error { return c.Confirm(t.Context()) },
		"a claim of its own, later": func(c *catalog.Catalog) error { return errors.Join(c.Confirm(t.Context()), c.Claim(t.Context())) },
	} {
		t.Run(name, func(t *testing.T) {
			j := mem.New()
			first := openWriter(t, j, "a")
			must(t, first.AddPack(t.Context(), digest("p"), 1))
			must(t, first.Confirm(t.Context()))
			second := openWriter(t, j, "b")
			must(t, second.Claim(t.Context()))
			select {
			case <-first.Fenced():
				t.Error("the first knows it before it has asked")
			default:
			}
			for range 2 {
				err := change(first)
				wantErr(t, "first", err, catalog.ErrFenced)
				if err == nil || !strings.Contains(err.Error(), "epoch 2, pid 7 on host-b") {
					t.Errorf("got error %v, want one that names the second writer", err)
				}
			}
			<-first.Fenced()
			must(t, second.SetName(t.Context(), catalog.Name{Repo: "r", Tag: "t", Source: digest("s"), Serial: 1}))
			wantReplay(t, second, j)
		})
	}
}

// TestAClaimTakesInWhatTheWriterBeforeWrote: it writes until the very end.
func TestAClaimTakesInWhatTheWriterBeforeWrote(t *testing.T) {
	j := mem.New()
	first := openWriter(t, j, "a")
	must(t, first.Claim(t.Context()))
	second := openWriter(t, j, "b")
	for i := range 10 {
		must(t, first.SetName(t.Context(), name(fmt.Sprint(i), 1)))
	}
	must(t, second.Claim(t.Context()))
	if got := len(second.Names()); got != 10 {
		t.Errorf("got %d names, want the 10 that the first writer set", got)
	}
	wantErr(t, "first", first.SetName(t.Context(), name("x", 1)), catalog.ErrFenced)
	wantReplay(t, second, j)
}

// TestOneOfManyClaimsWins: those who lose do not take the journal from who has won.
func TestOneOfManyClaimsWins(t *testing.T) {
	j := mem.New()
	must(t, open(t, j).AddPack(t.Context(), digest("p"), 1))
	var all []*catalog.Catalog
	for _, digit := range strings.Split("0123456789abcdef", "") {
		all = append(all, openWriter(t, j, digit))
	}
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() { errs[i] = c.Claim(t.Context()) })
	}
	wg.Wait()
	winners := 0
	for i, err := range errs {
		if err == nil {
			winners++
			must(t, all[i].SetName(t.Context(), name("a", 1)))
			continue
		}
		wantErr(t, "Claim", err, catalog.ErrFenced)
	}
	if winners != 1 {
		t.Errorf("got %d winners, want 1", winners)
	}
	wantEntryCount(t, j, 3)
}

// TestClaimsWithLostReplies: each append of a writer's life may fail, applied or not.
func TestClaimsWithLostReplies(t *testing.T) {
	for k := 1; k <= len(script())+1; k++ {
		for name, faults := range map[string]buckettest.Faulty{
			"not applied": {Before: buckettest.FailNth(int64(k), "Append")},
			"applied":     {After: buckettest.FailNth(int64(k), "Append")},
		} {
			t.Run(fmt.Sprintf("append %d fails %s", k, name), func(t *testing.T) {
				j := mem.New()
				f := faults
				f.Journal = j
				c := openWriter(t, &f, "a")
				runScript(t, c)
				wantEntryCount(t, j, len(script())+1)
				if got := c.Epoch(); got.N != 1 || got.Writer != writer("a").ID {
					t.Errorf("got epoch %+v, want the writer's first", got)
				}
				wantReplay(t, c, j)
			})
		}
	}
}

// TestALateEpochIsKnownAsItsOwn: the claim's request hung somewhere in the network.
func TestALateEpochIsKnownAsItsOwn(t *testing.T) {
	j := &lateJournal{Journal: mem.New()}
	c := openWriter(t, j, "a")
	wantErr(t, "Claim", c.Claim(t.Context()), errTimeout)
	must(t, c.SetName(t.Context(), name("a", 1)))
	wantEntryCount(t, j, 2)
	wantReplay(t, c, j)
}

// TestClocksDecideNothing: the writer that lives in the past comes after the one that
// lives in the future.
func TestClocksDecideNothing(t *testing.T) {
	j := mem.New()
	at := func(digit string, year int) *catalog.Catalog {
		c, err := catalog.Open(t.Context(), catalog.Config{Journal: j, Writer: writer(digit), Now: func() time.Time {
			return time.Date(year, 1, 1, 0, 0, 0, 0, time.FixedZone("", 3600))
		}})
		must(t, err)
		must(t, c.Claim(t.Context()))
		return c
	}
	future, past := at("a", 2099), at("b", 1990)
	wantErr(t, "the future", future.SetName(t.Context(), name("a", 1)), catalog.ErrFenced)
	must(t, past.SetName(t.Context(), name("a", 1)))
	wantReplay(t, past, j)
}

// TestWhatAFencedWriterAcknowledgedIsThere: of two writers that race, with replies
// lost now and then, each change that was acknowledged is in the journal, and none
// of the first writer comes after the second's epoch.
func TestWhatAFencedWriterAcknowledgedIsThere(t *testing.T) {
	for round := range 20 {
		j := mem.New()
		var calls atomic.Int64
		lost := func(op buckettest.Op) error {
			if op.Method == "Append" && calls.Add(1)%3 == 0 {
				return buckettest.ErrInjected
			}
			return nil
		}
		first := openWriter(t, &buckettest.Faulty{Journal: j, After: lost}, "a")
		acked := map[string]bool{}
		half := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := 0; ; i++ {
				if i == 5+round {
					close(half)
				}
				time.Sleep(50 * time.Microsecond) // an append to memory is faster than to read what it appended
				tag := fmt.Sprint("first-", i)
				if err := first.SetName(t.Context(), name(tag, 1)); err == nil {
					acked[tag] = true
				} else if !errors.Is(err, buckettest.ErrInjected) {
					wantErr(t, "SetName", err, catalog.ErrFenced)
					return
				}
			}
		})
		<-half
		second := openWriter(t, &buckettest.Faulty{Journal: j, Before: lost}, "b")
		for err := error(buckettest.ErrInjected); err != nil; {
			if err = second.Claim(t.Context()); err != nil && !errors.Is(err, buckettest.ErrInjected) {
				t.Fatal(err)
			}
		}
		wg.Wait()
		final := open(t, j)
		for tag := range acked {
			if _, ok := final.Name("repo", tag); !ok {
				t.Errorf("%s was acknowledged and is not there", tag)
			}
		}
		epoch := false
		for _, raw := range buckettest.Entries(t, j, 1) {
			e, err := catalog.DecodeEntry(raw.Data)
			must(t, err)
			if e, ok := e.(catalog.Epoch); ok {
				epoch = e.N == 2
			} else if epoch {
				t.Errorf("%s was written after the second epoch", raw.Data)
			}
		}
		if !epoch || len(acked) == 0 {
			t.Fatalf("the race was none: second epoch %t, %d acknowledged", epoch, len(acked))
		}
		wantReplay(t, second, j)
	}
}
