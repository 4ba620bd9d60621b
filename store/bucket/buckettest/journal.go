package buckettest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
)

// Entries returns the journal's entries from number from on, or fails the test.
func Entries(t testing.TB, j bucket.Journal, from uint64) []bucket.Entry {
	t.Helper()
	var entries []bucket.Entry
	for e, err := range j.Read(context.Background(), from) {
		if err != nil {
			t.Fatalf("Read(%d): %v", from, err)
		}
		entries = append(entries, e)
	}
	return entries
}

// RunJournal tests a journal; open returns a new, empty one for each test.
func RunJournal(t *testing.T, open func(t *testing.T) bucket.Journal) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, bucket.Journal)
	}{
		{"entries come back in order", testJournalRead},
		{"an entry that exists is taken", testTaken},
		{"a gap is refused", testGap},
		{"entries that are no entries are refused", testBadEntries},
		{"a cancelled context stops every call", testJournalCancelled},
		{"a read can be left early", testJournalBreak},
		{"of 16 appends of one number one wins", testOneWinner},
		{"16 writers that retry leave no gap and lose nothing", testWriters},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, open(t)) })
	}
}

func appendEntry(t *testing.T, j bucket.Journal, n uint64, entry string) {
	t.Helper()
	if err := j.Append(t.Context(), n, []byte(entry)); err != nil {
		t.Fatalf("Append(%d): %v", n, err)
	}
}

func wantEntries(t *testing.T, j bucket.Journal, from uint64, want ...bucket.Entry) {
	t.Helper()
	if diff := cmp.Diff(want, Entries(t, j, from)); diff != "" {
		t.Errorf("Read(%d) (-want +got):\n%s", from, diff)
	}
}

func testJournalRead(t *testing.T, j bucket.Journal) {
	wantEntries(t, j, 1)
	buf := []byte("0")
	var want []bucket.Entry
	for n := uint64(1); n <= 12; n++ {
		buf[0] = byte(n) // the journal must have copied the last one
		if err := j.Append(t.Context(), n, buf); err != nil {
			t.Fatal(err)
		}
		want = append(want, bucket.Entry{N: n, Data: []byte{byte(n)}})
	}
	wantEntries(t, j, 0, want...)
	wantEntries(t, j, 1, want...)
	wantEntries(t, j, 9, want[8:]...)
	wantEntries(t, j, 12, want[11])
	wantEntries(t, j, 13)
	wantEntries(t, j, 100)
	Entries(t, j, 1)[0].Data[0] = 'x' // what Read returns is the caller's
	wantEntries(t, j, 1, want...)
}

func testTaken(t *testing.T, j bucket.Journal) {
	appendEntry(t, j, 1, "one")
	appendEntry(t, j, 2, "two")
	for _, entry := range []string{"two", "other"} {
		wantErr(t, "Append 2", j.Append(t.Context(), 2, []byte(entry)), bucket.ErrTaken)
		wantErr(t, "Append 1", j.Append(t.Context(), 1, []byte(entry)), bucket.ErrTaken)
	}
	wantEntries(t, j, 1, bucket.Entry{N: 1, Data: []byte("one")}, bucket.Entry{N: 2, Data: []byte("two")})
}

func testGap(t *testing.T, j bucket.Journal) {
	check := func(n uint64) {
		t.Helper()
		if err := j.Append(t.Context(), n, []byte("x")); err == nil || errors.Is(err, bucket.ErrTaken) {
			t.Errorf("Append(%d): got error %v, want one about the gap", n, err)
		}
	}
	check(2)
	appendEntry(t, j, 1, "one")
	check(3)
	check(1 << 63)
	wantEntries(t, j, 1, bucket.Entry{N: 1, Data: []byte("one")})
}

func testBadEntries(t *testing.T, j bucket.Journal) {
	for _, bad := range []bucket.Entry{{N: 0, Data: []byte("x")}, {N: 1}, {N: 1, Data: make([]byte, bucket.MaxEntry+1)}} {
		if err := j.Append(t.Context(), bad.N, bad.Data); err == nil || errors.Is(err, bucket.ErrTaken) {
			t.Errorf("Append(%d, %d bytes): got error %v, want one that refuses it", bad.N, len(bad.Data), err)
		}
	}
	wantEntries(t, j, 1)
	largest := bytes.Repeat([]byte{'x'}, bucket.MaxEntry)
	appendEntry(t, j, 1, string(largest))
	if got := Entries(t, j, 1); len(got) != 1 || !bytes.Equal(got[0].Data, largest) {
		t.Errorf("the largest entry did not come back as the only one")
	}
}

func testJournalCancelled(t *testing.T, j bucket.Journal) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, "Append", j.Append(ctx, 1, []byte("x")), context.Canceled)
	wantEntries(t, j, 1)
	var err error
	for _, err = range j.Read(ctx, 1) { // a cancelled read must not look empty
	}
	wantErr(t, "Read", err, context.Canceled)
}

func testJournalBreak(t *testing.T, j bucket.Journal) {
	appendEntry(t, j, 1, "one")
	appendEntry(t, j, 2, "two")
	for e, err := range j.Read(t.Context(), 1) {
		if e.N != 1 || err != nil {
			t.Errorf("got entry %d, %v, want entry 1", e.N, err)
		}
		break
	}
}

func testOneWinner(t *testing.T, j bucket.Journal) {
	for n := uint64(1); n <= 3; n++ {
		errs := make([]error, 16)
		var wg sync.WaitGroup
		start := make(chan struct{})
		for i := range errs {
			wg.Go(func() {
				<-start
				errs[i] = j.Append(t.Context(), n, fmt.Appendf(nil, "writer %d", i))
			})
		}
		close(start)
		wg.Wait()
		var winners []bucket.Entry
		for i, err := range errs {
			if err == nil {
				winners = append(winners, bucket.Entry{N: n, Data: fmt.Appendf(nil, "writer %d", i)})
			} else if !errors.Is(err, bucket.ErrTaken) {
				t.Errorf("Append: got error %v, want %v", err, bucket.ErrTaken)
			}
		}
		if len(winners) != 1 {
			t.Fatalf("entry %d: got %d winners, want 1", n, len(winners))
		}
		wantEntries(t, j, n, winners...)
	}
}

func testWriters(t *testing.T, j bucket.Journal) {
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := uint64(1); ; n++ {
				err := j.Append(t.Context(), n, []byte{byte(i)})
				if err == nil {
					return
				}
				if !errors.Is(err, bucket.ErrTaken) {
					t.Errorf("Append(%d): %v", n, err)
					return
				}
			}
		})
	}
	wg.Wait()
	entries := Entries(t, j, 1)
	seen := map[byte]bool{}
	for i, e := range entries {
		if e.N != uint64(i+1) {
			t.Errorf("entry %d has number %d", i+1, e.N)
		}
		seen[e.Data[0]] = true
	}
	if len(entries) != 16 || len(seen) != 16 {
		t.Errorf("got %d entries of %d writers, want 16 of 16", len(entries), len(seen))
	}
}
