package worker

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
)

// TestAShimThatDoesNotRunIsKilled, and none that waits, however long: sleep stands
// for a shim that wakes now and then.
func TestAShimThatDoesNotRunIsKilled(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "while :; do sleep 0.02; done")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	p, err := proc.Open(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var log bytes.Buffer
	w := &Worker{Log: slog.New(slog.NewTextHandler(&log, nil))}
	ended := make(chan bool, 1)
	go func() { // ends with the process
		ended <- w.awaitShim(t.Context(), p, 200*time.Millisecond, func() int { return 5 })
	}()
	select {
	case <-ended:
		t.Fatalf("a process that runs was taken for a deaf one: %s", &log)
	case <-time.After(2 * time.Second):
	}
	if err := unix.Kill(-cmd.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-ended:
		if !got {
			t.Error("its end is not told")
		}
	case <-time.After(patience):
		t.Fatal("a stopped process is not killed")
	}
	if err := cmd.Wait(); !proc.Killed(err) {
		t.Errorf("ended with %v, want it killed", err)
	}
	if !strings.Contains(log.String(), "shim does not run any more") {
		t.Errorf("the log says nothing of it: %s", &log)
	}
}

// TestOneKeeperWhoeverRemovesItsLock: the one that lost it takes it anew, and ends
// when another was faster.
func TestOneKeeperWhoeverRemovesItsLock(t *testing.T) {
	k := newKept(t)
	k.start()
	_, p := k.reader(0)
	path := k.w.Dir.KeeperLock()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	k.waitFor("the keeper to take its lock anew", func() bool { return proc.Locked(path) })
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Unlock()
	if err := k.wantEnd(); err != nil {
		t.Error(err)
	}
	p.Signal(unix.SIGTERM)
	k.shim.Release()
}

// TestAReaderThatIsNotFoundIsReplaced: somebody has removed its socket, its control
// socket, or its lock.
func TestAReaderThatIsNotFoundIsReplaced(t *testing.T) {
	k := newKept(t)
	k.w.ReaderCommand = append([]string{"/usr/bin/env", envStays + "=1"}, k.w.ReaderCommand...)
	k.start()
	pid, p := k.reader(0)
	for _, path := range []string{k.w.Dir.ReaderSocket(), k.w.Dir.ReaderControl(), k.w.Dir.ReaderLock()} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		pid, p = k.reader(pid)
		for _, there := range []string{k.w.Dir.ReaderSocket(), k.w.Dir.ReaderControl()} {
			if _, err := os.Stat(there); err != nil {
				t.Errorf("after %s was removed: %v", path, err)
			}
		}
	}
	k.shim.Release()
	p.Signal(unix.SIGTERM)
	if err := k.wantEnd(); err != nil {
		t.Error(err)
	}
}
