package proc_test

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// A disk with no room, or a crash, in the middle of a write must not leave a lock
// whose file names nobody; a limit on the size of files fails like one.
func TestAWriteThatFailsLeavesTheOldHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	l, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	const first = "the first holder"
	if err := l.Write([]byte(first)); err != nil {
		t.Fatal(err)
	}
	signal.Ignore(unix.SIGXFSZ)
	defer signal.Reset(unix.SIGXFSZ)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	err = l.Write([]byte("the second"))
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if got, readErr := os.ReadFile(path); !errors.Is(err, unix.EFBIG) || readErr != nil || string(got) != first {
		t.Errorf("a write without room: %v, the file has %q, %v, want %q", err, got, readErr, first)
	}
	if err := l.Write(make([]byte, 5000)); !errors.Is(err, unix.EFBIG) {
		t.Errorf("a write of more than a block: %v, want a refusal", err)
	}
}

// TestAHolderIsWrittenWhole reads while holders of different lengths are written.
func TestAHolderIsWrittenWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	l, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	holders := []string{"short", strings.Repeat("long", 100), "shorter"}
	if err := l.Write([]byte(holders[0])); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if got, err := os.ReadFile(path); err != nil || len(got) == 0 {
				t.Errorf("while holders are written the file has %q, %v", got, err)
				return
			}
		}
	})
	for range 2000 {
		for _, h := range holders {
			if err := l.Write([]byte(h)); err != nil {
				t.Error(err)
			}
		}
	}
	close(done)
	reading.Wait()
	if got, err := os.ReadFile(path); err != nil || string(got) != holders[len(holders)-1] {
		t.Errorf("the file has %q, %v, want the last holder", got, err)
	}
}

// A program that finds another owner ends well; when that owner is gone without
// an answer, the program must be started again.
func TestEnsureStartsAgainAfterAnOwnerThatWasLeaving(t *testing.T) {
	dir := t.TempDir()
	up := filepath.Join(dir, "up")
	// The first two starts find nothing to do; the third does the work.
	script := `n=$(cat n 2>/dev/null || echo 0); n=$((n+1)); echo $n > n; [ $n -lt 3 ] || touch up; exit 0`
	args := []string{"/bin/sh", "-c", "cd " + dir + "; " + script}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
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
