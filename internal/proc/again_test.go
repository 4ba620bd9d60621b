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

// Who removes a lock's file lets another hold it too: the first can tell.
func TestALockWhoseFileWasRemovedDoesNotStand(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Unlock()
	if !first.Stands() {
		t.Error("a lock that was just taken does not stand")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if first.Stands() {
		t.Error("a lock without a file stands")
	}
	second, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Unlock()
	if first.Stands() || !second.Stands() {
		t.Error("the second holder's lock is the one that stands")
	}
}

// A program that somebody kills is no program that fails; one that is killed every
// time is.
func TestEnsureStartsAgainWhatWasKilled(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	up := func(context.Context) bool {
		_, err := os.Stat(filepath.Join(dir, "up"))
		return err == nil
	}
	script := "cd " + dir + "; if [ -e killed ]; then touch up; else touch killed; kill -9 $$; fi"
	if err := proc.Ensure(ctx, []string{"/bin/sh", "-c", script}, filepath.Join(dir, "log"), up); err != nil {
		t.Errorf("killed once: %v", err)
	}
	os.Remove(filepath.Join(dir, "up"))
	err := proc.Ensure(ctx, []string{"/bin/sh", "-c", "kill -9 $$"}, filepath.Join(dir, "log"), up)
	if err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("killed every time: %v, want an end before the time is over", err)
	}
}

// A process that runs now and then, and for the rest waits, is told from one that is
// stopped.
func TestSwitchesTellWhetherAProcessRuns(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "while :; do sleep 0.01; done")
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	p, err := proc.Open(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	look := func() uint64 {
		n, err := p.Switches()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	moves := func() bool { // ends as soon as it does
		for first, end := look(), time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			if look() != first {
				return true
			}
		}
		return false
	}
	if !moves() {
		t.Error("a process that runs does not count")
	}
	if err := unix.Kill(-cmd.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var st unix.Siginfo
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, &st, unix.WSTOPPED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	before := look()
	time.Sleep(100 * time.Millisecond)
	if after := look(); after != before {
		t.Errorf("a stopped process has counted %d", after-before)
	}
	if err := unix.Kill(-cmd.Process.Pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if !moves() {
		t.Error("a process that goes on does not count")
	}
}
