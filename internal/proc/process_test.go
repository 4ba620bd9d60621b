package proc_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
)

// A process is waited for by who is not its parent: here the shell is.
func TestAProcessOfOthersIsWaitedFor(t *testing.T) {
	cmd := exec.Command("/bin/sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	p, err := proc.Open(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait for a process that runs: got %v, want the deadline", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- p.Wait(t.Context()) }() // ends with the process
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Wait: %v", err)
	}
	cmd.Wait()
	if err := p.Signal(unix.SIGKILL); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signal to a process that has ended: got %v, want ErrProcessDone", err)
	}
	if _, err := proc.Open(cmd.Process.Pid); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("open a process that has ended: got %v, want ErrProcessDone", err)
	}
}

func TestLockedLooksAndDoesNotTake(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if proc.Locked(path) {
		t.Error("a lock without a file is held")
	}
	l, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if !proc.Locked(path) {
		t.Error("a lock that is held looks free")
	}
	l.Unlock()
	if proc.Locked(path) {
		t.Error("a lock that was given back looks held")
	}
}
