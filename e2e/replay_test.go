package e2e_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/internal/storm"
)

// machine is a data folder and a worker folder with programs of their own, which
// a test may replace.
type machine struct {
	t    *testing.T
	base string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	need.Root(t)
	need.Tool(t, "umoci")
	m := &machine{t: t, base: need.ShortDir(t)}
	t.Cleanup(m.end)
	for _, prog := range []string{"quarry", "quarry-shim", "quarry-guest"} {
		m.install(prog)
	}
	return m
}

func (m *machine) path(elem ...string) string {
	return filepath.Join(append([]string{m.base}, elem...)...)
}

// install puts a program in its place by rename, as an update does.
func (m *machine) install(prog string) {
	m.t.Helper()
	raw, err := os.ReadFile(filepath.Join(os.Getenv("QUARRY_BIN"), prog))
	if err != nil {
		m.t.Fatal(err)
	}
	if err := os.MkdirAll(m.path("bin"), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(m.path("bin", prog+".new"), raw, 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Rename(m.path("bin", prog+".new"), m.path("bin", prog)); err != nil {
		m.t.Fatal(err)
	}
}

// quarry runs a command.
func (m *machine) quarry(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute) // it hangs
	defer cancel()
	cmd := exec.CommandContext(ctx, m.path("bin", "quarry"), args...)
	cmd.Env = append(os.Environ(), "QUARRY_DATA="+m.path("d"), "QUARRY_WORKER="+m.path("w"))
	cmd.Dir = m.base
	out, err := cmd.CombinedOutput()
	if err != nil {
		return errors.Join(err, errors.New(string(out)))
	}
	return nil
}

func (m *machine) mustQuarry(args ...string) {
	m.t.Helper()
	if err := m.quarry(args...); err != nil {
		m.t.Fatalf("quarry %s: %v", strings.Join(args, " "), err)
	}
}

// publish converts an image of 40 files of new content under a name, and returns
// the folder that it was made of.
func (m *machine) publish(name string) string {
	m.t.Helper()
	root, err := os.MkdirTemp(m.base, "root")
	if err != nil {
		m.t.Fatal(err)
	}
	for i := range 40 {
		p := make([]byte, 40_000+i*11_111)
		rand.Read(p)
		if err := os.WriteFile(filepath.Join(root, "f"+strconv.Itoa(i)), p, 0o644); err != nil {
			m.t.Fatal(err)
		}
	}
	layout := root + ".oci"
	for _, step := range [][]string{
		{"tar", "-C", root, "-cf", root + ".tar", "."},
		{"umoci", "init", "--layout", layout},
		{"umoci", "new", "--image", layout + ":latest"},
		{"umoci", "raw", "add-layer", "--image", layout + ":latest", root + ".tar"},
	} {
		if out, err := exec.Command(step[0], step[1:]...).CombinedOutput(); err != nil {
			m.t.Fatalf("%s: %v: %s", strings.Join(step, " "), err, out)
		}
	}
	m.mustQuarry("convert", "oci:"+layout, "--name", name)
	return root
}

// mount mounts a name and returns where.
func (m *machine) mount(name string) string {
	m.t.Helper()
	at, err := os.MkdirTemp(m.base, "m")
	if err != nil {
		m.t.Fatal(err)
	}
	m.mustQuarry("mount", name, at)
	return at
}

// readers starts processes that read and compare a mount.
func (m *machine) readers(n int, want, at string) *storm.Readers {
	m.t.Helper()
	manifest := at + ".manifest"
	if err := storm.Manifest(manifest, want, at); err != nil {
		m.t.Fatal(err)
	}
	r, err := storm.Start(m.t.Context(), n, manifest)
	if err != nil {
		m.t.Fatal(err)
	}
	return r
}

// wantClean ends readers that must have seen nothing of what happened.
func (m *machine) wantClean(r *storm.Readers) {
	m.t.Helper()
	v, err := r.End()
	if err != nil {
		m.t.Error(err)
	}
	m.t.Logf("%d reads of %d files; one in 100 took more than %v, the longest %v", v.Reads, v.Files, v.Longest(100), v.Longest(v.Reads+1))
	if len(v.Failed) > 0 || v.Files == 0 {
		m.t.Errorf("%d files compared; failed: %q", v.Files, v.Failed)
	}
}

// process finds a background process of the worker folder: 0 when there is none.
func (m *machine) process(name string) int {
	want := []byte("quarry\x00" + name + "\x00--worker-dir\x00" + m.path("w") + "\x00")
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		if raw, err := os.ReadFile(path); err == nil && bytes.Contains(raw, want) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			return pid
		}
	}
	return 0
}

// newReader waits for a reader other than the given one that answers.
func (m *machine) newReader(other int) (pid int) {
	m.t.Helper()
	m.waitFor("a new reader", func() bool {
		pid = m.process("reader")
		return pid > 0 && pid != other && m.readerAnswers()
	})
	return pid
}

func (m *machine) readerAnswers() bool {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", m.path("w", "reader.http"))
	}
	c := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: 5 * time.Second}
	resp, err := c.Get("http://reader/ping")
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusNoContent
}

// kill signals a background process, if there is one.
func (m *machine) kill(name string, sig syscall.Signal) (pid int) {
	if pid = m.process(name); pid > 0 {
		syscall.Kill(pid, sig)
	}
	return pid
}

// killAll kills every process of a kind and returns the first one's number. There
// may be a second for a moment, which finds the first and ends.
func (m *machine) killAll(name string) (first int) {
	m.t.Helper()
	m.waitFor("the end of each "+name, func() bool {
		pid := m.kill(name, syscall.SIGKILL)
		if first == 0 {
			first = pid
		}
		return pid == 0
	})
	return first
}

func (m *machine) waitFor(what string, cond func() bool) {
	m.t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			m.t.Fatalf("waited a minute for %s", what)
		}
	}
}

// end unmounts what is left and ends the background processes.
func (m *machine) end() {
	for _, at := range mountsBelow(m.base) {
		if filepath.Dir(at) == m.base {
			m.quarry("umount", at)
		}
	}
	if m.t.Failed() {
		for _, log := range []string{"keeper.log", "reader.log"} {
			raw, _ := os.ReadFile(m.path("w", log))
			m.t.Logf("%s:\n%s", log, raw[max(0, len(raw)-4096):])
		}
	}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			// The keeper first: it would start another reader.
			if m.kill("keeper", sig) == 0 && m.kill("reader", sig) == 0 {
				break
			}
		}
	}
	cleanUp(m.base)
}

// TestReplayAcrossKilledReaders kills the reader under reading processes, up to 200 ms
// after it has come up, again and again, while the tag moves to another image.
func TestReplayAcrossKilledReaders(t *testing.T) {
	m := newMachine(t)
	old := m.publish("t/x")
	at := m.mount("t/x")
	readers := m.readers(6, old, at)
	const kills = 50
	last := 0
	for n := range kills {
		last = m.newReader(last)
		if n == kills/2 {
			m.publish("t/x")
		}
		time.Sleep(time.Duration(n%5) * 50 * time.Millisecond)
		syscall.Kill(last, syscall.SIGKILL)
	}
	m.newReader(last)
	m.wantClean(readers)
}

// TestReplayAcrossANewProgram replaces the reader's program, and each reader by a
// SIGTERM.
func TestReplayAcrossANewProgram(t *testing.T) {
	m := newMachine(t)
	want := m.publish("t/x")
	at := m.mount("t/x")
	readers := m.readers(4, want, at)
	for range 5 {
		m.install("quarry")
		installed, err := os.Stat(m.path("bin", "quarry"))
		if err != nil {
			t.Fatal(err)
		}
		old := m.kill("reader", syscall.SIGTERM)
		m.waitFor("a reader of the new program", func() bool {
			pid := m.process("reader")
			exe, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
			return pid != old && err == nil && os.SameFile(exe, installed) && m.readerAnswers()
		})
	}
	m.wantClean(readers)
}

// TestKeeperKilled shows that nothing needs the keeper to live, and that the next
// command starts another, which takes care of what it finds.
func TestKeeperKilled(t *testing.T) {
	m := newMachine(t)
	want := m.publish("t/x")
	at := m.mount("t/x")
	readers := m.readers(4, want, at)
	first := m.killAll("keeper")
	lost := m.killAll("reader") // reads wait from now on
	m.mount("t/x")
	m.waitFor("a keeper and a reader", func() bool { return m.process("keeper") > 0 && m.process("reader") > 0 })
	if first == 0 || lost == 0 {
		t.Errorf("killed keeper %d and reader %d", first, lost)
	}
	// The new keeper did not start this one, and gives it a successor.
	adopted := m.kill("reader", syscall.SIGKILL)
	m.newReader(adopted)
	m.wantClean(readers)
}

// TestReadsWaitWithoutAKeeper: while nobody restarts the reader, reads wait; they
// do not fail.
func TestReadsWaitWithoutAKeeper(t *testing.T) {
	m := newMachine(t)
	want := m.publish("t/x")
	at := m.mount("t/x")
	m.killAll("keeper")
	m.killAll("reader")
	got := make(chan error, 1)
	go func() { // ends with the read
		raw, err := os.ReadFile(filepath.Join(at, "f7"))
		good, wantErr := os.ReadFile(filepath.Join(want, "f7"))
		if err == nil && !bytes.Equal(raw, good) {
			err = errors.New("wrong bytes")
		}
		got <- errors.Join(err, wantErr)
	}()
	select {
	case err := <-got:
		t.Fatalf("a read without a reader ended with %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	m.mount("t/x")
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// TestKilledShimHarmsNoOtherImage also waits for the keeper to clean up behind it.
func TestKilledShimHarmsNoOtherImage(t *testing.T) {
	m := newMachine(t)
	m.publish("t/a")
	wantB := m.publish("t/b")
	a := m.mount("t/a")
	states, err := filepath.Glob(m.path("w", "mounts", "*", "shim.json"))
	if err != nil || len(states) != 1 {
		t.Fatalf("shims: %q, %v", states, err)
	}
	readers := m.readers(4, wantB, m.mount("t/b"))
	lock, err := os.ReadFile(filepath.Join(filepath.Dir(states[0]), "lock"))
	pid, _, _ := strings.Cut(string(lock), " ")
	shim, numErr := strconv.Atoi(pid)
	if err = errors.Join(err, numErr); err != nil {
		t.Fatal(err)
	}
	syscall.Kill(shim, syscall.SIGKILL)
	m.waitFor("the keeper to clean up", func() bool { _, err := os.Stat(states[0]); return errors.Is(err, os.ErrNotExist) })
	if _, err := os.ReadFile(filepath.Join(a, "f0")); !errors.Is(err, syscall.EIO) {
		t.Errorf("read of the mount without a shim: got %v, want EIO", err)
	}
	m.mustQuarry("umount", a)
	m.wantClean(readers)
}

// TestKeeperAndReaderEnd when nothing is mounted any more.
func TestKeeperAndReaderEnd(t *testing.T) {
	m := newMachine(t)
	m.publish("t/x")
	at := m.mount("t/x")
	if m.process("keeper") == 0 || m.process("reader") == 0 {
		t.Fatal("no keeper or no reader of a mounted image")
	}
	m.mustQuarry("umount", at)
	m.waitFor("the reader's end", func() bool { return m.process("reader") == 0 })
	m.waitFor("the keeper's end", func() bool { return m.process("keeper") == 0 })
}
