package worker

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"quarry/internal/proc"
	"quarry/nbd/attach"
)

// TestAShimThatSaysWhyItEndsEndsByItself: its exit status tells whether another may do
// better. The script stands for a shim that the machine lets wait between its last
// words and its end.
func TestAShimThatSaysWhyItEndsEndsByItself(t *testing.T) {
	for code, again := range map[int]bool{1: false, 2: false, attach.ExitNoReader: true} {
		script := fmt.Sprintf("echo quarry-shim: why; sleep 0.2; exit %d", code)
		err := runShim(t.Context(), t.TempDir(), []string{"/bin/sh", "-c", script})
		var e *exec.ExitError
		if !errors.As(err, &e) || e.ExitCode() != code || !strings.Contains(err.Error(), "quarry-shim: why") {
			t.Errorf("got %v, want exit status %d and why", err, code)
		}
		if got := curable(err); got != again {
			t.Errorf("exit status %d: started again: %v, want %v", code, got, again)
		}
	}
}

// One that says nothing more and stays is killed.
func TestAShimThatSaysNothingIsKilled(t *testing.T) {
	dir := t.TempDir()
	if err := runShim(t.Context(), dir, []string{"/bin/sh", "-c", "exec >&-; exec sleep 1000"}); !proc.Killed(err) {
		t.Errorf("got %v, want it killed", err)
	}
}
