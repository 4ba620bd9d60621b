package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

// TestAFailedReadStandsInTheRecord damages what the store has of an image while a
// sandbox of it runs. The guest swallows that, and its record does not.
func TestAFailedReadStandsInTheRecord(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	ctx := t.Context()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 512}, "")
	check(t, err)
	const readAll = "find %s -xdev -type f -exec cat {} + > /dev/null 2>&1; true"
	read := func(id, what string) sandbox.ExecState {
		a, err := c.Exec(ctx, sb.ID, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: id, Shell: fmt.Sprintf(readAll, what)}})
		check(t, err)
		if a.ExitCode == nil || *a.ExitCode != 0 {
			t.Errorf("reading %s: %+v", what, a.ExecState)
		}
		return a.ExecState
	}
	if st := read("before", "/etc/passwd"); st.Infra != "" {
		t.Errorf("before: %+v", st)
	}
	damaged := 0
	check(t, filepath.WalkDir(r.path("d", "bucket", "packs"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		damaged++
		return os.Truncate(path, 0)
	}))
	if damaged == 0 {
		t.Fatal("the store has no pack")
	}
	if st := read("spoiled", "/usr/share/zoneinfo"); st.Infra == "" {
		t.Errorf("nothing tells that reads failed: %+v", st)
	}
	if st := read("after", "/proc/version"); st.Infra != "" {
		t.Errorf("after: %+v", st)
	}
	list, err := c.Execs(ctx, sb.ID)
	if err != nil || len(list) != 3 || list[0].Infra != "" || list[1].Infra == "" || list[2].Infra != "" {
		t.Errorf("listed: %+v, %v", list, err)
	}
	if err := exec.Command(r.path("bin", "quarry"), "exec", "--worker-dir", r.path("w"), sb.ID, "--", "/bin/sh", "-c", fmt.Sprintf(readAll, "/usr/share/zoneinfo")).Run(); err == nil {
		t.Error("quarry exec succeeds although reads failed")
	}
	u, err := c.Usage(ctx, sb.ID)
	if err != nil || u.ImageErrors == 0 {
		t.Errorf("got %+v, %v", u, err)
	}
	end, err := c.Delete(ctx, sb.ID)
	check(t, err)
	if end.Reason != sandbox.ReasonImageIO || end.Blame != sandbox.BlameInfra || !end.Retryable || end.Evidence.ImageIOErrors == 0 || len(end.Evidence.ImageErrors) == 0 {
		t.Errorf("got %+v", end)
	}
	r.nothingLeftOf()
}

// awaitStalledRead waits until reads of the rig's images have been under way for a while,
// as those are that nobody answers.
func (r *workerRig) awaitStalledRead(ctx context.Context) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var look stalledReads
	r.await(ctx, "a read of the image that nobody answers", func() bool { return look.seen(r.path("w")) })
}

func processesNamed(t *testing.T, prefix string) (pids []int) {
	t.Helper()
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		if raw, err := os.ReadFile(path); err == nil && bytes.HasPrefix(raw, []byte(prefix)) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			check(t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// TestAMountThatDiesStandsInTheRecord kills the process that serves an image.
func TestAMountThatDiesStandsInTheRecord(t *testing.T) {
	r := newWorkerRig(t, "cold")
	c := r.client()
	ctx := t.Context()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 128}, "")
	check(t, err)
	pids := processesNamed(t, r.path("bin", "quarry-shim")+"\x00--socket\x00")
	if len(pids) != 1 {
		t.Fatalf("shims: %v", pids)
	}
	check(t, syscall.Kill(pids[0], syscall.SIGKILL))
	// A command says so, or has no answer but the record: it ends without being asked.
	a, err := c.Exec(ctx, sb.ID, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "under", Shell: "cat /usr/bin/* > /dev/null 2>&1; sleep 1; true"}})
	if err == nil && a.Infra == "" || err != nil && !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("a command on a dead image: %+v, %v", a, err)
	}
	for range 1200 {
		if got, err := c.Get(ctx, sb.ID); err != nil || got.State == sandbox.StateEnded {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if got, err := c.Get(ctx, sb.ID); err != nil || got.State != sandbox.StateEnded {
		t.Errorf("it lives on without its image: %s, %v", got.State, err)
	}
	end, err := c.Delete(ctx, sb.ID)
	check(t, err)
	if end.Reason != sandbox.ReasonImageIO || end.Blame != sandbox.BlameInfra || end.Evidence.ImageIOErrors == 0 {
		t.Errorf("got %+v", end)
	}
	// The image is mounted anew for the next one.
	next, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 128}, "")
	check(t, err)
	if code, out, err := run(ctx, c, next.ID, sandbox.ExecSpec{Shell: "echo here"}); code != 0 || out != "here\n" {
		t.Errorf("got %d %q %v", code, out, err)
	}
	if end, err := c.Delete(ctx, next.ID); err != nil || end.Reason != sandbox.ReasonDeleted {
		t.Errorf("got %+v, %v", end, err)
	}
	r.nothingLeftOf()
}

// TestAFullDisk gives sandboxes more disk than the node has.
func TestAFullDisk(t *testing.T) {
	r := newWorkerRig(t, "cold")
	small := r.path("w", "node")
	r.onSmallDisk("", small, "48m", "--disk", "20G")
	c := r.client()
	ctx := t.Context()
	spec := sandbox.Spec{Image: "t/task", MemoryMB: 256}
	greedy, err := c.Create(ctx, spec, "")
	check(t, err)
	code, out, err := run(ctx, c, greedy.ID, sandbox.ExecSpec{Shell: "head -c 100000000 /dev/zero > /full"})
	t.Logf("the guest got %d %q %v", code, out, err)
	if err == nil && code == 0 {
		t.Error("it wrote more than there is")
	}
	if sb, err := c.Get(ctx, greedy.ID); err != nil || sb.End != nil && (sb.End.Reason != sandbox.ReasonDiskFull || sb.End.Blame != sandbox.BlameInfra) {
		t.Errorf("got %+v, %v", sb.End, err)
	}
	_, err = c.Delete(ctx, greedy.ID)
	check(t, err)
	r.withoutDisk(ctx, c, small, spec)
	next, err := c.Create(ctx, spec, "")
	check(t, err)
	if code, out, err := run(ctx, c, next.ID, sandbox.ExecSpec{Shell: "echo room"}); code != 0 || out != "room\n" {
		t.Errorf("got %d %q %v", code, out, err)
	}
	_, err = c.Delete(ctx, next.ID)
	check(t, err)
	r.endWorker()
	check(t, syscall.Unmount(small, 0))
	r.nothingLeftOf()
}

// withoutDisk fills the node's disk under a sandbox: whatever happens is said to be the
// node's fault, and nothing new is begun.
func (r *workerRig) withoutDisk(ctx context.Context, c *client.Client, small string, spec sandbox.Spec) {
	t := r.t
	t.Helper()
	sb, err := c.Create(ctx, spec, "")
	check(t, err)
	ready := func() int {
		resp, err := http.Get(r.url + "/readyz")
		check(t, err)
		resp.Body.Close()
		return resp.StatusCode
	}
	if code := ready(); code != http.StatusOK {
		t.Errorf("with room: readyz says %d", code)
	}
	ballast := fillUp(t, small)
	if code := ready(); code != http.StatusServiceUnavailable {
		t.Errorf("without room: readyz says %d", code)
	}
	var busy *sandboxes.Error
	if _, err := c.Create(ctx, spec, ""); !errors.Is(err, sandbox.ErrCapacity) || !errors.As(err, &busy) || busy.RetryAfter == 0 || !strings.Contains(err.Error(), "disk") {
		t.Errorf("another create: %v", err)
	}
	a, err := c.Exec(ctx, sb.ID, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "short", Shell: "head -c 100000 /dev/zero"}})
	if err == nil && (a.Stdout.Kept+a.Stdout.Dropped != 100000 || a.Stdout.DroppedBy != sandbox.DroppedDisk || a.Stdout.Error == "" || a.Infra == "") || err != nil && !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("output that cannot be kept: %+v, %v", a.ExecState, err)
	}
	content := make([]byte, 1<<20)
	_, err = c.WriteFile(ctx, sb.ID, "/root/large", sandbox.WriteOptions{Size: int64(len(content))}, bytes.NewReader(content))
	if !errors.Is(err, sandbox.ErrCapacity) && !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("a file on a full disk: %v", err)
	}
	end, err := c.Delete(ctx, sb.ID)
	check(t, err)
	t.Logf("it ended: %+v", end)
	raw, err := os.ReadFile(r.path("w", "records", sb.ID+".json"))
	if err != nil || !bytes.Contains(raw, []byte(end.Reason)) {
		t.Errorf("its record: %q, %v", raw, err)
	}
	check(t, os.Remove(ballast))
	if code := ready(); code != http.StatusOK {
		t.Errorf("with room again: readyz says %d", code)
	}
}

// TestTheDiskLimitIsTheGuests writes more than a sandbox may.
func TestTheDiskLimitIsTheGuests(t *testing.T) {
	r := newWorkerRig(t, "cold")
	c := r.client()
	ctx := t.Context()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 256, DiskMB: 16}, "")
	check(t, err)
	code, out, err := run(ctx, c, sb.ID, sandbox.ExecSpec{Shell: "head -c 64000000 /dev/zero > /full"})
	if err != nil || code == 0 || !strings.Contains(out, "No space left") {
		t.Errorf("got %d %q %v", code, out, err)
	}
	u, err := c.Usage(ctx, sb.ID)
	if err != nil || u.DiskBytes < 8<<20 || u.DiskBytes > 17<<20 {
		t.Errorf("got %+v, %v", u, err)
	}
	end, err := c.Delete(ctx, sb.ID)
	if err != nil || end.Evidence.DiskUsed < 8<<20 {
		t.Errorf("got %+v, %v", end, err)
	}
	r.nothingLeftOf()
}

// TestAnotherRunscIsNotTaken has the worker find a runsc of no known version.
func TestAnotherRunscIsNotTaken(t *testing.T) {
	r := newWorkerRig(t, "cold")
	r.endWorker()
	other := t.TempDir()
	check(t, os.WriteFile(filepath.Join(other, "runsc"), []byte("#!/bin/sh\necho runsc version release-20200101.0\n"), 0o755))
	t.Setenv("PATH", other+":"+os.Getenv("PATH"))
	r.startWorker()
	c := r.client()
	if _, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task"}, ""); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "release-20200101.0") {
		t.Errorf("got %v", err)
	}
	st, err := c.Node(t.Context())
	if err != nil || st.Runsc != "release-20200101.0" || !strings.Contains(strings.Join(st.CannotDo, "\n"), "runsc") {
		t.Errorf("got %+v, %v", st, err)
	}
	r.nothingLeftOf()
}

// TestCreatesThatFailLeaveTheQueue lets one create wait: those that end before it is
// their turn, as their image is not there, take no place from who comes later.
func TestCreatesThatFailLeaveTheQueue(t *testing.T) {
	r := newWorkerRig(t, "debian", "--queue", "1", "--creates", "1")
	c := r.client()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	for range 5 {
		if _, err := c.Create(ctx, sandbox.Spec{Image: "t/nothing"}, ""); !errors.Is(err, sandbox.ErrImage) {
			t.Fatalf("an image that is not there: %v", err)
		}
	}
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task"}, "")
	check(t, err)
	_, err = c.Delete(ctx, sb.ID)
	check(t, err)
	r.nothingLeftOf()
}

// TestACommandWhoseCallerLeavesIsWatched starts a command whose program the store does
// not give, and goes away: it begins and ends like any other.
func TestACommandWhoseCallerLeavesIsWatched(t *testing.T) {
	r := newWorkerRig(t, "cold", "--no-trace", "--read-timeout", "3m")
	c := r.client()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task"}, "key")
	check(t, err)
	store := processesNamed(t, r.path("bin", "quarry")+"\x00serve\x00")
	if len(store) != 1 {
		t.Fatalf("stores: %v", store)
	}
	check(t, syscall.Kill(store[0], syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(store[0], syscall.SIGCONT) })
	short, leave := context.WithTimeout(ctx, 2*time.Second)
	defer leave()
	_, err = c.Start(short, sb.ID, sandbox.ExecSpec{ID: "left", Argv: []string{"/usr/bin/git", "--version"}})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a command whose program nobody has: %v", err)
	}
	check(t, syscall.Kill(store[0], syscall.SIGCONT))
	var told []string
	over := errors.New("over")
	err = c.Events(ctx, 0, sb.ID, func(e sandbox.Event) error {
		if e.Exec == "left" {
			told = append(told, e.Type)
		}
		if e.Type == "exec_ended" {
			return over
		}
		return nil
	})
	if !errors.Is(err, over) || !slices.Equal(told, []string{"exec_started", "exec_ended"}) {
		t.Errorf("told of it: %v (%v)", told, err)
	}
	if st := done(t, c, sb.ID, "left"); st.ExitCode == nil || *st.ExitCode != 0 {
		t.Errorf("the command: %+v", st)
	}
	_, err = c.Delete(ctx, sb.ID)
	check(t, err)
	r.nothingLeftOf()
}
