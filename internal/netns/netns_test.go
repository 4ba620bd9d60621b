package netns_test

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"quarry/internal/need"
	"quarry/internal/netns"
)

// TestDoLeavesTheProcess runs functions in a namespace on as many threads as there may
// be: the process, which /proc/self shows, stays where it was.
func TestDoLeavesTheProcess(t *testing.T) {
	need.Root(t)
	path := filepath.Join(t.TempDir(), "ns")
	if err := netns.Make(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Remove(path); err != nil {
			t.Error(err)
		}
	})
	link := func(of string) string {
		ns, err := os.Readlink("/proc/" + of + "/ns/net")
		if err != nil {
			t.Error(err)
		}
		return ns
	}
	before := link("self")
	var all sync.WaitGroup
	for range 200 {
		all.Go(func() {
			err := netns.Do(path, func() error {
				if link("thread-self") == before {
					t.Error("the function does not run in the namespace")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if now := link("self"); now != before {
		t.Errorf("the process is in %s, and was in %s", now, before)
	}
}

func TestMakeTwice(t *testing.T) {
	need.Root(t)
	path := filepath.Join(t.TempDir(), "ns")
	if err := os.WriteFile(path, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := netns.Make(path); !os.IsExist(err) {
		t.Errorf("a file that is there: %v, want that it exists", err)
	}
	if raw, err := os.ReadFile(path); err != nil || string(raw) != "kept" {
		t.Errorf("the file that was there: %q %v", raw, err)
	}
}
