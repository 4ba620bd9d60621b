package holder_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/worker/holder"
	"quarry/worker/sandbox"
	"quarry/worker/sentry/sentrytest"
)

// TestMain makes this program a holder when it is started as one, so that the race
// detector sees holders too.
func TestMain(m *testing.M) {
	if len(os.Args) >= 2 && os.Args[1] == holder.Role {
		signal.Ignore(unix.SIGPIPE, unix.SIGTERM) // as quarry-shim does
		if err := holder.Main(os.Stdin, os.Stdout, slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// rig is a sandbox with its holder.
type rig struct {
	testing.TB
	ctx context.Context
	dir string
	c   *holder.Client
	n   int
}

// config is that of a sandbox of busybox in a new folder.
func config(t testing.TB, argv ...string) holder.Config {
	t.Helper()
	return configIn(t, sentrytest.Root(t), argv...)
}

// configIn is config with a root file system.
func configIn(t testing.TB, root string, argv ...string) holder.Config {
	t.Helper()
	dir := filepath.Join(need.ShortDir(t), "box")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	c := holder.Config{
		Shim: shim(), Dir: dir, ID: "test", Runsc: sentrytest.Runsc(t, dir), Entrypoint: len(argv) > 0,
	}
	if len(argv) == 0 {
		argv = []string{"sleeper"}
	}
	sentrytest.Bundle(t, dir, root, argv...)
	return c
}

func newRig(t testing.TB) *rig { return startRig(t, config(t)) }

// patience is how long a test waits for what has to come.
const patience = time.Minute

func startRig(t testing.TB, c holder.Config) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*patience) // a test waits for many things
	t.Cleanup(cancel)
	cl, _, err := holder.Start(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{TB: t, ctx: ctx, dir: c.Dir, c: cl}
	t.Cleanup(func() { // before ctx ends
		defer cl.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := cl.End(ctx); err == nil {
			cl.Release(ctx)
		}
		if log, err := os.ReadFile(filepath.Join(c.Dir, "holder.log")); err == nil && len(log) > 0 {
			t.Logf("holder.log: %s", log)
		}
		sentrytest.End(t, c.Dir)
	})
	return r
}

// process is a root process with a path.
func process(argv ...string) holder.Process {
	return holder.Process{Argv: argv, Env: []string{"PATH=/bin", "HOME=/root"}, WorkDir: "/"}
}

func (r *rig) id() string {
	r.n++
	return fmt.Sprintf("e%d", r.n)
}

// start starts a shell command.
func (r *rig) start(s sandbox.ExecSpec, command string) sandbox.ExecState {
	r.Helper()
	if s.ID == "" {
		s.ID = r.id()
	}
	s.Shell = command
	st, err := r.c.Exec(r.ctx, s, process("/bin/sh", "-c", command))
	if err != nil {
		r.Fatalf("%s: %v", command, err)
	}
	return st
}

// wait returns the final state of an exec.
func (r *rig) wait(id string) sandbox.ExecState {
	r.Helper()
	st, err := r.c.WaitExec(r.ctx, id, 1<<62, 1<<62)
	if err != nil {
		r.Fatal(err)
	}
	if r.ctx.Err() != nil {
		r.Fatalf("exec %s has not ended: %+v", id, st)
	}
	return st
}

// run runs a shell command to its end.
func (r *rig) run(s sandbox.ExecSpec, command string) sandbox.ExecState {
	r.Helper()
	return r.wait(r.start(s, command).ID)
}

// output returns what is kept of a stream, which its state agrees with.
func (r *rig) output(st sandbox.ExecState, stream string) string {
	r.Helper()
	b, err := os.ReadFile(holder.OutputPath(r.dir, st.ID, stream))
	if err != nil && !os.IsNotExist(err) {
		r.Fatal(err)
	}
	o := st.Stdout
	if stream == "stderr" {
		o = st.Stderr
	}
	if int64(len(b)) < o.Kept {
		r.Errorf("%s of %s has %d bytes, %d are said", stream, st.ID, len(b), o.Kept)
	}
	return string(b[:min(int64(len(b)), o.Kept)])
}

// want checks how an exec ended.
func (r *rig) want(st sandbox.ExecState, code int, reason string) {
	r.Helper()
	if st.State != sandbox.ExecExited || st.ExitCode == nil || *st.ExitCode != code || st.Reason != reason || st.Ended == nil {
		r.Errorf("exec %s: %s, want exit code %d and reason %s", st.ID, describe(st), code, reason)
	}
}

func describe(st sandbox.ExecState) string {
	code := "none"
	if st.ExitCode != nil {
		code = fmt.Sprint(*st.ExitCode)
	}
	return fmt.Sprintf("state %s, exit code %s, signal %d, reason %q, message %q, stdout %+v, stderr %+v",
		st.State, code, st.Signal, st.Reason, st.Message, st.Stdout, st.Stderr)
}

// commands lists the guest's processes but the first.
func (r *rig) commands() (names []string) {
	r.Helper()
	list, err := r.c.Processes(r.ctx)
	if err != nil {
		r.Fatal(err)
	}
	for _, p := range list {
		if p.PID != 1 {
			names = append(names, p.Cmd)
		}
	}
	return names
}

// wantNobody checks that no process but the first is left, and that the sandbox
// still works.
func (r *rig) wantNobody() {
	r.Helper()
	if names := r.commands(); len(names) > 0 {
		r.Errorf("left in the guest: %v", names)
	}
	st := r.run(sandbox.ExecSpec{}, "echo works")
	r.want(st, 0, sandbox.ExecReasonExited)
	if out := r.output(st, "stdout"); out != "works\n" {
		r.Errorf("the sandbox says %q", out)
	}
}

// waitFor waits until something is so.
func (r *rig) waitFor(what string, so func() bool) {
	r.Helper()
	for !so() {
		if r.ctx.Err() != nil {
			r.Fatalf("waited for %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// waitOutput waits until an exec has written something.
func (r *rig) waitOutput(id, want string) {
	r.Helper()
	var b []byte
	r.waitFor(want, func() bool {
		b, _ = os.ReadFile(holder.OutputPath(r.dir, id, "stdout"))
		if r.ctx.Err() != nil {
			r.Errorf("exec %s says %q", id, b)
		}
		return strings.Contains(string(b), want)
	})
}

// shim is this program, or the one that QUARRY_SHIM names, for measurements.
func shim() []string {
	if path := os.Getenv("QUARRY_SHIM"); path != "" {
		return []string{path}
	}
	return []string{os.Args[0]}
}

// helperProgram builds a static program that copies its stdin and exits with its
// argument, or sleeps when that is 0.
func helperProgram(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "helper")
	build := exec.Command("go", "build", "-o", path, "./testdata/helper")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// sendRaw sends bytes to a socket and reads until it is closed or answers.
func sendRaw(t testing.TB, path, raw string) {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(raw)); err != nil {
		t.Fatal(err)
	}
	c.(*net.UnixConn).CloseWrite()
	io.Copy(io.Discard, c)
}
