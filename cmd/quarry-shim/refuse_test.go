package main_test

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"time"
)

// A reader that is back and cannot serve the image any more is not one that is away:
// the reads that wait get EIO, as do those that come, until it can.
func TestReadsOfAnImageThatIsRefusedFail(t *testing.T) {
	r := newRig(t)
	r.startShim()
	const readers = 4
	results := r.readDuring(readers)
	if err := os.WriteFile(r.stall+".refuse", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.killReader()
	r.unstall()
	r.startReader(r.image)
	r.wantEIO(results, readers)
	if err := r.compareFile("d0/f0"); !errors.Is(err, syscall.EIO) {
		t.Errorf("a read that came later got %v, want EIO", err)
	}
	// Each asks the reader anew, which looks at the image for that, so the next one is
	// not asked at once, however many come.
	const later, pause = 8, 50 * time.Millisecond
	began := time.Now()
	for range later {
		if err := r.compareFile("d0/f0"); !errors.Is(err, syscall.EIO) {
			t.Errorf("got %v, want EIO", err)
		}
	}
	if took := time.Since(began); took < (later-1)*pause {
		t.Errorf("%d reads took %v, want %v between two at least", later, took, pause)
	}
	if err := os.Remove(r.stall + ".refuse"); err != nil {
		t.Fatal(err)
	}
	r.waitFor("the image to be served again", func() bool { return r.compareFile("d0/f0") == nil })
	r.compareTree()
}
