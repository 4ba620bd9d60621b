// Package sentrytest makes what tests of sandboxes need: a small root file system
// and a sandbox that runs in it, by the real runsc.
package sentrytest

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"quarry/internal/need"
)

// Root makes a root file system with busybox and the usual folders. It needs root
// rights and Debian's busybox-static.
func Root(t testing.TB) string {
	t.Helper()
	need.Root(t)
	busybox := need.Tool(t, "busybox")
	root := filepath.Join(need.ShortDir(t), "root")
	for _, dir := range []string{"bin", "dev", "etc", "proc", "root", "sys", "tmp", "var"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(busybox)
	if err == nil {
		err = os.WriteFile(filepath.Join(root, "bin/busybox"), b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(list)) {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	return root
}

// library finds what a program is linked with.
var library = regexp.MustCompile(`/\S+`)

// AddBash puts the machine's bash into a root file system.
func AddBash(t testing.TB, root string) {
	t.Helper()
	bash := need.Tool(t, "bash")
	libs, err := exec.Command(need.Tool(t, "ldd"), bash).Output()
	if err != nil {
		t.Fatal(err)
	}
	to := map[string]string{bash: "/bin/bash"}
	for _, l := range library.FindAllString(string(libs), -1) {
		to[l] = l
	}
	for from, at := range to {
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(root, at)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(root, at), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Bundle writes config.json into dir: a root process that runs argv in root.
func Bundle(t testing.TB, dir, root string, argv ...string) {
	t.Helper()
	caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"}
	spec := specs.Spec{
		Version:  specs.Version,
		Hostname: "sandbox",
		Process: &specs.Process{
			Args: argv, Env: []string{"PATH=/bin", "HOME=/root"}, Cwd: "/",
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Permitted: caps, Effective: caps},
		},
		Root: &specs.Root{Path: root},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts"},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs"},
		},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{
			{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
			{Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
		}},
	}
	b, err := json.Marshal(spec)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Runsc returns the program and the global flags of a sandbox in dir that needs
// neither cgroups nor a network.
func Runsc(t testing.TB, dir string) []string {
	t.Helper()
	upper := filepath.Join(dir, "upper")
	if err := os.MkdirAll(upper, 0o700); err != nil {
		t.Fatal(err)
	}
	return []string{
		need.Tool(t, "runsc"), "--platform", "systrap", "--network", "none", "--ignore-cgroups", "--host-uds", "none", "--allow-suid",
		"--overlay2", "root:dir=" + upper,
	}
}

// Sandbox is one that runs.
type Sandbox struct {
	Socket string // the control socket
	ID     string // of the container
	PID    int    // of the Sentry
	dir    string // of all that it has
}

// Start starts a sandbox whose first process sleeps, and ends it with the test.
func Start(t testing.TB) Sandbox {
	t.Helper()
	return StartIn(t, Root(t))
}

// StartIn is Start in a root file system that is there.
func StartIn(t testing.TB, root string) Sandbox {
	t.Helper()
	dir := need.ShortDir(t)
	Bundle(t, dir, root, "sleep", "1000000")
	t.Cleanup(func() { End(t, dir) })
	return begin(t, dir, "runsc", "run")
}

// Restore ends the sandbox and begins it anew from a checkpoint of it.
func (s Sandbox) Restore(t testing.TB, image string) Sandbox {
	t.Helper()
	End(t, s.dir)
	return begin(t, s.dir, "restored", RestoreArgs(image)...)
}

// RestoreArgs are those of runsc that restore from a checkpoint: past the page cache where
// the file system can, as runsc fails where it cannot.
func RestoreArgs(image string) []string {
	args := []string{"restore", "--image-path", image}
	if f, err := os.OpenFile(filepath.Join(image, "pages.img"), os.O_RDONLY|unix.O_DIRECT, 0); err == nil {
		f.Close()
		args = append(args, "--direct")
	}
	return args
}

// begin has runsc start a sandbox of the bundle in dir, with its state in a folder there.
func begin(t testing.TB, dir, folder string, how ...string) Sandbox {
	t.Helper()
	state, pidFile := filepath.Join(dir, folder), filepath.Join(dir, folder+".pid")
	log := filepath.Join(dir, folder+".log")
	argv := slices.Concat(Runsc(t, dir), []string{"--root", state, "--log", log}, how, []string{"--detach", "--pid-file", pidFile, "--bundle", dir, "test"})
	// Its streams stay with the Sentry: a pipe of the test would not end with runsc.
	cmd := exec.Command(argv[0], argv[1:]...)
	if err := cmd.Run(); err != nil {
		said, _ := os.ReadFile(log)
		t.Fatalf("runsc: %v: %s", err, said)
	}
	raw, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		t.Fatal(err)
	}
	return Sandbox{Socket: filepath.Join(state, "runsc-test.sock"), ID: "test", PID: pid, dir: dir}
}

// End kills every process that has the folder in its arguments, which is the
// test's own, and waits for them.
func End(t testing.TB, dir string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		pids := Processes(t, dir)
		if len(pids) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("processes %v of %s do not end", pids, dir)
			return
		}
		for _, pid := range pids {
			unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// Processes lists those of this machine, zombies not among them, with dir in
// their arguments.
func Processes(t testing.TB, dir string) (pids []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if args, err := os.ReadFile("/proc/" + e.Name() + "/cmdline"); err == nil && strings.Contains(string(args), dir+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}
