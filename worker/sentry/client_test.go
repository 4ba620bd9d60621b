package sentry_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sentry"
	"quarry/worker/sentry/sentrytest"
)

type rig struct {
	*testing.T
	ctx context.Context
	box sentrytest.Sandbox
	c   *sentry.Client
}

func newRig(t *testing.T) *rig {
	box := sentrytest.Start(t)
	c := sentry.New(box.Socket, box.ID)
	t.Cleanup(c.Close)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return &rig{t, ctx, box, c}
}

func (r *rig) pipe() (read, write *os.File) {
	r.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { read.Close(); write.Close() })
	return read, write
}

func (r *rig) exec(e sentry.Exec) int {
	r.Helper()
	e.Env = append(e.Env, "PATH=/bin")
	pid, err := r.c.Execute(r.ctx, e)
	if err != nil {
		r.Fatal(err)
	}
	return pid
}

// run runs a shell command and returns its output and status.
func (r *rig) run(command string) (string, sentry.Status) {
	r.Helper()
	read, write := r.pipe()
	pid := r.exec(sentry.Exec{Argv: []string{"sh", "-c", command}, Files: map[int]*os.File{1: write, 2: write}})
	write.Close()
	out, err := io.ReadAll(read)
	if err != nil {
		r.Fatal(err)
	}
	return string(out), r.wait(pid)
}

func (r *rig) wait(pid int) sentry.Status {
	r.Helper()
	st, err := r.c.WaitPID(r.ctx, pid)
	if err != nil {
		r.Fatal(err)
	}
	return st
}

func TestCommandsAndTheirEnds(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		command, out string
		want         sentry.Status
	}{
		{"echo hi; echo on two >&2", "hi\non two\n", sentry.Status{}},
		{"exit 7", "", sentry.Status{Code: 7}},
		{"exit 255", "", sentry.Status{Code: 255}},
		{"kill -9 $$", "", sentry.Status{Code: 137, Signal: 9}},
		{"ps -o pid,pgid,sid | grep \" *$$ \" | head -n 1 | awk '{print $1==$2, $2==$3}'", "1 1\n", sentry.Status{}},
	} {
		if out, st := r.run(c.command); out != c.out || st != c.want {
			t.Errorf("%s: %q and %+v, want %q and %+v", c.command, out, st, c.out, c.want)
		}
	}
}

func TestWhatCannotRunIsRefused(t *testing.T) {
	r := newRig(t)
	for name, e := range map[string]sentry.Exec{
		"no such program": {Argv: []string{"nothere"}, Env: []string{"PATH=/bin"}},
		"no such path":    {Argv: []string{"/bin/nothere"}},
		"a folder":        {Argv: []string{"/bin"}},
		"no such folder":  {Argv: []string{"/bin/true"}, WorkDir: "/nothere"},
	} {
		var refused *sentry.RemoteError
		if _, err := r.c.Execute(r.ctx, e); !errors.As(err, &refused) {
			t.Errorf("%s: %v, want a refusal", name, err)
		} else {
			t.Log(name, ":", refused)
		}
	}
	for _, bad := range []string{"\xff", "a\x00b"} {
		if _, err := r.c.Execute(r.ctx, sentry.Exec{Argv: []string{"echo", bad}}); !errors.Is(err, sentry.ErrText) {
			t.Errorf("%q: %v, want ErrText", bad, err)
		}
	}
	if out, _ := r.run("echo still here"); out != "still here\n" {
		t.Errorf("afterwards: %q", out)
	}
}

// A program of the host runs by its descriptor, with more files than the three. A
// static program of glibc does not: it wants a path in /proc/self/exe.
func TestAProgramOfTheHost(t *testing.T) {
	r := newRig(t)
	path := filepath.Join(t.TempDir(), "seven")
	build := exec.Command("go", "build", "-o", path, "./testdata/seven")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	program, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	read, write := r.pipe()
	pid := r.exec(sentry.Exec{Argv: []string{"any", "name"}, Files: map[int]*os.File{7: write}, Program: program})
	write.Close()
	if out, err := io.ReadAll(read); err != nil || string(out) != "[any name]\n" {
		t.Errorf("got %q, %v", out, err)
	}
	if st := r.wait(pid); st != (sentry.Status{}) {
		t.Error(st)
	}
}

func TestSignals(t *testing.T) {
	r := newRig(t)
	pid := r.exec(sentry.Exec{Argv: []string{"sh", "-c", "sleep 1000 & wait"}})
	for {
		list, err := r.c.Processes(r.ctx)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, p := range list {
			if p.PGID == pid {
				n++
			}
		}
		if n == 2 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err := r.c.Signal(r.ctx, sentry.ToGroup, pid, int(unix.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	if st := r.wait(pid); st.Signal != int(unix.SIGTERM) {
		t.Errorf("ended with %+v", st)
	}
	var refused *sentry.RemoteError
	if err := r.c.Signal(r.ctx, sentry.ToGroup, pid+1000, 15); !errors.As(err, &refused) {
		t.Errorf("a group that is not there: %v", err)
	}
}

// The guest's memory and its files are read while it is paused.
func TestPausedAndRead(t *testing.T) {
	r := newRig(t)
	r.run("echo content > /var/f; mkfifo /var/fifo")
	if err := r.c.Pause(r.ctx); err != nil {
		t.Fatal(err)
	}
	read, write := r.pipe()
	if err := r.c.Cat(r.ctx, "/var/f", write); err != nil {
		t.Fatal(err)
	}
	write.Close()
	if out, err := io.ReadAll(read); err != nil || string(out) != "content\n" {
		t.Errorf("got %q, %v", out, err)
	}
	if list, err := r.c.Processes(r.ctx); err != nil || len(list) != 1 || list[0].PID != 1 {
		t.Errorf("processes %+v, %v", list, err)
	}
	memory, err := r.c.MemoryFile(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(memory.Fd()), &st); err != nil || st.Blocks == 0 {
		t.Errorf("memory file has %d blocks, %v", st.Blocks, err)
	}
	u, err := r.c.Usage(r.ctx)
	if err != nil || u.Memory == 0 || u.PIDs == 0 {
		t.Errorf("usage %+v, %v", u, err)
	}
	t.Logf("%+v", u)
	if err := r.c.Reduce(r.ctx, true); err != nil {
		t.Error(err)
	}
	// Nobody writes to the fifo: only ctx ends this.
	ctx, cancel := context.WithTimeout(r.ctx, 50*time.Millisecond)
	defer cancel()
	_, write = r.pipe()
	if err := r.c.Cat(ctx, "/var/fifo", write); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a fifo: %v", err)
	}
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	if out, _ := r.run("echo on"); out != "on\n" {
		t.Errorf("after the pause: %q", out)
	}
}

func TestTheEndOfTheSentry(t *testing.T) {
	r := newRig(t)
	waited := make(chan error, 1)
	go func() {
		_, err := r.c.Wait(r.ctx)
		waited <- err
	}()
	r.run("true")
	if err := unix.Kill(r.box.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; !errors.Is(err, sentry.ErrGone) {
		t.Errorf("wait: %v", err)
	}
	if _, err := r.c.Processes(r.ctx); !errors.Is(err, sentry.ErrGone) {
		t.Errorf("a call: %v", err)
	}
	if _, err := sentry.New(filepath.Join(t.TempDir(), strings.Repeat("long", 40), "socket"), "x").Processes(r.ctx); !errors.Is(err, sentry.ErrGone) {
		t.Errorf("no socket: %v", err)
	}
}

// A first process that ends is told, and is the end of the Sentry.
func TestTheFirstProcessEnds(t *testing.T) {
	r := newRig(t)
	go r.c.Signal(r.ctx, sentry.ToProcess, 0, int(unix.SIGKILL))
	if st, err := r.c.Wait(r.ctx); err != nil || st.Signal != int(unix.SIGKILL) {
		t.Errorf("%+v, %v", st, err)
	}
}
