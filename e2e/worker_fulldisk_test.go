package e2e_test

import (
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/api/sandboxes"
	"quarry/worker/sandbox"
)

// fillUp takes all that is free on the disk of a folder, and returns what takes it.
func fillUp(t *testing.T, dir string) (ballast string) {
	t.Helper()
	f, err := os.CreateTemp(dir, "ballast")
	check(t, err)
	defer f.Close()
	for n := 1 << 20; n >= 1; n /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, n))
		}
	}
	return f.Name()
}

// onSmallDisk starts the worker, whose network namespace is netns or "" for this one, anew
// with a folder of its own on another disk.
func (r *workerRig) onSmallDisk(netns, dir, size string, flags ...string) {
	t := r.t
	t.Helper()
	r.endWorker()
	check(t, os.RemoveAll(dir))
	check(t, os.Mkdir(dir, 0o700))
	check(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700,size="+size))
	t.Cleanup(func() { r.endWorker(); _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	r.startWorkerIn(netns, flags...)
}

// TestAWorkerLivesThroughAFullDisk fills the whole worker folder's disk under a sandbox
// that runs and one that is hibernated, and kills the worker: neither is lost for that.
func TestAWorkerLivesThroughAFullDisk(t *testing.T) {
	r := newWorkerRig(t, "cold")
	w := r.path("w")
	r.onSmallDisk("", w, "600m", "--disk", "20G")
	c, ctx := r.client(), t.Context()
	spec := sandbox.Spec{Image: "t/task", MemoryMB: 128}
	runs, err := c.Create(ctx, spec, "")
	check(t, err)
	sleeps, err := c.Create(ctx, spec, "")
	check(t, err)
	if code, out, err := run(ctx, c, sleeps.ID, sandbox.ExecSpec{Shell: "echo kept > /dev/shm/f; echo kept > /f"}); code != 0 || err != nil {
		t.Fatalf("got %d %q %v", code, out, err)
	}
	check(t, whenReady(func() error { _, err := c.Hibernate(ctx, sleeps.ID); return err }))
	ballast := fillUp(t, w)
	wantNoRoom := func(what string, err error) {
		t.Helper()
		var busy *sandboxes.Error
		if !errors.Is(err, sandbox.ErrCapacity) || !errors.As(err, &busy) || busy.RetryAfter == 0 || !strings.Contains(err.Error(), "disk") || !strings.Contains(err.Error(), "free some") {
			t.Errorf("%s on a full disk: %v", what, err)
		}
		if sb, err := c.Get(ctx, sleeps.ID); err != nil || sb.State != sandbox.StateHibernated {
			t.Fatalf("after %s on a full disk: %+v, %v", what, sb, err)
		}
	}
	_, err = c.Wake(ctx, sleeps.ID)
	wantNoRoom("a wake", err)
	_, _, err = run(ctx, c, sleeps.ID, sandbox.ExecSpec{Shell: "cat /f"})
	wantNoRoom("a command", err)

	for range 2 { // the second one finds what the first could not write
		r.killWorker()
		r.startWorker("--disk", "20G")
		c = r.client()
		_, err = c.Create(ctx, spec, "")
		wantNoRoom("a create", err)
	}
	if code, out, err := run(ctx, c, runs.ID, sandbox.ExecSpec{Shell: "exit 3"}); code != 3 || err != nil {
		t.Errorf("a command of the next worker: got %d %q %v", code, out, err)
	}
	seen := map[int64]bool{}
	over := errors.New("over")
	err = c.Events(ctx, 0, "", func(e sandbox.Event) error {
		if seen[int64(e.Sequence)] {
			t.Errorf("event %d twice", e.Sequence)
		}
		seen[int64(e.Sequence)] = true
		if e.Type == "exec_ended" {
			return over
		}
		return nil
	})
	if !errors.Is(err, over) && !errors.Is(err, io.EOF) {
		t.Errorf("events: %v", err)
	}
	end, err := c.Delete(ctx, runs.ID)
	if err != nil || end.Reason != sandbox.ReasonDeleted || end.Evidence.WorkerRestarts == 0 {
		t.Errorf("deleted on a full disk: %+v, %v", end, err)
	}
	check(t, os.Remove(ballast))
	_, err = c.Wake(ctx, sleeps.ID)
	check(t, err)
	if code, out, err := run(ctx, c, sleeps.ID, sandbox.ExecSpec{Shell: "cat /f /dev/shm/f"}); code != 0 || out != "kept\nkept\n" {
		t.Errorf("woken: %d %q %v", code, out, err)
	}
	_, err = c.Delete(ctx, sleeps.ID)
	check(t, err)
	r.nothingLeftOf()
}

// TestAFullDiskIsRemembered fills the disk under a command that ends when there is room
// again, and under a first process: neither end is told as theirs.
func TestAFullDiskIsRemembered(t *testing.T) {
	r := newWorkerRig(t, "cold")
	small := r.path("w", "node")
	r.onSmallDisk("", small, "64m", "--disk", "20G")
	c, ctx := r.client(), t.Context()
	spec := sandbox.Spec{Image: "t/task", MemoryMB: 128}
	sb, err := c.Create(ctx, spec, "")
	check(t, err)
	spec.Entrypoint = []string{"/bin/sh", "-c", "while :; do head -c 65536 /dev/zero >> /f || exit 7; sleep 0.1; done"}
	own, err := c.Create(ctx, spec, "")
	check(t, err)
	ballast := fillUp(t, small)
	_, err = c.Start(ctx, sb.ID, sandbox.ExecSpec{ID: "under", Shell: "while [ ! -e /dev/shm/go ]; do sleep 0.1; done; exit 9"})
	check(t, err)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if own, err = c.Get(ctx, own.ID); err != nil || own.State == sandbox.StateEnded {
			break
		}
	}
	if err != nil || own.End == nil || own.End.Reason != sandbox.ReasonDiskFull || own.End.Blame != sandbox.BlameInfra {
		t.Errorf("a first process on a full disk: %+v, %v", own.End, err)
	} else {
		t.Logf("it ended: %+v", own.End)
	}
	r.killWorker() // which has seen it
	check(t, os.Remove(ballast))
	r.startWorker("--disk", "20G")
	c = r.client()
	if code, out, err := run(ctx, c, sb.ID, sandbox.ExecSpec{ID: "after", Shell: "touch /dev/shm/go"}); code != 0 || err != nil {
		t.Fatalf("got %d %q %v", code, out, err)
	}
	if st := done(t, c, sb.ID, "under"); st.ExitCode == nil || *st.ExitCode != 9 || !strings.Contains(st.Infra, "disk was full") {
		t.Errorf("a command under which the disk was full: %+v", st)
	}
	if st := done(t, c, sb.ID, "after"); st.Infra != "" {
		t.Errorf("a command after that: %+v", st)
	}
	_, err = c.Delete(ctx, sb.ID)
	check(t, err)
	r.endWorker()
	check(t, syscall.Unmount(small, 0))
	r.nothingLeftOf()
}
