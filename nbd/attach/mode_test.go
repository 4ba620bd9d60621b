package attach_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/nbd/attach"
)

func TestModesHaveNames(t *testing.T) {
	for _, m := range []attach.Mode{attach.ModeAuto, attach.ModeNBD, attach.ModeFUSE, attach.ModeFile} {
		if got, err := attach.ParseMode(string(m)); got != m || err != nil {
			t.Errorf("%s: %s, %v", m, got, err)
		}
	}
	for _, s := range []string{"", "NBD", "loop"} {
		if m, err := attach.ParseMode(s); err == nil {
			t.Errorf("%q is taken for %s", s, m)
		}
	}
	if m := attach.ModeAuto.Used(); m != attach.ModeNBD && m != attach.ModeFUSE {
		t.Errorf("auto means %s", m)
	}
	for _, m := range []attach.Mode{attach.ModeNBD, attach.ModeFUSE, attach.ModeFile} {
		if got := m.Used(); got != m {
			t.Errorf("%s means %s", m, got)
		}
	}
}

// TestFileMode mounts the file that FUSE serves without a device, where the
// kernel can.
func TestFileMode(t *testing.T) {
	need.Root(t)
	image, want := buildImage(t, 60)
	dir := filepath.Join(t.TempDir(), "m")
	a, err := attach.Attach(testContext(t), attach.Config{Mode: attach.ModeFile, Dir: dir, Source: &memory{image: image}})
	if errors.Is(err, unix.ENOTBLK) {
		need.Missing(t, "EROFS mounts from files (CONFIG_EROFS_FS_BACKED_BY_FILE, Linux 6.12)")
	}
	if err != nil {
		t.Fatal(err)
	}
	detachAtEnd(t, a)
	if a.Mode() != attach.ModeFile || a.Device() != filepath.Join(dir, "fuse", "image") {
		t.Errorf("attached %s as %s", a.Device(), a.Mode())
	}
	compareTree(t, a.Root(), want)
	select {
	case <-a.Gone():
		t.Error("Gone is closed while it is mounted")
	default:
	}
	if err := unix.Unmount(a.Root(), 0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-a.Gone():
	case <-time.After(patience):
		t.Error("Gone was not closed")
	}
}

// TestProbeReadsPastTheCaches shows that a probe asks the source each time, and
// tells when it does not answer.
func TestProbeReadsPastTheCaches(t *testing.T) { eachMode(t, testProbeReadsPastTheCaches) }

func testProbeReadsPastTheCaches(t *testing.T, mode attach.Mode) {
	image, _ := buildImage(t, 20)
	src := &memory{image: image}
	a := attachTo(t, attach.Config{Mode: mode, Source: src})
	dir := filepath.Dir(a.Root())
	start, err := attach.ProcessStart(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.WriteState(attach.State{PID: os.Getpid(), Start: start, Attach: a.Mode(), Device: a.Device()}); err != nil {
		t.Fatal(err)
	}
	st, err := attach.ReadState(dir)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		before := src.views.Load()
		if err := st.Probe(testContext(t)); err != nil || src.views.Load() == before {
			t.Errorf("Probe: %v after %d reads of the source", err, src.views.Load()-before)
		}
	}
	errLost := errors.New("reader lost")
	src.fail.Store(&errLost)
	if err := st.Probe(testContext(t)); !errors.Is(err, unix.EIO) {
		t.Errorf("Probe of a source that fails: %v, want EIO", err)
	}
}

// TestOwnsMount tells a shim's mounts from others, also from those of somebody's
// own image whose file has the same name.
func TestOwnsMount(t *testing.T) { eachMode(t, testOwnsMount) }

func testOwnsMount(t *testing.T, mode attach.Mode) {
	image, _ := buildImage(t, 20)
	a := attachTo(t, attach.Config{Mode: mode, Source: &memory{image: image}})
	if !attach.OwnsMount(a.Root()) {
		t.Error("it is not taken for a shim's mount")
	}
	file, at := filepath.Join(t.TempDir(), "image"), t.TempDir()
	if err := os.WriteFile(file, image, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(need.Tool(t, "mount"), "-t", "erofs", "-o", "ro,loop", file, at).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v\n%s", err, out)
	}
	t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
	for _, path := range []string{at, "/", "/proc", filepath.Join(at, "none")} {
		if attach.OwnsMount(path) {
			t.Errorf("%s is taken for a shim's mount", path)
		}
	}
}
