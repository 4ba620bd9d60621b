package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/api/sandboxes/client"
	"quarry/internal/need"
	"quarry/internal/swap"
	"quarry/worker/cgroup"
	"quarry/worker/sandbox"
)

// swapLock waits until no other test of the machine has swap, and returns what keeps
// them from it until it is closed.
func swapLock(t *testing.T) *os.File {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "quarry-test-swap.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	check(t, err)
	check(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	return lock
}

func hasSwap() bool {
	raw, _ := os.ReadFile("/proc/swaps") // a kernel without swap has none
	return strings.Count(string(raw), "\n") > 1
}

// swapFile switches a swap file on until the test ends. One test of the machine has
// swap at a time.
func swapFile(t *testing.T, dir string, size int64) {
	t.Helper()
	need.Root(t)
	lock := swapLock(t)
	t.Cleanup(func() { lock.Close() })
	if hasSwap() {
		need.Missing(t, "a machine without swap of its own, so that a test may choose where it is")
	}
	path := filepath.Join(dir, "swap")
	check(t, swap.MakeFile(path, size))
	if err := swap.On(path); err != nil {
		need.Missing(t, "swap: "+err.Error())
	}
	t.Cleanup(func() {
		if err := swap.Off(path); err != nil {
			t.Error(err)
		}
	})
}

// memoryRig is a worker whose sandboxes have so much memory together and no more.
type memoryRig struct {
	*workerRig
	c     *client.Client
	ctx   context.Context
	flags []string
}

func newMemoryRig(t *testing.T, limit int64, flags ...string) *memoryRig {
	t.Helper()
	r := &memoryRig{workerRig: newWorkerRig(t, "cold", flags...), flags: flags}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	t.Cleanup(cancel)
	r.ctx, r.c = ctx, r.client()
	file := filepath.Join(cgroup.Root, "memory", r.group(), "memory.limit_in_bytes")
	if cgroup.IsV2(cgroup.Root) {
		file = filepath.Join(cgroup.Root, r.group(), "memory.max")
	}
	check(t, os.WriteFile(file, []byte(strconv.FormatInt(limit, 10)), 0o600))
	return r
}

// create makes a sandbox that is paused when it is idle, if that is asked for.
func (r *memoryRig) create(idlePause int64) string {
	r.t.Helper()
	sb, err := r.c.Create(r.ctx, sandbox.Spec{Image: "t/task", MemoryMB: 512, IdlePause: idlePause}, "")
	check(r.t, err)
	return sb.ID
}

// sh runs a command in a sandbox, which must succeed, and returns what it says.
func (r *memoryRig) sh(id, command string) string {
	r.t.Helper()
	code, out, err := run(r.ctx, r.c, id, sandbox.ExecSpec{Argv: []string{"/bin/sh", "-c", command}})
	if err != nil || code != 0 {
		r.t.Fatalf("%s: %d %q %v\n%s", command, code, out, err, r.logTail())
	}
	return out
}

// metric reads one of the worker's.
func (r *memoryRig) metric(name string) float64 {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, r.url+"/metrics", nil)
	check(r.t, err)
	req.Header.Set("Authorization", "Bearer "+r.token)
	res, err := http.DefaultClient.Do(req)
	check(r.t, err)
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	check(r.t, err)
	for line := range strings.Lines(string(raw)) {
		if text, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			check(r.t, err)
			return v
		}
	}
	r.t.Fatalf("no metric %s in\n%s", name, raw)
	return 0
}

func (r *memoryRig) until(what string, ok func() bool) {
	r.t.Helper()
	r.await(r.ctx, what, ok)
}

func (r *memoryRig) state(id string, want sandbox.State) func() bool {
	return func() bool {
		got, err := r.c.Get(r.ctx, id)
		return err == nil && got.State == want
	}
}

// settings are what of a sandbox's group a reclaim changes.
func (r *memoryRig) settings(id string) string {
	var out []string
	for _, pattern := range []string{"memory/*/*/" + id + "/memory.swappiness", "memory/*/*/" + id + "/memory.limit_in_bytes", "*/*/" + id + "/memory.swap.max"} {
		paths, _ := filepath.Glob(filepath.Join(cgroup.Root, pattern))
		for _, p := range paths {
			raw, err := os.ReadFile(p)
			check(r.t, err)
			out = append(out, filepath.Base(p)+" "+strings.TrimSpace(string(raw)))
		}
	}
	return strings.Join(out, ", ")
}

// TestPausedMemoryServesOthers has sandboxes with real memory wait while another one
// needs what they have, in a control group that has not enough for all: theirs is taken,
// is back and right when they run again, whoever resumes them, and also when the worker
// is killed while it takes it.
func TestPausedMemoryServesOthers(t *testing.T) {
	const mib = 1 << 20
	swapFile(t, need.ShortDir(t), 1<<30)
	r := newMemoryRig(t, 448*mib, "--memory-low", "128M", "--memory-high", "192M")
	const idle, called = 0, 1 // who is paused by nobody but the worker, and the first that a call pauses
	ids := []string{r.create(300), r.create(0), r.create(0)}
	sums := map[string]string{}
	for _, id := range ids {
		sums[id] = r.sh(id, "head -c 64M /dev/urandom >/dev/shm/data && sha256sum /dev/shm/data")
	}
	for _, id := range ids[called:] {
		r.pause(r.ctx, r.c, id)
	}
	// Who looks keeps nobody awake, and wakes nobody for longer than that takes.
	look := func() {
		t.Helper()
		var b bytes.Buffer
		_, err := r.c.ReadFile(r.ctx, ids[idle], "/etc/hostname", sandbox.ReadOptions{}, &b)
		check(t, err)
		_, err = r.c.StatFile(r.ctx, ids[idle], "/dev/shm/data")
		check(t, err)
	}
	r.until("a pause of the idle one", func() bool {
		look()
		time.Sleep(50 * time.Millisecond)
		return r.state(ids[idle], sandbox.StatePaused)()
	})
	look()
	r.until("a pause after a look", r.state(ids[idle], sandbox.StatePaused))
	r.until("three whose memory may be taken", func() bool { return r.metric("quarry_paused_memory_sandboxes") == 3 })
	before := map[string]string{}
	for _, id := range ids {
		before[id] = r.settings(id)
	}

	needy := r.create(0)
	r.sh(needy, "head -c 192M /dev/zero >/dev/shm/data")
	taken := func() float64 { return r.metric(`quarry_paused_memory_taken_bytes_total{how="swap"}`) }
	r.until("memory that is taken", func() bool { return taken() >= 64*mib })
	r.sh(needy, "rm /dev/shm/data")

	begun := time.Now()
	for _, id := range ids {
		if id != ids[idle] { // a command resumes that one
			_, err := r.c.Resume(r.ctx, id)
			check(t, err)
		}
		if got := r.sh(id, "sha256sum /dev/shm/data"); got != sums[id] {
			t.Errorf("a sandbox's memory came back as another: %s, was %s", got, sums[id])
		}
	}
	t.Logf("%.0f MiB taken, %.0f MiB brought back, all three sums after %v", taken()/mib, r.metric("quarry_paused_memory_returned_bytes_total")/mib, time.Since(begun))
	if n := r.metric("quarry_paused_memory_returned_bytes_total"); n < 32*mib {
		t.Errorf("%v bytes were brought back", n)
	}

	// A worker that is killed while it takes memory leaves what it changed to the next one.
	for _, id := range ids[called:] {
		r.pause(r.ctx, r.c, id)
	}
	began := taken()
	r.until("a pause of the idle one", r.state(ids[idle], sandbox.StatePaused)) // which a command wakes under the next worker too
	_, err := r.c.Start(r.ctx, needy, sandbox.ExecSpec{ID: "more", Argv: []string{"/bin/sh", "-c", "head -c 240M /dev/zero >/dev/shm/data; sleep 1000"}})
	check(t, err)
	changed := false
	r.until("a reclaim", func() bool {
		found, err := filepath.Glob(r.path("w", "node", "*", "reclaim"))
		changed = len(found) > 0
		return err == nil && changed || taken() > began
	})
	r.killWorker()
	t.Logf("killed while settings were changed: %v", changed)
	r.startWorker(r.flags...)
	r.c = r.client()
	for _, id := range ids[called:] {
		if !r.state(id, sandbox.StatePaused)() {
			t.Errorf("sandbox %s is not paused any more", id)
		}
	}
	check(t, r.c.Signal(r.ctx, needy, "more", 9))
	_, err = r.c.Delete(r.ctx, needy)
	check(t, err)
	for _, id := range ids {
		if id != ids[idle] {
			_, err := r.c.Resume(r.ctx, id)
			check(t, err)
		}
		if got := r.sh(id, "sha256sum /dev/shm/data"); got != sums[id] {
			t.Errorf("a sandbox's memory came back as another: %s, was %s", got, sums[id])
		}
		if got := r.settings(id); got != before[id] {
			t.Errorf("left of a reclaim: %s, was %s", got, before[id])
		}
		end, err := r.c.Delete(r.ctx, id)
		check(t, err)
		if end.Reason != sandbox.ReasonDeleted || end.Evidence.Pauses < 2 || end.Evidence.PausedFor == 0 {
			t.Errorf("the record of %s says %+v", id, end)
		}
	}
	if found, _ := filepath.Glob(r.path("w", "node", "*", "reclaim")); len(found) > 0 {
		t.Errorf("journals are left: %s", fmt.Sprint(found))
	}
	r.nothingLeftOf()
}

// TestWithoutSwapTheLargestGoesToDisk has memory wanted where there is no swap to put it:
// of those that are paused, the one that has most goes to disk, the others stay as they
// are, and all that they had is right when they run again.
func TestWithoutSwapTheLargestGoesToDisk(t *testing.T) {
	const mib = 1 << 20
	need.Root(t)
	lock := swapLock(t)
	t.Cleanup(func() { lock.Close() })
	if hasSwap() {
		need.Missing(t, "a machine without swap")
	}
	r := newMemoryRig(t, 448*mib, "--memory-low", "128M", "--memory-high", "160M", "--hibernate-after", "1s")
	small, large := r.create(0), r.create(0)
	sums := map[string]string{}
	for id, size := range map[string]string{small: "36M", large: "96M"} {
		sums[id] = r.sh(id, "head -c "+size+" /dev/urandom >/dev/shm/data && sha256sum /dev/shm/data")
		r.pause(r.ctx, r.c, id)
	}
	time.Sleep(1500 * time.Millisecond) // both have been paused for --hibernate-after
	needy := r.create(0)
	r.sh(needy, "head -c 150M /dev/zero >/dev/shm/data")
	r.until("the largest on disk", r.state(large, sandbox.StateHibernated))
	if !r.state(small, sandbox.StatePaused)() {
		t.Error("the smaller one is not just paused any more")
	}
	_, err := r.c.Delete(r.ctx, needy)
	check(t, err)
	for _, id := range []string{small, large} {
		_, err := r.c.Resume(r.ctx, id)
		check(t, err)
		if got := r.sh(id, "sha256sum /dev/shm/data"); got != sums[id] {
			t.Errorf("a sandbox's memory came back as another: %s, was %s", got, sums[id])
		}
		end, err := r.c.Delete(r.ctx, id)
		check(t, err)
		if end.Reason != sandbox.ReasonDeleted {
			t.Errorf("its record says %+v", end)
		}
	}
	r.nothingLeftOf()
}
