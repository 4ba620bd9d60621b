package attach_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"quarry/nbd/attach"
)

func TestCountsAreThereForOthers(t *testing.T) {
	dir := t.TempDir()
	if _, err := attach.ReadCounts(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("counts of a folder without: got %v, want ErrNotExist", err)
	}
	lock, err := attach.TakeLock(testContext(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	for range 2 { // the second one begins anew
		c, err := attach.NewCounts(lock)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := attach.ReadCounts(dir); err != nil || got != (attach.CountsValue{}) {
			t.Errorf("new counts are %+v, %v", got, err)
		}
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				for range 10 {
					if err := errors.Join(c.AddFailedRead(), c.AddFailedRead(), c.AddReader()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		want := attach.CountsValue{FailedReads: 200, Readers: 100}
		if got, err := attach.ReadCounts(dir); err != nil || got != want {
			t.Errorf("counts are %+v, %v; want %+v", got, err, want)
		}
		c.Close()
	}
	if err := lock.Release(); err != nil {
		t.Fatal(err)
	}
	if err := attach.Sweep(testContext(t), dir); err != nil {
		t.Fatal(err)
	}
	if _, err := attach.ReadCounts(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("counts after a sweep: got %v, want ErrNotExist", err)
	}
}

// TestCountsAreWholeWhileTheyBegin looks at them all the time: whoever has seen
// some never sees none.
func TestCountsAreWholeWhileTheyBegin(t *testing.T) {
	dir := t.TempDir()
	lock, err := attach.TakeLock(testContext(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	begin := func() {
		c, err := attach.NewCounts(lock)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	begin()
	stop := make(chan struct{})
	var look sync.WaitGroup
	look.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if got, err := attach.ReadCounts(dir); err != nil || got != (attach.CountsValue{}) {
				t.Errorf("counts are %+v, %v", got, err)
				return
			}
		}
	})
	defer look.Wait()
	defer close(stop)
	for range 2000 {
		begin()
	}
}

func TestCountsOfAnotherLengthAreRefused(t *testing.T) {
	for _, n := range []int{0, 8, 15, 17, 100} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "eio"), []byte(strings.Repeat("x", n)), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := attach.ReadCounts(dir); err == nil {
			t.Errorf("%d bytes are read as %+v", n, got)
		}
	}
}

func TestHolder(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{dir, filepath.Join(dir, "none")} {
		if pid, held := attach.Holder(path); pid != 0 || held {
			t.Errorf("%s: held by %d, %v; want nobody", path, pid, held)
		}
	}
	lock, err := attach.TakeLock(testContext(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	if pid, held := attach.Holder(dir); pid != os.Getpid() || !held {
		t.Errorf("held by %d, %v; want this process", pid, held)
	}
	lock.Release()
	if pid, held := attach.Holder(dir); pid != 0 || held {
		t.Errorf("held by %d, %v after the release", pid, held)
	}
}
