package e2e_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/internal/need"
	"quarry/worker/sandbox"
)

// workerRig is a data folder with an image and a worker that serves it.
type workerRig struct {
	*machine
	url    string
	token  string // of scopes run and admin
	worker *exec.Cmd
}

// servePatience is how long a worker may take until it serves.
const servePatience = 3 * time.Minute

// newWorkerRig converts an image of QUARRY_IMAGES and starts a worker.
func newWorkerRig(t *testing.T, image string, flags ...string) *workerRig {
	t.Helper()
	return newWorkerRigIn(t, "", image, flags...)
}

// newWorkerRigIn has the worker in a network namespace; "" is this one.
func newWorkerRigIn(t *testing.T, netns, image string, flags ...string) *workerRig {
	t.Helper()
	need.Tool(t, "runsc")
	r := &workerRig{machine: newMachine(t)}
	layout := filepath.Join(os.Getenv("QUARRY_IMAGES"), image)
	if _, err := os.Stat(filepath.Join(layout, "index.json")); err != nil {
		need.Missing(t, "QUARRY_IMAGES with "+image)
	}
	r.quarry("convert", "oci:"+layout, "--data", r.path("d"), "--name", "t/task")
	r.token = strings.TrimSpace(r.quarry("token", "create", "--tokens", r.path("tokens.json"), "--scope", "run,admin"))
	r.startWorkerIn(netns, flags...)
	return r
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// quarry runs a command of the machine's own program and returns what it prints.
func (r *workerRig) quarry(args ...string) string {
	r.t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(r.path("bin", "quarry"), args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		r.t.Fatalf("quarry %s: %v: %s", strings.Join(args, " "), err, stderr.String())
	}
	return string(out)
}

// startWorker starts a worker of the machine's folder and waits until it serves.
func (r *workerRig) startWorker(flags ...string) {
	r.t.Helper()
	r.startWorkerIn("", flags...)
}

func (r *workerRig) startWorkerIn(netns string, flags ...string) {
	r.t.Helper()
	log, err := os.OpenFile(r.path("worker.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	defer log.Close()
	args := append([]string{"worker", "--worker-dir", r.path("w"), "--data", r.path("d"), "--listen", "127.0.0.1:0", "--tokens", r.path("tokens.json"), "--cgroup", "/" + r.group()}, flags...)
	r.worker = exec.Command(r.path("bin", "quarry"), args...)
	if netns != "" {
		r.worker = exec.Command(need.Tool(r.t, "nsenter"), append([]string{"--net=" + netns, r.path("bin", "quarry")}, args...)...)
	}
	r.worker.Stderr = log
	out, err := r.worker.StdoutPipe()
	if err == nil {
		err = r.worker.Start()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(r.endWorker)
	patience := time.AfterFunc(servePatience, func() { _ = r.worker.Process.Kill() })
	defer patience.Stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !ok {
		r.t.Fatalf("the worker says %q (%v): %s", line, err, r.logTail())
	}
	r.url = url
}

// client returns a client of the worker with all rights.
func (r *workerRig) client() *client.Client {
	r.t.Helper()
	c, err := client.New(client.Config{URL: r.url, Token: r.token})
	check(r.t, err)
	return c
}

// killWorker ends the worker as a crash does, and waits for its end.
func (r *workerRig) killWorker() {
	r.t.Helper()
	check(r.t, r.worker.Process.Kill())
	_ = r.worker.Wait()
}

// pause pauses a sandbox. A guest has a quarter of a second to stop, which is little on a
// busy machine, and who is refused is told to come again.
func (r *workerRig) pause(ctx context.Context, c *client.Client, id string) {
	r.t.Helper()
	check(r.t, whenReady(func() error { _, err := c.Pause(ctx, id); return err }))
}

// whenReady makes a call again for a minute, as long as it is refused with a word that
// this may help.
func whenReady(call func() error) error {
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := call()
		again := errors.Is(err, sandbox.ErrNotReady) || errors.Is(err, sandbox.ErrNotHibernated) && strings.Contains(err.Error(), "try again")
		if !again || time.Now().After(end) {
			return err
		}
	}
}

// stopWorker ends the worker as an upgrade does, which leaves its sandboxes running.
func (r *workerRig) stopWorker() {
	r.t.Helper()
	check(r.t, r.worker.Process.Signal(syscall.SIGTERM))
	kill := time.AfterFunc(time.Minute, func() { _ = r.worker.Process.Kill() }) // as systemd does
	if err := r.worker.Wait(); err != nil {
		r.t.Errorf("the worker's end: %v\n%s", err, r.logTail())
	}
	kill.Stop()
}

// run runs a command in a sandbox and returns its exit code and output.
func run(ctx context.Context, c *client.Client, id string, e sandbox.ExecSpec) (int, string, error) {
	if e.ID == "" {
		e.ID = strings.ToLower(rand.Text())
	}
	a, err := c.Exec(ctx, id, sandboxes.ExecRequest{ExecSpec: e})
	if err != nil {
		return 0, "", err
	}
	if a.ExitCode == nil {
		return 0, "", fmt.Errorf("exec %s has no exit code: %s %s", e.ID, a.Reason, a.Message)
	}
	return *a.ExitCode, string(a.Out) + string(a.Err), nil
}

// await waits until something is so, and fails when ctx ends before.
func (r *workerRig) await(ctx context.Context, what string, ok func() bool) {
	r.t.Helper()
	for !ok() {
		if ctx.Err() != nil {
			r.t.Fatalf("%s: does not come about\n%s", what, r.logTail())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// nothingLeftOf ends the worker, which has no sandbox, and waits until no process,
// mount, network namespace, control group or folder of one is left.
func (r *workerRig) nothingLeftOf() {
	r.t.Helper()
	r.endWorker()
	var left []string
	for n := range 1200 {
		if left = r.sandboxesLeft(); len(left) == 0 {
			return
		}
		time.Sleep(50 * time.Millisecond)
		if n == 100 && onlyPrepared(left) {
			// Namespaces that no sandbox had are the next worker's to remove.
			r.t.Logf("a worker left what it had prepared: %s\nit said: %s", strings.Join(left, "; "), r.logTail())
			r.startWorker()
			r.endWorker()
		}
	}
	r.t.Errorf("left: %s\nthe worker said: %s", strings.Join(left, "; "), r.logTail())
}

// onlyPrepared reports whether nothing but network namespaces is left.
func onlyPrepared(left []string) bool {
	return !slices.ContainsFunc(left, func(l string) bool { return !strings.Contains(l, "/net/ns/") })
}

func (r *workerRig) sandboxesLeft() []string {
	var left []string
	folders, _ := filepath.Glob(r.path("w", "node", "*"))
	for _, f := range folders {
		if st, err := os.Stat(f); err == nil && st.IsDir() {
			left = append(left, "folder "+f)
		}
	}
	for _, p := range mountsBelow(r.path("w")) {
		left = append(left, "mount "+p)
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		raw, err := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, []byte(r.path("w", "node")+"/")) {
			left = append(left, "process "+strings.ReplaceAll(string(raw), "\x00", " "))
		}
	}
	links, _ := filepath.Glob(r.path("w", "net", "ns", "*"))
	for _, l := range links {
		left = append(left, "network namespace "+l)
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/" + r.group() + "/*")
	for _, g := range groups {
		if st, err := os.Stat(g); err == nil && st.IsDir() {
			left = append(left, "control group "+g)
		}
	}
	return left
}

// group is the worker's control group, of this test alone.
func (r *workerRig) group() string { return "quarry-test-" + filepath.Base(r.base) }

// logTail is the end of what the worker has logged.
func (r *workerRig) logTail() string {
	raw, _ := os.ReadFile(r.path("worker.log"))
	return string(raw[max(0, len(raw)-8000):])
}

// endWorker ends sandboxes and worker, so that nothing of them is left.
func (r *workerRig) endWorker() {
	if r.worker == nil || r.worker.ProcessState != nil {
		return
	}
	out, _ := exec.Command(r.path("bin", "quarry"), "ps", "--worker-dir", r.path("w")).Output()
	for line := range strings.Lines(string(out)) {
		if id, _, ok := strings.Cut(line, " "); ok && id != "SANDBOX" {
			_ = exec.Command(r.path("bin", "quarry"), "rm", "--worker-dir", r.path("w"), id).Run()
		}
	}
	_ = r.worker.Process.Signal(syscall.SIGTERM)
	_ = r.worker.Wait()
	// The parent of a worker's groups is its operator's, and here the test's.
	parents, _ := filepath.Glob("/sys/fs/cgroup/*/" + r.group())
	for _, p := range append(parents, filepath.Join("/sys/fs/cgroup", r.group())) {
		_ = syscall.Rmdir(p)
	}
}

func TestAnAgentsLoopInPython(t *testing.T) {
	python := need.Tool(t, "python3")
	if err := exec.Command(python, "-c", "import requests").Run(); err != nil {
		need.Missing(t, "python3-requests")
	}
	tests := t.TempDir()
	private := filepath.Join(tests, "stats")
	check(t, os.MkdirAll(private, 0o755))
	check(t, os.WriteFile(filepath.Join(private, "test_private.py"), []byte("from stats import mean\n\ndef test_one():\n    assert mean([4]) == 4\n\ndef test_two():\n    assert mean([1, 2]) == 1.5\n"), 0o644))
	r := newWorkerRig(t, "cold", "--share", "tests="+tests)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, filepath.Join("testdata", "agent.py"), r.url, r.token, "t/task")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "reward 1\n") {
		t.Fatalf("%v: %s\nworker: %s", errors.Join(err, ctx.Err()), out, r.logTail())
	}
	t.Logf("%s", out)
}
