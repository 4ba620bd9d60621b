package holder_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
	"quarry/worker/sentry/sentrytest"
)

// hibernate pauses and hibernates a sandbox, and checks that nothing of it runs.
func (r *rig) hibernate() {
	r.Helper()
	if err := r.c.Pause(r.ctx, false); err != nil {
		r.Fatal(err)
	}
	before := r.state()
	size, err := r.c.Hibernate(r.ctx)
	for errors.Is(err, holder.ErrNotHibernated) && strings.Contains(err.Error(), "not begun") { // ends with ctx
		if err = r.c.Resume(r.ctx); err == nil {
			err = r.c.Pause(r.ctx, false)
		}
		if err == nil {
			size, err = r.c.Hibernate(r.ctx)
		}
	}
	if err != nil {
		r.Fatal(err)
	}
	st := r.state()
	if !st.Hibernated || !st.Paused || size == 0 || st.PID != before.PID {
		r.Errorf("hibernated: %+v, %d bytes", st, size)
	}
	for _, pid := range sentrytest.Processes(r, r.dir) {
		if pid != st.PID {
			r.Errorf("process %d runs", pid)
		}
	}
}

func (r *rig) wake() {
	r.Helper()
	if err := r.c.Wake(r.ctx); err != nil {
		r.Fatal(err)
	}
	if st := r.state(); st.Hibernated || st.Paused {
		r.Errorf("woken: %+v", st)
	}
	if _, err := os.Stat(filepath.Join(r.dir, "hibernated")); !errors.Is(err, os.ErrNotExist) {
		r.Errorf("the files of the hibernation are still there: %v", err)
	}
}

func (r *rig) state() holder.State {
	r.Helper()
	st, err := r.c.State(r.ctx)
	if err != nil {
		r.Fatal(err)
	}
	return st
}

// A sandbox goes to disk and comes back, more than once, with its files; its commands of
// before are known, and others run in it.
func TestASandboxSleepsAndWakes(t *testing.T) {
	r := newRig(t)
	r.run(sandbox.ExecSpec{ID: "first"}, "echo memory > /tmp/f; echo disk > /var/f; echo out")
	if _, err := r.c.Hibernate(r.ctx); !errors.Is(err, holder.ErrNotHibernated) {
		t.Errorf("one that is not paused: %v", err)
	}
	for range 2 {
		r.hibernate()
		if size, err := r.c.Hibernate(r.ctx); err != nil || size == 0 {
			t.Errorf("twice: %d bytes, %v", size, err)
		}
		if err := r.c.Pause(r.ctx, false); err != nil {
			t.Errorf("a pause: %v", err)
		}
		if err := r.c.Resume(r.ctx); !errors.Is(err, holder.ErrHibernated) {
			t.Errorf("a resume: %v", err)
		}
		if _, err := r.c.Usage(r.ctx); !errors.Is(err, holder.ErrHibernated) {
			t.Errorf("a question to the Sentry: %v", err)
		}
		if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: r.id(), Shell: "true"}, process("/bin/true")); !errors.Is(err, holder.ErrPaused) {
			t.Errorf("a command: %v", err)
		}
		r.want(r.wait("first"), 0, sandbox.ExecReasonExited)
		r.wake()
		if err := r.c.Wake(r.ctx); err != nil {
			t.Errorf("woken twice: %v", err)
		}
		st := r.run(sandbox.ExecSpec{}, "cat /tmp/f /var/f; sleep 0.01 & wait; ps -o stat | grep -c Z")
		if out := r.output(st, "stdout"); out != "memory\ndisk\n0\n" {
			t.Errorf("after a wake: %q", out)
		}
		// Its pauses count from the beginning.
		for range 2 {
			if err := errors.Join(r.c.Pause(r.ctx, false), r.c.Resume(r.ctx)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if st := r.state(); st.Pauses != 6 || st.PausedFor == 0 {
		t.Errorf("%+v, want 6 pauses", st)
	}
	r.wantNobody()
}

// One whose first process has not run yet is told so, and can be hibernated later.
func TestASandboxThatHasJustBegun(t *testing.T) {
	r := newRig(t)
	for first := true; ; first = false {
		if err := r.c.Pause(r.ctx, false); err != nil {
			t.Fatal(err)
		}
		_, err := r.c.Hibernate(r.ctx)
		if err == nil {
			break
		}
		if !errors.Is(err, holder.ErrNotHibernated) || !strings.Contains(err.Error(), "not begun") || strings.Contains(err.Error(), "\n") {
			t.Fatalf("first %v: %v", first, err)
		}
		if err := r.c.Resume(r.ctx); err != nil {
			t.Fatal(err)
		}
	}
	r.wake()
	r.wantNobody()
}

// The first process goes on where it was, with its output.
func TestAnEntrypointSleepsAndWakes(t *testing.T) {
	r := startRig(t, config(t, "sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done"))
	lines := func() []string {
		b, _ := os.ReadFile(holder.InitOutputPath(r.dir, "stdout"))
		return strings.Fields(string(b))
	}
	for range 2 {
		n := len(lines())
		r.waitFor("its output", func() bool { return len(lines()) > n+2 })
		r.hibernate()
		n = len(lines())
		r.wake()
		r.waitFor("its output", func() bool { return len(lines()) > n+2 })
	}
	for i, l := range lines()[1:] {
		if len(l) < len(lines()[i]) {
			t.Fatalf("line %d is %q after %q", i+1, l, lines()[i])
		}
	}
	end, err := r.c.End(r.ctx)
	if err != nil || !end.Killed || end.Pauses != 2 {
		t.Errorf("%+v, %v", end, err)
	}
}

// What a restore would kill is not hibernated, and goes on.
func TestWhatARestoreWouldKillIsNotHibernated(t *testing.T) {
	r := newRig(t)
	r.start(sandbox.ExecSpec{ID: "agent", Role: sandbox.ExecAgent}, "sleep 1000")
	for _, what := range []string{"commands run", "would kill process"} {
		if err := r.c.Pause(r.ctx, false); err != nil {
			t.Fatal(err)
		}
		if _, err := r.c.Hibernate(r.ctx); !errors.Is(err, holder.ErrNotHibernated) || !strings.Contains(err.Error(), what) {
			t.Errorf("got %v, want %s", err, what)
		}
		if st := r.state(); st.Hibernated || !st.Paused {
			t.Errorf("refused: %+v", st)
		}
		if err := r.c.Resume(r.ctx); err != nil {
			t.Fatal(err)
		}
		if err := r.c.Signal(r.ctx, "agent", int(unix.SIGKILL)); err == nil {
			r.wait("agent")
			r.run(sandbox.ExecSpec{}, "(sleep 1000 >/dev/null 2>&1 &)")
		}
	}
}

// onSmallDisk is config with a folder on a disk of that size.
func onSmallDisk(t *testing.T, size string) holder.Config {
	t.Helper()
	c := config(t)
	bundle, err := os.ReadFile(filepath.Join(c.Dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("small", c.Dir, "tmpfs", 0, "mode=700,size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(c.Dir, unix.MNT_DETACH) })
	if err := errors.Join(os.WriteFile(filepath.Join(c.Dir, "config.json"), bundle, 0o600), os.Mkdir(filepath.Join(c.Dir, "upper"), 0o700)); err != nil {
		t.Fatal(err)
	}
	return c
}

// A disk that fills while the checkpoint is written is told, and the guest goes on.
func TestADiskThatFills(t *testing.T) {
	r := startRig(t, onSmallDisk(t, "250m"))
	r.run(sandbox.ExecSpec{}, "yes | head -c 100000000 > /tmp/f")
	ctx, cancel := context.WithTimeout(t.Context(), 10*patience)
	defer cancel()
	r.ctx = ctx
	for until := time.Now().Add(5 * patience); time.Now().Before(until); {
		if err := r.c.Pause(r.ctx, false); err != nil {
			t.Fatal(err)
		}
		filler := filepath.Join(r.dir, "filler")
		f, err := os.Create(filler)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { _, err := r.c.Hibernate(r.ctx); done <- err }()
		r.waitFor("the first pages", func() bool {
			_, err := os.Stat(filepath.Join(r.dir, "hibernated", "pages.img"))
			return err == nil || r.state().Hibernated
		})
		for size := int64(250 << 20); size > 0; size -= 4 << 20 { // all that is left
			if unix.Fallocate(int(f.Fd()), 0, 0, size) == nil {
				break
			}
		}
		f.Close()
		err = <-done
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
		if err == nil { // it was faster
			r.wake()
			continue
		}
		if !errors.Is(err, holder.ErrNotHibernated) || !strings.Contains(err.Error(), "no space") {
			t.Errorf("got %v", err)
		}
		if err := r.c.Resume(r.ctx); err != nil {
			t.Fatal(err)
		}
		r.wantNobody()
		r.hibernate() // there is room again
		r.wake()
		if st := r.run(sandbox.ExecSpec{}, "wc -c < /tmp/f"); r.output(st, "stdout") != "100000000\n" {
			t.Error("its memory does not read")
		}
		return
	}
	t.Error("the disk was never full in the middle")
}

// A disk that has no room is told, and the guest goes on.
func TestADiskWithoutRoom(t *testing.T) {
	c := onSmallDisk(t, "32m")
	r := startRig(t, c)
	if err := r.c.Pause(r.ctx, false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.c.Hibernate(r.ctx); !errors.Is(err, holder.ErrNotHibernated) || !strings.Contains(err.Error(), "MiB free") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(filepath.Join(c.Dir, "hibernated")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("files are left: %v", err)
	}
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.wantNobody()
}

// invert turns every bit of a byte in the middle of a file.
func invert(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 0xff
	if err := os.WriteFile(path, b, 0); err != nil {
		t.Fatal(err)
	}
}

// A checkpoint that is damaged is the end of the sandbox, which says so, and no guest runs
// from what is left: not even when one byte is wrong.
func TestADamagedCheckpoint(t *testing.T) {
	cut := func(t *testing.T, path string) {
		if err := os.Truncate(path, 4096); err != nil {
			t.Fatal(err)
		}
	}
	remove := func(t *testing.T, path string) {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name   string
		damage func(*testing.T, string)
	}{
		{"pages.img", cut},
		{"pages_meta.img", remove},
		{"checkpoint.img", invert},
		{"pages.img", invert},
		{"checksums.json", invert},
	} {
		name := c.name
		r := newRig(t)
		r.run(sandbox.ExecSpec{}, "true") // its first process has begun
		r.hibernate()
		c.damage(t, filepath.Join(r.dir, "hibernated", name))
		if err := r.c.Wake(r.ctx); !errors.Is(err, holder.ErrNotRestored) || !strings.Contains(err.Error(), "damaged on the disk") {
			t.Errorf("%s: %v", name, err)
		}
		end, err := r.c.WaitEnded(r.ctx)
		if err != nil || !end.NotRestored || end.Message == "" {
			t.Errorf("%s: %+v, %v", name, end, err)
		}
		if strings.Contains(end.Message, "\n") {
			t.Errorf("%s: its message is not a line: %s", name, end.Message)
		}
		if pids := sentrytest.Processes(t, r.dir); len(pids) != 1 {
			t.Errorf("%s: processes %v are left", name, pids)
		}
	}
}

// A question to a Sentry that is ended because the sandbox is hibernated says that, also
// when it is awake again by then: the sandbox has not ended.
func TestAHibernationUnderARead(t *testing.T) {
	r := newRig(t)
	r.run(sandbox.ExecSpec{}, "yes | head -c 1000000 > /tmp/f")
	if err := r.c.Pause(r.ctx, false); err != nil {
		t.Fatal(err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	done := make(chan error, 1)
	go func() {
		done <- r.c.Cat(r.ctx, "/tmp/f", write)
		write.Close()
	}()
	if _, err := read.Read(make([]byte, 1)); err != nil { // it is under way, and the pipe too small for it
		t.Fatal(err)
	}
	stop := make(chan struct{})
	asked := make(chan error, 1)
	go func() { // others, at any moment
		for {
			_, err := r.c.Processes(r.ctx)
			if _, uerr := r.c.Usage(r.ctx); err == nil {
				err = uerr
			}
			if err != nil && !errors.Is(err, holder.ErrHibernated) {
				asked <- err
				return
			}
			select {
			case <-stop:
				asked <- nil
				return
			default:
			}
		}
	}()
	if _, err := r.c.Hibernate(r.ctx); !errors.Is(err, holder.ErrNotHibernated) {
		t.Errorf("hibernated under a read: %v", err)
	}
	rest, err := io.ReadAll(read)
	if rerr := <-done; err != nil || rerr != nil || len(rest) != 999_999 {
		t.Errorf("a read: %d bytes more, %v, %v", len(rest), err, rerr)
	}
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		r.hibernate()
		r.wake()
	}
	close(stop)
	if err := <-asked; err != nil {
		t.Errorf("a question: %v", err)
	}
	r.run(sandbox.ExecSpec{}, "true")
	r.wantNobody()
}

// One that is hibernated can be ended.
func TestAHibernatedSandboxEnds(t *testing.T) {
	r := newRig(t)
	r.hibernate()
	end, err := r.c.End(r.ctx)
	if err != nil || !end.Killed || end.NotRestored {
		t.Errorf("%+v, %v", end, err)
	}
	if err := r.c.Wake(r.ctx); !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("a wake: %v", err)
	}
	if err := r.c.Release(r.ctx); err != nil {
		t.Error(err)
	}
}
