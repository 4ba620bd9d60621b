package main_test

import (
	"path/filepath"
	"testing"
	"time"

	"quarry/internal/storm"
)

// TestStormOfReaders kills the reader every 200 ms while processes read and
// compare: no read fails. How long they stall is printed.
func TestStormOfReaders(t *testing.T) {
	const kills = 50
	r := newRig(t)
	r.startShim()
	manifest := filepath.Join(t.TempDir(), "manifest")
	if err := storm.Manifest(manifest, r.tree, r.path("")); err != nil {
		t.Fatal(err)
	}
	readers, err := storm.Start(within(t, shimDeadline), 6, manifest)
	if err != nil {
		t.Fatal(err)
	}
	for range kills {
		time.Sleep(200 * time.Millisecond)
		r.killReader()
		r.startReader(r.image)
	}
	got, err := readers.End()
	if err != nil {
		t.Error(err)
	}
	t.Logf("%d kills, %d reads of %d files; stall: one in 100 %v, one in 1000 %v, longest %v",
		kills, got.Reads, got.Files, got.Longest(100), got.Longest(1000), got.Longest(got.Reads+1))
	if len(got.Failed) > 0 || got.Files == 0 {
		t.Errorf("%d files compared; failed: %q", got.Files, got.Failed)
	}
	if c := r.counts(); c.FailedReads != 0 || c.Readers == 0 {
		t.Errorf("%d kills, counts are %+v", kills, c)
	}
}
