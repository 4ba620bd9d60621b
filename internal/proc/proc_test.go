package proc_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/internal/proc"
)

func TestALockHasOneHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	l, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := proc.TryLock(path); !errors.Is(err, proc.ErrLocked) {
		t.Errorf("second holder: got %v, want ErrLocked", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := proc.TakeLock(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting: got %v, want the deadline", err)
	}
	l.Unlock()
	l, err = proc.TakeLock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	l.Unlock()
}

// A program that finds another owner ends well; when that owner is gone without
// an answer, the program must be started again.
func TestEnsureStartsAgainAfterAnOwnerThatWasLeaving(t *testing.T) {
	dir := t.TempDir()
	up := filepath.Join(dir, "up")
	// The first two starts find nothing to do; the third does the work.
	script := `n=$(cat n 2>/dev/null || echo 0); n=$((n+1)); echo $n > n; [ $n -lt 3 ] || touch up; exit 0`
	args := []string{"/bin/sh", "-c", "cd " + dir + "; " + script}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	err := proc.Ensure(ctx, args, filepath.Join(dir, "log"), func(context.Context) bool {
		_, err := os.Stat(up)
		return err == nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestEnsureSaysWhyAProgramFailed(t *testing.T) {
	dir := t.TempDir()
	err := proc.Ensure(t.Context(), []string{"/bin/sh", "-c", "echo first; echo disk is gone >&2; exit 1"}, filepath.Join(dir, "log"),
		func(context.Context) bool { return false })
	if err == nil || !strings.Contains(err.Error(), "disk is gone") {
		t.Errorf("got %v, want the last line of the log", err)
	}
}

func TestEnsureEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := proc.Ensure(ctx, []string{"/bin/sleep", "1"}, filepath.Join(t.TempDir(), "log"), func(context.Context) bool { return false })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the deadline", err)
	}
}

func TestALongLogIsSetAside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte(strings.Repeat("x", 9<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, err := proc.Start([]string{"/bin/echo", "new"}, path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := proc.LastLine(path); got != "new" {
		t.Errorf("log ends with %q", got)
	}
}
