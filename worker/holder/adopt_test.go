package holder_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
	"quarry/worker/sentry/sentrytest"
)

// However often and from however many sides an exec is asked for, it runs once.
func TestAnExecRunsAtMostOnce(t *testing.T) {
	r := newRig(t)
	s := sandbox.ExecSpec{ID: "once", Shell: "echo ran >> /tmp/ran", Env: []string{"A=1"}}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			st, err := r.c.Exec(r.ctx, s, process("/bin/sh", "-c", s.Shell))
			if err != nil || st.ID != "once" {
				t.Errorf("%s, %v", describe(st), err)
			}
		})
	}
	all.Wait()
	r.want(r.wait("once"), 0, sandbox.ExecReasonExited)
	if out := r.output(r.run(sandbox.ExecSpec{}, "cat /tmp/ran"), "stdout"); out != "ran\n" {
		t.Errorf("it ran: %q", out)
	}
	st, err := r.c.Exec(r.ctx, s, process("/bin/sh", "-c", s.Shell))
	if err != nil || st.State != sandbox.ExecExited {
		t.Errorf("asked again: %s, %v", describe(st), err)
	}
	s.Env = []string{"A=2"}
	if _, err := r.c.Exec(r.ctx, s, process("/bin/sh", "-c", s.Shell)); !errors.Is(err, sandbox.ErrExecConflict) {
		t.Errorf("another spec: %v", err)
	}
}

// daemon starts the sandbox of a config that it reads, and an exec in it, and waits to
// be killed.
func TestMainOfADaemon(t *testing.T) {
	path := os.Getenv("QUARRY_TEST_DAEMON")
	if path == "" {
		return // it is started by the next test
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var c holder.Config
	if err := json.Unmarshal(raw, &c); err != nil {
		t.Fatal(err)
	}
	cl, _, err := holder.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	s := sandbox.ExecSpec{ID: "long", OpenStdin: true}
	if _, err := cl.Exec(t.Context(), s, process("/bin/sh", "-c", "echo before; cat; echo after; exit 5")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".ready", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	select {}
}

// startDaemon starts one, as a process that can be killed.
func startDaemon(t *testing.T, c holder.Config) (daemon *exec.Cmd, ready string) {
	t.Helper()
	raw, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(filepath.Dir(c.Dir), "config")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	daemon = exec.Command(os.Args[0], "-test.run", "^TestMainOfADaemon$")
	daemon.Env = append(os.Environ(), "QUARRY_TEST_DAEMON="+path)
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sentrytest.End(t, c.Dir) })
	return daemon, path + ".ready"
}

// A daemon that is killed while it starts a sandbox leaves a holder that the next one
// finds, or nothing.
func TestADaemonIsKilledInAStart(t *testing.T) {
	for ms := 10; ms <= 410; ms += 80 {
		c := config(t)
		daemon, _ := startDaemon(t, c)
		time.Sleep(time.Duration(ms) * time.Millisecond)
		daemon.Process.Kill()
		daemon.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		r := &rig{TB: t, ctx: ctx, dir: c.Dir}
		r.waitFor("a holder, or nothing", func() bool {
			var err error
			r.c, err = holder.Connect(ctx, c.Dir)
			return err == nil || len(sentrytest.Processes(t, c.Dir)) == 0
		})
		if r.c != nil {
			r.wantNobodyElse("long")
			if e, err := r.c.End(ctx); err != nil || !e.Killed {
				t.Errorf("after %d ms: %+v, %v", ms, e, err)
			}
			if err := r.c.Release(ctx); err != nil {
				t.Error(err)
			}
			r.c.Close()
		}
		r.waitFor("nothing", func() bool { return len(sentrytest.Processes(t, c.Dir)) == 0 })
		cancel()
	}
}

// wantNobodyElse checks that a sandbox works and runs at most one exec of a daemon.
func (r *rig) wantNobodyElse(id string) {
	r.Helper()
	st := r.run(sandbox.ExecSpec{}, "echo works")
	if out := r.output(st, "stdout"); out != "works\n" {
		r.Errorf("the sandbox says %q: %s", out, describe(st))
	}
	list, err := r.c.Execs(r.ctx)
	if err != nil || len(list) > 2 || len(list) == 2 && list[0].ID != id {
		r.Errorf("execs %+v, %v", list, err)
	}
}

// A daemon that is killed loses nothing of its sandbox.
func TestTheNextDaemonFindsAll(t *testing.T) {
	c := config(t)
	daemon, ready := startDaemon(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := &rig{TB: t, ctx: ctx, dir: c.Dir}
	r.waitFor("the daemon", func() bool {
		_, err := os.Stat(ready)
		return err == nil
	})
	daemon.Process.Kill()
	daemon.Wait()
	var err error
	if r.c, err = holder.Connect(ctx, c.Dir); err != nil {
		t.Fatal(err)
	}
	defer r.c.Close()
	if _, err := r.c.Stdin(ctx, "long", 0, []byte("between\n"), true); err != nil {
		t.Fatal(err)
	}
	st := r.wait("long")
	r.want(st, 5, sandbox.ExecReasonExited)
	if out := r.output(st, "stdout"); out != "before\nbetween\nafter\n" {
		t.Errorf("got %q", out)
	}
	if list, err := r.c.Execs(ctx); err != nil || len(list) != 1 || list[0].ID != "long" {
		t.Errorf("execs %+v, %v", list, err)
	}
	if _, err := r.c.End(ctx); err != nil {
		t.Fatal(err)
	}
	r.recorded(func(e holder.Ended) bool { return e.Killed && e.Execs == 1 && e.Sentry == int(unix.SIGKILL) })
	if err := r.c.Release(ctx); err != nil {
		t.Fatal(err)
	}
	r.waitFor("the holder to go", func() bool {
		_, err := r.c.State(ctx)
		return errors.Is(err, holder.ErrLost)
	})
	if _, err := holder.Connect(ctx, c.Dir); !errors.Is(err, holder.ErrLost) {
		t.Errorf("no holder: %v", err)
	}
	if list, err := holder.ReadExecs(c.Dir); err != nil || len(list) != 1 || *list[0].ExitCode != 5 || list[0].Stdout.Kept != 21 {
		t.Errorf("records %+v, %v", list, err)
	}
}

// recorded checks the record of the end.
func (r *rig) recorded(ok func(holder.Ended) bool) {
	r.Helper()
	e, err := holder.ReadEnded(r.dir)
	if err != nil || !ok(e) {
		r.Errorf("the record says %+v, %v", e, err)
	}
}

// What stands in the folder when the holder is killed too: execs that had ended, and
// others of which nobody knows.
func TestTheHolderIsKilled(t *testing.T) {
	r := newRig(t)
	r.run(sandbox.ExecSpec{}, "echo done; exit 3")
	id := r.start(sandbox.ExecSpec{}, "echo some; sleep 1000").ID
	r.waitOutput(id, "some")
	s, err := r.c.State(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() {
		_, err := r.c.WaitEnded(r.ctx)
		waited <- err
	}()
	if err := unix.Kill(s.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; !errors.Is(err, holder.ErrLost) {
		t.Errorf("a wait: %v", err)
	}
	if _, err := holder.Connect(r.ctx, r.dir); !errors.Is(err, holder.ErrLost) {
		t.Errorf("connect: %v", err)
	}
	if _, err := holder.ReadEnded(r.dir); !errors.Is(err, holder.ErrLost) {
		t.Errorf("the end: %v", err)
	}
	list, err := holder.ReadExecs(r.dir)
	if err != nil || len(list) != 2 {
		t.Fatalf("records %+v, %v", list, err)
	}
	r.want(list[0], 3, sandbox.ExecReasonExited)
	if st := list[1]; st.State != sandbox.ExecUnknown || st.Reason != sandbox.ExecReasonLost || st.Stdout.Kept != 5 || !st.Done() {
		t.Errorf("the other: %s", describe(st))
	}
}

func TestTheSentryIsKilled(t *testing.T) {
	r := newRig(t)
	r.run(sandbox.ExecSpec{}, "true")
	id := r.start(sandbox.ExecSpec{}, "echo some; sleep 1000").ID
	r.waitOutput(id, "some")
	s, err := r.c.State(r.ctx)
	if err != nil || s.Sentry == 0 || s.Gofer == 0 {
		t.Fatalf("%+v, %v", s, err)
	}
	// A machine that goes down asks everybody to end first.
	if err := unix.Kill(s.Sentry, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	r.run(sandbox.ExecSpec{}, "true")
	if err := unix.Kill(s.Sentry, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e, err := r.c.WaitEnded(r.ctx)
	if err != nil || e.Killed || e.Init != nil || e.Sentry != int(unix.SIGKILL) || !strings.Contains(e.Message, "signal 9") {
		t.Errorf("%+v, %v", e, err)
	}
	st := r.wait(id)
	if st.State != sandbox.ExecUnknown || st.Reason != sandbox.ExecReasonLost || r.output(st, "stdout") != "some\n" || !st.Done() {
		t.Errorf("the exec: %s", describe(st))
	}
	if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: "late"}, process("true")); !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("an exec: %v", err)
	}
	if _, err := r.c.Processes(r.ctx); !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("a call: %v", err)
	}
	if err := r.c.Pause(r.ctx, true); !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("a pause: %v", err)
	}
	r.recorded(func(e holder.Ended) bool { return e.Execs == 3 })
}

// Without its gofer a sandbox cannot read its image.
func TestTheGoferIsKilled(t *testing.T) {
	r := newRig(t)
	s, err := r.c.State(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: "under"}, process("sleep", "1000")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(s.Gofer, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// Its exit status may be that of a kill by the guest: what is to blame is said.
	if st, err := r.c.WaitExec(r.ctx, "under", 1<<62, 1<<62); err != nil || st.Infra == "" {
		t.Errorf("a command without files: %+v, %v", st, err)
	}
	if e, err := r.c.WaitEnded(r.ctx); err != nil || e.Killed || e.Init != nil || e.Gofer != int(unix.SIGKILL) || !strings.Contains(e.Message, "gofer") {
		t.Errorf("%+v, %v", e, err)
	}
}

// The first process may end the sandbox, as its status tells.
func TestTheEntrypointEnds(t *testing.T) {
	for command, code := range map[string]int{"echo hi; echo two >&2; exit 7": 7, "kill -9 $$": 137, "exit 0": 0} {
		r := startRig(t, config(t, "/bin/sh", "-c", "sleep 0.5; "+command))
		e, err := r.c.WaitEnded(r.ctx)
		if err != nil || e.Killed || e.Init == nil || e.Init.Code != code || e.Message != "" {
			t.Errorf("%s: %+v, %v", command, e, err)
		}
		if code != 7 {
			continue
		}
		for stream, want := range map[string]string{"stdout": "hi\n", "stderr": "two\n"} {
			if b, err := os.ReadFile(holder.InitOutputPath(r.dir, stream)); err != nil || string(b) != want {
				t.Errorf("%s %q, %v", stream, b, err)
			}
		}
	}
}

// Whoever kills the first process from inside has ended the sandbox.
func TestTheSleeperIsKilledFromInside(t *testing.T) {
	r := newRig(t)
	r.start(sandbox.ExecSpec{}, "kill -9 1")
	if e, err := r.c.WaitEnded(r.ctx); err != nil || e.Killed || e.Init == nil || e.Init.Signal != 9 {
		t.Errorf("%+v, %v", e, err)
	}
}

// A sandbox that does not start leaves nothing, and says why.
func TestAFailedStart(t *testing.T) {
	missing := config(t)
	missing.Runsc[0] = filepath.Join(missing.Dir, "nothere")
	flag := config(t)
	flag.Runsc = append(flag.Runsc, "--nosuchflag")
	entry := config(t, "/bin/nothere")
	bundle := config(t)
	if err := os.WriteFile(filepath.Join(bundle.Dir, "config.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	shim := config(t)
	shim.Shim = []string{filepath.Join(shim.Dir, "nothere")}
	for name, c := range map[string]holder.Config{"no runsc": missing, "a flag": flag, "an entrypoint": entry, "a bundle": bundle, "no shim": shim} {
		_, _, err := holder.Start(t.Context(), c)
		if !errors.Is(err, sandbox.ErrRuntime) || len(err.Error()) < 40 {
			t.Errorf("%s: %v", name, err)
		}
		if pids := sentrytest.Processes(t, c.Dir); len(pids) > 0 {
			t.Errorf("%s: processes %v are left", name, pids)
		}
		t.Log(name, ":", err)
	}
}

// Whoever gives up a start, at whatever moment, leaves no process.
func TestStartsThatAreGivenUp(t *testing.T) {
	for ms := 0; ms <= 300; ms += 20 {
		c := config(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(ms)*time.Millisecond)
		cl, _, err := holder.Start(ctx, c)
		cancel()
		if err == nil {
			e, err := cl.End(t.Context())
			if err != nil || !e.Killed {
				t.Errorf("%+v, %v", e, err)
			}
			cl.Release(t.Context())
			cl.Close()
			for len(sentrytest.Processes(t, c.Dir)) > 0 { // the holder goes by itself
				time.Sleep(time.Millisecond)
			}
		} else if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %d ms: %v", ms, err)
		}
		if pids := sentrytest.Processes(t, c.Dir); len(pids) > 0 {
			t.Errorf("after %d ms: processes %v are left", ms, pids)
		}
	}
}

// What the holder keeps for its sandbox is let go with the holder, and not before: who
// asks how the sandbox ended needs it as well.
func TestWhatAHolderKeeps(t *testing.T) {
	c := config(t)
	path := filepath.Join(filepath.Dir(c.Dir), "lock")
	lock, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	c.Keep = lock
	r := startRig(t, c)
	lock.Close()
	other, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("while it runs: %v", err)
	}
	r.run(sandbox.ExecSpec{}, "true")
	if _, err := r.c.End(r.ctx); err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("after the end: %v", err)
	}
	if err := r.c.Release(r.ctx); err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX); err != nil { // it is on its way out
		t.Errorf("after the release: %v", err)
	}
}

// Paths of sockets are short; those of folders need not be.
func TestALongFolder(t *testing.T) {
	c := config(t)
	long := filepath.Join(filepath.Dir(c.Dir), strings.Repeat("long", 40))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	next := filepath.Join(long, "box")
	if err := os.Rename(c.Dir, next); err != nil {
		t.Fatal(err)
	}
	for i, arg := range c.Runsc {
		c.Runsc[i] = strings.ReplaceAll(arg, c.Dir, next)
	}
	c.Dir, c.ID = next, fmt.Sprintf("test%d", os.Getpid())
	r := startRig(t, c)
	r.wantNobody()
	if _, err := r.c.End(r.ctx); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob("/var/run/runsc-" + c.ID + ".sock")
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// One that ends before anybody can ask for its status has exited all the same.
func TestTheEntrypointEndsAtOnce(t *testing.T) {
	for n := range 6 {
		code := n % 3
		r := startRig(t, config(t, "/bin/sh", "-c", fmt.Sprintf("exit %d", code)))
		if e, err := r.c.WaitEnded(r.ctx); err != nil || e.Killed || e.Init == nil || e.Init.Code != code || e.Message != "" {
			t.Errorf("exit %d: %+v, %v", code, e, err)
		}
	}
}
