//go:build vm

package attach_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
)

// takeAll takes every NBD device that is there, as another program does: one that
// is open is not free. It returns how many, and what gives them back.
func takeAll(t *testing.T) (int, func()) {
	t.Helper()
	devices, err := filepath.Glob("/sys/block/nbd*")
	if err != nil || len(devices) == 0 {
		t.Fatalf("no NBD devices, %v", err)
	}
	var fds []int
	back := func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
		fds = nil
	}
	t.Cleanup(back)
	for _, d := range devices {
		fd, err := unix.Open("/dev/"+filepath.Base(d), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatalf("open %s: %v", filepath.Base(d), err)
		}
		fds = append(fds, fd)
	}
	return len(fds), back
}

// TestNBDBeyondThePool attaches while others have every device: the kernel makes
// one more. Where that one has no file in /dev, as in a container that was given
// some, and where the kernel can make none, the error says what to do, and no
// device stays connected; the mode auto does not change to another by itself.
func TestNBDBeyondThePool(t *testing.T) {
	image, want := buildImage(t, 20)
	n, back := takeAll(t)
	a, err := attach.Attach(testContext(t), attach.Config{Mode: attach.ModeAuto, Dir: filepath.Join(t.TempDir(), "m"), Source: &memory{image: image}})
	if err != nil {
		t.Fatal(err)
	}
	device := fmt.Sprintf("/dev/nbd%d", n)
	if a.Device() != device || a.Mode() != attach.ModeNBD {
		t.Errorf("attached as %s by %s, want %s", a.Device(), a.Mode(), device)
	}
	compareTree(t, a.Root(), want)
	if err := a.Detach(testContext(t)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return isFree(t, device) })

	hidden := device + ".hidden"
	if err := os.Rename(device, hidden); err != nil {
		t.Fatal(err)
	}
	wantNoDevice(t, device+" is not in this /dev")
	if err := os.Rename(hidden, device); err != nil {
		t.Fatal(err)
	}
	back()
	again := attachTo(t, attach.Config{Source: &memory{image: image}})
	compareTree(t, again.Root(), want)
}

// TestLastNBD is of a kernel that has every device that it can have, all of them
// taken: e2e/vm loads the module so.
func TestLastNBD(t *testing.T) {
	image, want := buildImage(t, 20)
	n, back := takeAll(t)
	wantNoDevice(t, "every device that the kernel can have is taken")
	if devices, err := filepath.Glob("/sys/block/nbd*"); len(devices) != n || err != nil {
		t.Errorf("%d devices (%v), were %d", len(devices), err, n)
	}
	back()
	compareTree(t, attachTo(t, attach.Config{Source: &memory{image: image}}).Root(), want)
}

// wantNoDevice attaches in each mode that means NBD and wants an error with the
// words, and nothing left.
func wantNoDevice(t *testing.T, words string) {
	t.Helper()
	for _, mode := range []attach.Mode{attach.ModeNBD, attach.ModeAuto} {
		src := &memory{image: make([]byte, 4096)}
		dir := filepath.Join(t.TempDir(), "m")
		_, err := attach.Attach(testContext(t), attach.Config{Mode: mode, Dir: dir, Source: src})
		if !errors.Is(err, attach.ErrNoNBD) || !strings.Contains(err.Error(), words) || !strings.Contains(err.Error(), "--attach fuse") {
			t.Errorf("mode %s: %v, want ErrNoNBD that says %q", mode, err, words)
		}
		if left := leftovers(t, dir); left != "" {
			t.Errorf("mode %s left:\n%s", mode, left)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 || entries[0].Name() != "lock" {
			t.Errorf("mode %s: folder holds %v (%v), want the lock alone", mode, entries, err)
		}
	}
}
