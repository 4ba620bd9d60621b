package e2e_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/api/sandboxes"
	"quarry/e2e/lab"
	"quarry/worker/sandbox"
)

// tarWith is a tar of links and files, in the order that they are given.
func tarWith(t *testing.T, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		h.Mode = 0o644
		check(t, w.WriteHeader(&h))
	}
	check(t, w.Close())
	return b.Bytes()
}

// TestATarStaysBelowItsFolder unpacks tars whose links lead out, in a guest of runsc, which
// opens a folder by a link where Linux does not.
func TestATarStaysBelowItsFolder(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64}, "")
	check(t, err)
	must := func(shell, want string) {
		t.Helper()
		code, out, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Shell: shell})
		if err != nil || code != 0 || out != want {
			t.Errorf("%s: %d %q %v, want %q", shell, code, out, err, want)
		}
	}
	must("mkdir -p /d /victim && echo mine >/victim/file && ln -s /victim /d/planted", "")
	link := func(name, to string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
	}
	for name, raw := range map[string][]byte{
		"a file by a link of the tar":       tarWith(t, link("s", "/victim"), tar.Header{Typeflag: tar.TypeReg, Name: "s/new"}),
		"by one that goes up":               tarWith(t, link("u", "../victim"), tar.Header{Typeflag: tar.TypeReg, Name: "u/new"}),
		"by one that the guest has planted": tarWith(t, tar.Header{Typeflag: tar.TypeReg, Name: "planted/new"}),
		"a hard link by a link":             tarWith(t, link("l", "/"), tar.Header{Typeflag: tar.TypeLink, Name: "h", Linkname: "l/victim/file"}),
	} {
		err := c.TarUp(t.Context(), sb.ID, "/d", bytes.NewReader(raw))
		t.Logf("%s: %v", name, err)
	}
	must("ls /victim; stat -c %h /victim/file", "file\n1\n")
	// Removing a folder removes the link in it, and nothing of what it leads to.
	check(t, c.RemoveFile(t.Context(), sb.ID, "/d"))
	must("cat /victim/file; ls /d 2>/dev/null | wc -l", "mine\n0\n")
	_, err = c.Delete(t.Context(), sb.ID)
	check(t, err)
	r.nothingLeftOf()
}

// TestReaderAndKeeperDieUnderSandboxes kills both: the worker brings them back, and reads
// wait so long and no longer.
func TestReaderAndKeeperDieUnderSandboxes(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64}, "")
	check(t, err)
	for _, role := range []string{"keeper", "reader"} {
		pids, err := lab.Find(role, r.path("w"))
		check(t, err)
		if len(pids) == 0 {
			t.Fatalf("no %s runs", role)
		}
		for _, pid := range pids {
			check(t, syscall.Kill(pid, syscall.SIGKILL))
		}
	}
	code, out, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Shell: "cat /usr/bin/perl /usr/bin/python3* >/dev/null 2>&1; echo read"})
	if err != nil || code != 0 || out != "read\n" {
		t.Errorf("%d %q %v", code, out, err)
	}
	end, err := c.Delete(t.Context(), sb.ID)
	if err != nil || end.Evidence.ImageIOErrors != 0 {
		t.Errorf("%+v, %v", end, err)
	}
	r.nothingLeftOf()
}

// TestAWorkerEndsBesideCommands ends a worker while commands run that never end, and
// the next one has them.
func TestAWorkerEndsBesideCommands(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64}, "")
	check(t, err)
	_, err = c.Start(t.Context(), sb.ID, sandbox.ExecSpec{ID: "endless", Argv: []string{"sleep", "100000"}})
	check(t, err)
	check(t, r.worker.Process.Signal(syscall.SIGTERM))
	ended := make(chan error, 1)
	go func() { ended <- r.worker.Wait() }() // ends with the worker
	select {
	case err := <-ended:
		check(t, err)
	case <-time.After(2 * time.Minute):
		t.Fatal("the worker waits for the command")
	}
	r.startWorker()
	c = r.client()
	st, err := c.ExecState(t.Context(), sb.ID, "endless", 0)
	if err != nil || st.State != sandbox.ExecRunning {
		t.Errorf("the command: %+v, %v", st, err)
	}
	_, err = c.Delete(t.Context(), sb.ID)
	check(t, err)
	r.nothingLeftOf()
}

// TestAtItsProcessLimitASandboxIsToldSo fills a sandbox with processes: what cannot run
// then is the sandbox's own doing, and not the node's.
func TestAtItsProcessLimitASandboxIsToldSo(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 256, DiskMB: 64, PIDs: 16}, "")
	check(t, err)
	_, err = c.Start(t.Context(), sb.ID, sandbox.ExecSpec{ID: "fill", Argv: []string{"perl", "-e", "while (1) { my $p = fork; if (defined $p && !$p) { sleep 100000 } select(undef, undef, undef, 0.01) }"}})
	check(t, err)
	var st sandbox.ExecState
	end := time.Now().Add(time.Minute)
	for n := 0; st.Reason != sandbox.ExecReasonProcess; n++ {
		if time.Now().After(end) {
			t.Fatalf("never at its limit: %+v", st)
		}
		a, err := c.Exec(t.Context(), sb.ID, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: fmt.Sprintf("e%d", n), Argv: []string{"/bin/true"}}})
		check(t, err)
		st = a.ExecState
		time.Sleep(10 * time.Millisecond)
	}
	if _, err := c.StatFile(t.Context(), sb.ID, "/etc"); !errors.Is(err, sandbox.ErrNoProcess) {
		t.Errorf("a file call: %v", err)
	}
	_, err = c.Delete(t.Context(), sb.ID)
	check(t, err)
	r.nothingLeftOf()
}

// TestTwoSharesAreNotAtOneTarget gives a second one where the first is.
func TestTwoSharesAreNotAtOneTarget(t *testing.T) {
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "a"), []byte("given"), 0o644))
	r := newWorkerRig(t, "debian", "--share", "s="+dir)
	c := r.client()
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64}, "")
	check(t, err)
	check(t, c.Give(t.Context(), sb.ID, sandbox.Share{Name: "s/a", Target: "/given"}))
	if err := c.Give(t.Context(), sb.ID, sandbox.Share{Name: "s/a", Target: "/given"}); !errors.Is(err, sandbox.ErrFileExists) {
		t.Errorf("a second share at the target: %v", err)
	}
	// What is given another worker knows, too: the sandbox says it.
	r.killWorker()
	r.startWorker("--share", "s="+dir)
	c = r.client()
	if err := c.Give(t.Context(), sb.ID, sandbox.Share{Name: "s/a", Target: "/given"}); !errors.Is(err, sandbox.ErrFileExists) {
		t.Errorf("a second share at the target, of another worker: %v", err)
	}
	check(t, c.Take(t.Context(), sb.ID, "/given"))
	if _, _, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Shell: "ln -s /tmp /link"}); err != nil {
		t.Fatal(err)
	}
	if err := c.Give(t.Context(), sb.ID, sandbox.Share{Name: "s/a", Target: "/link/given"}); !errors.Is(err, sandbox.ErrFilePath) {
		t.Errorf("through a link of the guest: %v", err)
	}
	check(t, c.Give(t.Context(), sb.ID, sandbox.Share{Name: "s/a", Target: "/given"}))
	if code, out, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Argv: []string{"cat", "/given"}}); err != nil || code != 0 || out != "given" {
		t.Errorf("%d %q %v", code, out, err)
	}
	_, err = c.Delete(t.Context(), sb.ID)
	check(t, err)
}

// TestWhatIsKeptOfASandboxIsBounded has commands write more than their sandbox may keep
// on the worker's disk, whatever each of them may.
func TestWhatIsKeptOfASandboxIsBounded(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	ctx := t.Context()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64, OutputMB: 1}, "")
	check(t, err)
	const each, all = 600 << 10, 10 << 20
	say := func(id string, n int) sandbox.ExecState {
		a, err := c.Exec(ctx, sb.ID, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: id, Shell: fmt.Sprintf("head -c %d /dev/zero", n), MaxOutput: 1 << 30}})
		check(t, err)
		return a.ExecState
	}
	for _, id := range []string{"a", "b", "c"} {
		if st := say(id, each); st.Stdout.Kept != each || st.Stdout.Dropped != 0 {
			t.Errorf("%s: %+v", id, st.Stdout)
		}
	}
	if st, err := c.ExecState(ctx, sb.ID, "a", 0); err != nil || st.Stdout.Kept != 0 || st.Stdout.Dropped != each || st.Stdout.DroppedBy != sandbox.DroppedOld || *st.ExitCode != 0 {
		t.Errorf("the first, forgotten: %+v, %v", st, err)
	}
	st := say("large", all)
	if o := st.Stdout; o.Kept == 0 || o.Kept > 1<<20 || o.Kept+o.Dropped != all || o.DroppedBy != sandbox.DroppedSandbox {
		t.Errorf("a large one: %+v", o)
	}
	var kept int64
	check(t, filepath.WalkDir(r.path("w", "node", sb.ID, "exec"), func(path string, e fs.DirEntry, err error) error {
		if err == nil {
			var info fs.FileInfo
			if info, err = e.Info(); err == nil {
				kept += info.Size()
			}
		}
		return err
	}))
	if kept > 1<<20 {
		t.Errorf("%d bytes are on the worker's disk", kept)
	}
	cmd := exec.Command(r.path("bin", "quarry"), "logs", "--worker-dir", r.path("w"), sb.ID, "large")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if out, err := cmd.Output(); err != nil || int64(len(out)) != st.Stdout.Kept || !strings.Contains(stderr.String(), "--output-mb") {
		t.Errorf("logs: %d bytes, %v, %q", len(out), err, stderr.String())
	}
	_, err = c.Delete(ctx, sb.ID)
	check(t, err)
	r.nothingLeftOf()
}

// TestLimitsOfACommandAreItsOwn has a command lower every limit that it has: the next
// ones, and what is done to files, have those of the sandbox.
func TestLimitsOfACommandAreItsOwn(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64, PIDs: 50}, "")
	check(t, err)
	all := func() string {
		t.Helper()
		code, out, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Argv: []string{"cat", "/proc/self/limits"}})
		if err != nil || code != 0 {
			t.Fatalf("limits: %d %q %v", code, out, err)
		}
		shell, more, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Shell: "for l in c d e f l m n q r s t u v x; do echo $l $(ulimit -S -$l 2>&1) $(ulimit -H -$l 2>&1); done", User: "nobody"})
		if err != nil || shell != 0 {
			t.Fatalf("limits: %d %q %v", shell, more, err)
		}
		return out + more
	}
	before := all()
	for _, command := range []string{"ulimit -c 0; ulimit -d 0; ulimit -f 100; ulimit -l 0; ulimit -n 10; ulimit -s 100; ulimit -t 5; ulimit -u 1", "ulimit -v 1"} {
		if code, out, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Argv: []string{"bash", "-c", command}}); err != nil || code != 0 {
			t.Fatalf("%s: %d %q %v", command, code, out, err)
		}
		if now := all(); now != before {
			t.Errorf("after %s: %s, want %s", command, now, before)
		}
	}
	_, err = c.WriteFile(t.Context(), sb.ID, "/tmp/file", sandbox.WriteOptions{}, bytes.NewReader(make([]byte, 1<<20)))
	check(t, err)
	_, err = c.Delete(t.Context(), sb.ID)
	check(t, err)
	r.nothingLeftOf()
}
