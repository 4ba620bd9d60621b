package memory_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/internal/swap"
	"quarry/worker/cgroup"
	"quarry/worker/memory"
	"quarry/worker/sentry"
	"quarry/worker/sentry/sentrytest"
)

// swapOn switches swap on until the test ends: of a file, or on zram. One test of the
// machine has it at a time. It is off again only when what is in it found room, so the
// sandboxes of the test are made after it and end before it.
func swapOn(t testing.TB, kind string, size int64) {
	t.Helper()
	need.Root(t)
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "quarry-test-swap.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if raw, err := os.ReadFile("/proc/swaps"); err != nil || strings.Count(string(raw), "\n") > 1 {
		need.Missing(t, "a machine without swap of its own, so that a test may choose where it is")
	}
	path := "/dev/zram0"
	if kind == "zram" {
		makeZram(t, size)
	} else {
		path = filepath.Join(need.ShortDir(t), "swap")
		if err := swap.MakeFile(path, size); err != nil {
			t.Fatal(err)
		}
	}
	if err := swap.On(path); err != nil {
		need.Missing(t, "swap: "+err.Error())
	}
	t.Cleanup(func() {
		if err := swap.Off(path); err != nil {
			t.Error(err)
		}
	})
}

// anySwap is a swap file where the temporary folder is on a disk, else zram.
func anySwap(t testing.TB, size int64) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(os.TempDir(), &st); err != nil {
		t.Fatal(err)
	}
	kind := "file"
	if st.Type == unix.TMPFS_MAGIC {
		kind = "zram"
	}
	swapOn(t, kind, size)
}

// makeZram makes a compressed disk in memory.
func makeZram(t testing.TB, size int64) {
	t.Helper()
	const sys = "/sys/block/zram0/"
	set := func(name, value string) {
		if err := os.WriteFile(sys+name, []byte(value), 0); err != nil {
			need.Missing(t, "a zram that nobody uses: "+err.Error())
		}
	}
	if raw, err := os.ReadFile(sys + "initstate"); err != nil || strings.TrimSpace(string(raw)) != "0" {
		need.Missing(t, "a zram that nobody uses")
	}
	os.WriteFile(sys+"comp_algorithm", []byte("lz4"), 0) // else the kernel's default
	set("disksize", strconv.FormatInt(size, 10))
	t.Cleanup(func() { os.WriteFile(sys+"reset", []byte("1"), 0) })
	f, err := os.OpenFile("/dev/zram0", os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(swap.Header(size), 0)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// guest is a sandbox in a group of its own, with a process that holds memory.
type guest struct {
	testing.TB
	c     *sentry.Client
	dir   string // of its group
	group *memory.Group
	file  *memory.File
	in    *os.File
	out   *bufio.Reader
}

func startGuest(t testing.TB, mib int) *guest {
	t.Helper()
	tree, err := cgroup.Open(cgroup.Config{Parent: fmt.Sprintf("/quarrytest/memory-%d-%d", os.Getpid(), time.Now().UnixNano())})
	if err != nil {
		t.Fatal(err)
	}
	g, err := tree.Make("guest", cgroup.Limits{Memory: int64(mib+512) << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := errors.Join(g.Kill(ctx), g.Remove(ctx), tree.Remove()); err != nil {
			t.Error(err)
		}
	})
	box := startIn(t, g.MemoryDir())
	group, err := memory.OpenGroup(memory.GroupConfig{Dir: g.MemoryDir(), Journal: filepath.Join(t.TempDir(), "reclaim")})
	if err != nil {
		t.Fatal(err)
	}
	s := &guest{TB: t, dir: g.MemoryDir(), c: sentry.New(box.Socket, box.ID), group: group}
	t.Cleanup(s.c.Close)
	s.hold(mib)
	given, err := s.c.MemoryFile(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer given.Close()
	if s.file, err = memory.OpenMemory(given); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.file.Close() })
	return s
}

// startIn starts a sandbox in a group, which the test joins for as long: all of the
// Sentry's memory is counted there.
func startIn(t testing.TB, dir string) sentrytest.Sandbox {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	home := filepath.Dir(filepath.Dir(filepath.Dir(dir))) // of version 2
	for line := range strings.Lines(string(raw)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && f[1] == "memory" || f[1] == "" && cgroup.IsV2(cgroup.Root) {
			home = filepath.Join(home, f[2])
		}
	}
	join := func(dir string) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Fatal(err)
		}
	}
	join(dir)
	defer join(home)
	return sentrytest.Start(t)
}

// hold starts the process.
func (s *guest) hold(mib int) {
	s.Helper()
	// A machine without Go, as a guest of e2e/vm, has it ready.
	path, err := exec.LookPath("quarry-test-hold")
	if err != nil {
		path = filepath.Join(s.TempDir(), "hold")
		build := exec.Command("go", "build", "-o", path, "./testdata/hold")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			s.Fatalf("%v: %s", err, out)
		}
	}
	program, err := os.Open(path)
	if err != nil {
		s.Fatal(err)
	}
	defer program.Close()
	stdin, in, err := os.Pipe()
	if err != nil {
		s.Fatal(err)
	}
	out, stdout, err := os.Pipe()
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { in.Close(); out.Close() })
	_, err = s.c.Execute(s.Context(), sentry.Exec{
		Argv: []string{"hold", strconv.Itoa(mib)}, Program: program,
		Files: map[int]*os.File{0: stdin, 1: stdout, 2: stdout},
	})
	stdin.Close()
	stdout.Close()
	if err != nil {
		s.Fatal(err)
	}
	s.in, s.out = in, bufio.NewReader(out)
	if got := s.line(); got != "ready" {
		s.Fatalf("hold: %q", got)
	}
}

func (s *guest) line() string {
	s.Helper()
	line, err := s.out.ReadString('\n')
	if err != nil {
		s.Fatal(err)
	}
	return strings.TrimSpace(line)
}

func (s *guest) ask(what string) string {
	s.Helper()
	if _, err := fmt.Fprintln(s.in, what); err != nil {
		s.Fatal(err)
	}
	return s.line()
}

// touch has the guest touch its memory and returns how long that took.
func (s *guest) touch(how string) time.Duration {
	s.Helper()
	us, err := strconv.Atoi(s.ask(how))
	if err != nil {
		s.Fatal(err)
	}
	return time.Duration(us) * time.Microsecond
}

func (s *guest) pause() {
	s.Helper()
	if err := s.c.Pause(s.Context()); err != nil {
		s.Fatal(err)
	}
}

// takeAll takes all that those who wait give: a busy disk takes it in parts.
func (s *guest) takeAll(w *memory.Waiting) {
	for more := int64(1 << 20); more >= 1<<20; {
		more = 0
		for _, x := range w.Reclaim(s.Context(), 1<<40) {
			more += x.Bytes()
		}
	}
}

func (s *guest) resume() {
	s.Helper()
	if err := s.c.Resume(s.Context()); err != nil {
		s.Fatal(err)
	}
}

func (s *guest) sandbox(id string) memory.Sandbox {
	return memory.Sandbox{ID: id, Group: s.group, Memory: s.file, Sentry: s.c}
}

func (s *guest) held() memory.Held {
	s.Helper()
	h, err := s.group.Held()
	if err != nil {
		s.Fatal(err)
	}
	return h
}

// processes lists those of the sandbox.
func (s *guest) processes() ([]int, error) {
	raw, err := os.ReadFile(filepath.Join(s.dir, "cgroup.procs"))
	var pids []int
	for _, word := range strings.Fields(string(raw)) {
		pid, err := strconv.Atoi(word)
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, err
}

// faults counts those of the sandbox's processes.
func (s *guest) faults() (n int64) {
	s.Helper()
	pids, err := s.processes()
	if err != nil {
		s.Fatal(err)
	}
	for _, pid := range pids {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has ended
		}
		f := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
		minor, err := strconv.ParseInt(f[7], 10, 64)
		if err != nil {
			s.Fatal(err)
		}
		n += minor
	}
	return n
}
