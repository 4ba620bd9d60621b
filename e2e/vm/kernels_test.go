package vm_test

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/e2e/lab"
	"quarry/e2e/vm"
)

//go:embed guest.sh
var guestScript string

var full = flag.Bool("full", false, "mount the whole Debian image in the guests too, which takes them minutes")

// TestKernelsSeeTheSameTree mounts image files on the kernels people have, and on
// this machine's, and compares each mount with what the signed statement says.
// Linux before 6.4 takes bootstrap and data as two devices; later ones the
// flattened device too.
func TestKernelsSeeTheSameTree(t *testing.T) {
	guests := []struct {
		suite vm.Suite
		forms []string
	}{{vm.Linux6_1, []string{"split"}}, {vm.Linux6_12, []string{"split", "flat"}}}
	kernels := map[string]*vm.Kernel{}
	for _, g := range guests {
		kernels[g.suite.Name] = kernel(t, g.suite)
	}
	r := newRig(t)
	t.Run("native", r.native)
	for _, g := range guests {
		t.Run(g.suite.Name, func(t *testing.T) { r.guest(t, kernels[g.suite.Name], g.forms) })
	}
}

// guestLimit is for a machine whose two cores others use too: boot and script
// take a quarter of it on an idle one.
const guestLimit = 12 * time.Minute

func (r rig) guest(t *testing.T, k *vm.Kernel, forms []string) {
	var checks []string
	for _, im := range r.disks {
		for _, form := range forms {
			if im.name != "debian" || *full {
				checks = append(checks, im.name+":"+form+":"+im.tree.String())
			}
		}
	}
	script := fmt.Sprintf("CHECKS=%q\n", strings.Join(checks, " ")) + guestScript
	ctx, cancel := context.WithTimeout(t.Context(), guestLimit)
	defer cancel()
	console, done := logLines(t)
	got, err := vm.Machine{Kernel: k, Share: r.share, Script: script, Console: console}.Run(ctx)
	console.Close()
	<-done
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("Linux %s: %s from boot to power-off", k.Release, got.Took.Round(100*time.Millisecond))
	if got.Status != 0 {
		t.Fatalf("the guest's script ended with status %d:\n%s", got.Status, got.Tail)
	}
}

// logLines returns a writer whose lines go to the test's log as they come, and
// when the last is there.
func logLines(t *testing.T) (io.WriteCloser, <-chan struct{}) {
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() { // ends when w is closed
		defer close(done)
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			t.Log(strings.TrimRight(lines.Text(), "\r"))
		}
		io.Copy(io.Discard, r) // after a line that is too long
	}()
	return w, done
}

func (r rig) native(t *testing.T) {
	var l lab.Lab
	for _, im := range r.disks {
		for _, form := range []string{"split", "flat"} {
			mnt := t.TempDir()
			if err := r.mountFiles(im.name, form, mnt); err != nil {
				t.Errorf("%s as %s: %v", im.name, form, err)
				continue
			}
			out, err := l.Quarry(t.Context(), "treedigest", mnt)
			if err := errors.Join(err, unix.Unmount(mnt, 0)); err != nil {
				t.Error(err)
			}
			if got := strings.TrimSpace(out); got != im.tree.String() {
				t.Errorf("%s as %s: the mount has tree digest %s, the statement says %s", im.name, form, got, im.tree)
			}
		}
	}
}

// mountFiles mounts an image's files on this machine. The loop devices go with
// the mount.
func (r rig) mountFiles(name, form, mnt string) error {
	first, options := name+".flat", ""
	if form == "split" {
		data, err := bindLoop(filepath.Join(r.share, name+".data"))
		if err != nil {
			return err
		}
		defer data.Close()
		first, options = name+".boot", "device="+data.Name()
	}
	boot, err := bindLoop(filepath.Join(r.share, first))
	if err != nil {
		return err
	}
	defer boot.Close()
	return unix.Mount(boot.Name(), mnt, "erofs", unix.MS_RDONLY, options)
}

// bindLoop binds a file to a free loop device, which clears itself with its last
// user.
func bindLoop(path string) (*os.File, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(file.Fd())}
	config.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR
	// Somebody else may take the free device first; 64 times in a row is no race.
	for range 64 {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, err
		}
		loop, err := os.Open(fmt.Sprint("/dev/loop", n))
		if err != nil {
			return nil, err
		}
		if err = unix.IoctlLoopConfigure(int(loop.Fd()), &config); err == nil {
			return loop, nil
		}
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("bind %s: %w", loop.Name(), err)
		}
	}
	return nil, errors.New("every free loop device was taken by others")
}
