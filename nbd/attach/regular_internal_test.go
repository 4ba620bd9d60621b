package attach

import (
	"path/filepath"
	"syscall"
	"testing"
)

// TestNothingWaitsForAFIFO in a mount's folder: waiting is a test that never ends.
func TestNothingWaitsForAFIFO(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{filepath.Join(dir, stateFile), filepath.Join(dir, countsFile), folder(dir).lock()} {
		if err := syscall.Mkfifo(name, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ReadState(dir); err == nil {
		t.Error("a record was read")
	}
	if _, err := ReadCounts(dir); err == nil {
		t.Error("counters were read")
	}
	if _, err := folder(dir).record(); err == nil || folder(dir).locked() {
		t.Errorf("the lock names somebody, or is held: %v", err)
	}
}
