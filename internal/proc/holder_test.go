package proc_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
)

// A holder is who has the lock, and nobody whose number is in the file.
func TestTheHolderOfALock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	none := func(what string) {
		t.Helper()
		if p, err := proc.Holder(path); err == nil {
			t.Errorf("%s: got process %d", what, p.PID())
		}
		if proc.HolderStopped(path) {
			t.Errorf("%s: it is stopped", what)
		}
	}
	none("no file")
	l, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	none("not signed")
	if err := l.Sign(); err != nil {
		t.Fatal(err)
	}
	p, err := proc.Holder(path)
	if err != nil || p.PID() != os.Getpid() || p.Stopped() {
		t.Fatalf("got %+v, error %v", p, err)
	}
	p.Close()
	l.Unlock()
	none("given back")

	cmd := exec.Command("/bin/sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	if err := errors.Join(os.WriteFile(path, []byte(strconv.Itoa(cmd.Process.Pid)), 0o600), cmd.Process.Signal(unix.SIGSTOP)); err != nil {
		t.Fatal(err)
	}
	q, err := proc.Open(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	for end := time.Now().Add(time.Minute); !q.Stopped(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is not stopped")
		}
	}
	none("another process")
	for _, text := range []string{"", "x", "-1", "0", "99999999999999999999"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		none(text)
	}
}
