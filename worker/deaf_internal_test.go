package worker

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
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
	const pauses, few = 20, 2
	var stopped atomic.Bool
	var seen atomic.Int64
	paused := make(chan struct{})
	// mayRest is asked when a look has found the process at rest. It answers when that
	// has run again, however busy the machine is: the next look finds that it has.
	mayRest := func() int {
		for at, err := p.Switches(); err == nil && !stopped.Load(); time.Sleep(time.Millisecond) {
			if now, err := p.Switches(); err != nil || now != at {
				break
			}
		}
		if seen.Add(1) == pauses {
			close(paused)
		}
		return few
	}
	ended := make(chan bool, 1)
	go func() { // ends with the process
		ended <- w.awaitShim(t.Context(), p, time.Millisecond, mayRest)
	}()
	select {
	case <-ended:
		t.Fatalf("a process that runs was taken for a deaf one: %s", &log)
	case <-paused:
	case <-time.After(patience):
		t.Fatalf("a process that sleeps was found at rest %d times, want %d", seen.Load(), pauses)
	}
	if err := unix.Kill(-cmd.Process.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped.Store(true)
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
