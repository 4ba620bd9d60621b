package main_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/internal/storm"
	"quarry/nbd"
	"quarry/nbd/attach"
)

// The test program is also the reader that tests kill: a process of its own
// that serves a file, and holds every read back while another file exists.
const (
	envSocket = "QUARRY_TEST_READER_SOCKET"
	envImage  = "QUARRY_TEST_READER_IMAGE"
	envStall  = "QUARRY_TEST_READER_STALL"
)

func TestMain(m *testing.M) {
	storm.Main()
	if os.Getenv(envSocket) != "" {
		if err := serveImage(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	for _, dir := range builds {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

func serveImage() error {
	f, err := os.Open(os.Getenv(envImage))
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", os.Getenv(envSocket))
	if err != nil {
		return err
	}
	dev := &fileDevice{f: f, size: info.Size(), stall: os.Getenv(envStall)}
	s := &nbd.Server{Exports: func(_ context.Context, name string) (nbd.Device, error) {
		if _, err := os.Stat(dev.stall + ".refuse"); err == nil || name != "image" {
			return nil, nbd.ErrUnknownExport
		}
		return dev, nil
	}}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	fmt.Println("listening")
	return s.Serve(ctx, l)
}

// fileDevice serves a file. While the file stall exists, reads wait, having
// made stall+".reached"; while stall+".fail" exists, they fail. While stall+".refuse"
// exists, it is not served at all.
type fileDevice struct {
	f     *os.File
	size  int64
	stall string
}

func (d *fileDevice) Size() int64 { return d.size }

func (d *fileDevice) ReadAt(ctx context.Context, p []byte, off int64) error {
	for {
		if _, err := os.Stat(d.stall); err != nil {
			break
		}
		os.WriteFile(d.stall+".reached", nil, 0o600)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	if _, err := os.Stat(d.stall + ".fail"); err == nil {
		return errors.New("told to fail")
	}
	_, err := d.f.ReadAt(p, off)
	return err
}

// TryReadAt implements nbd.ReadyDevice.
func (d *fileDevice) TryReadAt(p []byte, off int64) bool {
	for _, name := range []string{d.stall, d.stall + ".fail"} {
		if _, err := os.Stat(name); err == nil {
			return false
		}
	}
	_, err := d.f.ReadAt(p, off)
	return err == nil
}

// rig is one image, its reader and its shim.
type rig struct {
	t      *testing.T
	image  string
	tree   string // what it was made of
	want   map[string][]byte
	socket string
	stall  string
	dir    string                 // of the mount
	build  func() (string, error) // makes the shim's program
	reader *exec.Cmd
	shim   *exec.Cmd
	shims  []*exec.Cmd  // all that shimCommand made
	stderr bytes.Buffer // of the shim; read it after the shim has ended
}

// The shim as it is tested, and as it is shipped.
var (
	buildShim  = sync.OnceValues(func() (string, error) { return goBuild(buildFlags...) })
	buildPlain = sync.OnceValues(func() (string, error) { return goBuild() })
)

// builds are the folders that goBuild made; no test runs beside another.
var builds []string

func goBuild(flags ...string) (string, error) {
	dir, err := os.MkdirTemp("", "quarry-shim-test")
	if err != nil {
		return "", err
	}
	builds = append(builds, dir)
	path := filepath.Join(dir, "quarry-shim")
	args := append([]string{"build", "-o", path}, flags...)
	out, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
}

func newRig(t *testing.T) *rig {
	t.Helper()
	need.Root(t)
	r := &rig{t: t, want: map[string][]byte{}, build: buildShim}
	base := t.TempDir()
	r.image, r.socket = filepath.Join(base, "image"), filepath.Join(base, "s")
	r.stall, r.dir = filepath.Join(base, "stall"), filepath.Join(base, "m")
	if err := os.Mkdir(r.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	r.tree = filepath.Join(base, "tree")
	r.makeImage(r.tree)
	r.startReader(r.image)
	t.Cleanup(r.cleanup)
	return r
}

// makeImage makes an EROFS of 8 MiB in 100 files.
func (r *rig) makeImage(src string) {
	r.t.Helper()
	rnd := rand.NewChaCha8([32]byte{1})
	for i := range 100 {
		name := fmt.Sprintf("d%d/f%d", i%5, i)
		p := make([]byte, 50_000+711*i)
		rnd.Read(p)
		r.want[name] = p
		if err := os.MkdirAll(filepath.Dir(filepath.Join(src, name)), 0o755); err != nil {
			r.t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(src, name), p, 0o644); err != nil {
			r.t.Fatal(err)
		}
	}
	if out, err := exec.Command(need.Tool(r.t, "mkfs.erofs"), "--quiet", r.image, src).CombinedOutput(); err != nil {
		r.t.Fatalf("mkfs.erofs: %v\n%s", err, out)
	}
}

func (r *rig) startReader(image string) {
	r.t.Helper()
	os.Remove(r.socket)
	r.reader = exec.Command(os.Args[0])
	r.reader.Env = append(os.Environ(), envSocket+"="+r.socket, envImage+"="+image, envStall+"="+r.stall)
	r.reader.Stderr = os.Stderr
	expectLine(r.t, r.reader, "listening")
}

// killReader kills -9 and waits, so that the socket is dead.
func (r *rig) killReader() {
	r.reader.Process.Kill()
	r.reader.Wait()
}

func (r *rig) size() string {
	info, err := os.Stat(r.image)
	if err != nil {
		r.t.Fatal(err)
	}
	return strconv.FormatInt(info.Size(), 10)
}

func (r *rig) shimCommand(args ...string) *exec.Cmd {
	r.t.Helper()
	path, err := r.build()
	if err != nil {
		r.t.Fatal(err)
	}
	args = append([]string{"--socket", r.socket, "--export", "image", "--size", r.size(), "--dir", r.dir, "--read-ahead", "0"}, args...)
	return r.command(path, args...)
}

// shimDeadline is for one test: whatever happens, a shim ends and the test says
// what it waited for. The longest test replaces the reader 50 times, after 200 ms
// each, and a busy machine takes seconds to start one: six of them fit.
const shimDeadline = 6 * time.Minute

// patience is for whatever should happen at once: a busy machine may take long,
// and a test that fails may wait.
const patience = time.Minute

// command is a shim in a session of its own that ends with the test.
func (r *rig) command(path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(within(r.t, shimDeadline), path, args...)
	cmd.Env = append(os.Environ(), "GORACE=halt_on_error=1 atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = 10 * time.Second // a process that keeps the pipes must not keep the test
	r.shims = append(r.shims, cmd)
	return cmd
}

func (r *rig) startShim(args ...string) {
	r.t.Helper()
	r.shim = r.shimCommand(args...)
	r.shim.Stderr = &r.stderr
	expectLine(r.t, r.shim, "ready")
}

// expectLine starts cmd and waits for its first line of output.
func expectLine(t *testing.T, cmd *exec.Cmd, want string) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	guard := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	defer guard.Stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	if strings.TrimSpace(line) != want {
		cmd.Process.Kill()
		cmd.Wait()
		t.Fatalf("%s said %q (%v), want %q\n%v", cmd.Path, line, err, want, cmd.Stderr)
	}
}

func (r *rig) cleanup() {
	for _, shim := range r.shims {
		if shim.Process != nil && shim.ProcessState == nil {
			shim.Process.Kill() // also when it is stopped
			shim.Wait()
		}
	}
	r.killReader()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := attach.Sweep(ctx, r.dir); err != nil {
		r.t.Errorf("Sweep: %v", err)
	}
	if left := r.leftovers(); left != "" {
		r.t.Errorf("left at the end:\n%s", left)
	}
	if r.t.Failed() {
		r.t.Logf("shim's stderr:\n%s", r.stderr.Bytes())
	}
}

// leftovers lists mounts and loop devices that speak of the folder.
func (r *rig) leftovers() string {
	var left []string
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, r.dir+"/") {
			left = append(left, line)
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, loop := range loops {
		if file, err := os.ReadFile(loop); err == nil && strings.HasPrefix(string(file), r.dir+"/") {
			left = append(left, loop+" "+string(file))
		}
	}
	return strings.Join(left, "")
}

func (r *rig) path(name string) string { return filepath.Join(r.dir, "root", name) }

// compareTree reads every file of the mount.
func (r *rig) compareTree() {
	r.t.Helper()
	n := 0
	err := filepath.WalkDir(r.path(""), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		name, _ := filepath.Rel(r.path(""), path)
		if err := r.compareFile(name); err != nil {
			r.t.Error(err)
		}
		return nil
	})
	if err != nil || n != len(r.want) {
		r.t.Errorf("%d files, want %d; %v", n, len(r.want), err)
	}
}

// compareFile reads one file past the page cache's copy. Wrong bytes are an
// error that is not EIO.
func (r *rig) compareFile(name string) error {
	f, err := os.Open(r.path(name))
	if err != nil {
		return err
	}
	defer f.Close()
	syscall.Syscall6(syscall.SYS_FADVISE64, f.Fd(), 0, 0, 4 /* POSIX_FADV_DONTNEED */, 0, 0)
	p := make([]byte, len(r.want[name]))
	if n, err := f.ReadAt(p, 0); err != nil {
		if !bytes.Equal(p[:n], r.want[name][:n]) {
			return fmt.Errorf("%s: wrong bytes before the error %v", name, err)
		}
		return err
	}
	if !bytes.Equal(p, r.want[name]) {
		return fmt.Errorf("%s has other bytes than the image's", name)
	}
	return nil
}

// readDuring starts readers that find the reader stalled, and returns what they
// got in the end.
func (r *rig) readDuring(readers int) <-chan error {
	r.t.Helper()
	if err := os.WriteFile(r.stall, nil, 0o600); err != nil {
		r.t.Fatal(err)
	}
	results := make(chan error, readers)
	for i := range readers {
		name := fmt.Sprintf("d%d/f%d", i%5, i)
		go func() { results <- r.compareFile(name) }() // ends with the stall or the reader
	}
	r.waitFor("a read to reach the reader", func() bool {
		_, err := os.Stat(r.stall + ".reached")
		return err == nil
	})
	return results
}

func (r *rig) waitFor(what string, cond func() bool) {
	r.t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

// wantEIO collects the readers' results: EIO for each.
func (r *rig) wantEIO(results <-chan error, readers int) {
	r.t.Helper()
	timeout := time.After(patience)
	for range readers {
		select {
		case err := <-results:
			if !errors.Is(err, syscall.EIO) {
				r.t.Errorf("stalled reader got %v, want EIO", err)
			}
		case <-timeout:
			r.t.Fatal("a stalled reader hangs")
		}
	}
}

func (r *rig) unstall() {
	os.Remove(r.stall)
	os.Remove(r.stall + ".reached")
}

// waitShim waits for the shim's end and returns its error.
func (r *rig) waitShim() error {
	r.t.Helper()
	guard := time.AfterFunc(patience, func() { r.shim.Process.Kill() })
	defer guard.Stop()
	return r.shim.Wait()
}
