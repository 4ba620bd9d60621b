package attach_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/nbd/attach"
)

func TestSweepOfAFolderWithoutLeftovers(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	for range 2 {
		if err := attach.Sweep(testContext(t), dir); err != nil {
			t.Error(err)
		}
	}
	if err := attach.Sweep(testContext(t), filepath.Join(dir, "none")); err != nil {
		t.Error(err)
	}
}

// TestSweepOfHalfMadeStates builds what a process killed at each step leaves,
// with a plain file in place of the dead FUSE one.
func TestSweepOfHalfMadeStates(t *testing.T) {
	image, _ := buildImage(t, 5)
	losetup, mount := need.Tool(t, "losetup"), need.Tool(t, "mount")
	for name, steps := range map[string]int{"folders": 0, "file": 1, "loop": 2, "mount": 3} {
		t.Run("killed after "+name, func(t *testing.T) {
			dir := t.TempDir()
			fuse, root := filepath.Join(dir, "fuse"), filepath.Join(dir, "root")
			run := func(name string, args ...string) string {
				out, err := exec.Command(name, args...).CombinedOutput()
				if err != nil {
					t.Fatalf("%s %v: %v\n%s", name, args, err, out)
				}
				return strings.TrimSpace(string(out))
			}
			for _, d := range []string{fuse, root} {
				if err := os.Mkdir(d, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			var loop string
			t.Cleanup(func() { // what a failed test leaves
				unix.Unmount(root, unix.MNT_DETACH)
				if loop != "" {
					exec.Command(losetup, "--detach", loop).Run()
				}
				unix.Unmount(fuse, unix.MNT_DETACH)
			})
			if steps >= 1 {
				run(mount, "-t", "tmpfs", "tmpfs", fuse)
				if err := os.WriteFile(filepath.Join(fuse, "image"), image, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if steps >= 2 {
				loop = run(losetup, "--find", "--show", "--read-only", filepath.Join(fuse, "image"))
			}
			if steps >= 3 {
				run(mount, "-t", "erofs", "-o", "ro", loop, root)
			}
			if err := attach.Sweep(testContext(t), dir); err != nil {
				t.Error(err)
			}
			if left := leftovers(t, dir); left != "" {
				t.Errorf("left:\n%s", left)
			}
			for _, d := range []string{fuse, root} {
				if _, err := os.Lstat(d); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s: got %v, want it gone", d, err)
				}
			}
		})
	}
}
