// Package erofstest mounts image files as the kernel sees them, for tests.
package erofstest

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
)

// Mount mounts a file that holds an EROFS image read-only, its data on another
// device when that file is given too, and returns where. The mount and its loop
// devices go when the test ends. It speaks to the kernel itself: losetup and mount
// look at every loop device there is, and hang when the server behind one of them
// has died.
func Mount(t testing.TB, image string, data ...string) string {
	t.Helper()
	need.Root(t)
	options := ""
	for _, path := range data {
		options = "device=" + bind(t, path)
	}
	mnt := t.TempDir()
	if err := unix.Mount(bind(t, image), mnt, "erofs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		t.Fatalf("mount %s: %v", image, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Errorf("unmount %s: %v", mnt, err)
			if err := unix.Unmount(mnt, unix.MNT_DETACH); err != nil {
				t.Errorf("detach %s: %v", mnt, err)
			}
		}
	})
	return mnt
}

// bind binds a file to a free loop device, which clears itself with its last
// user: the test until it ends, or a mount.
func bind(t testing.TB, path string) string {
	t.Helper()
	loop, err := bindLoop(path)
	if err != nil {
		t.Fatalf("bind %s to a loop device: %v", path, err)
	}
	t.Cleanup(func() { loop.Close() })
	return loop.Name()
}

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
			return nil, fmt.Errorf("find a free loop device: %w", err)
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
			return nil, fmt.Errorf("configure %s: %w", loop.Name(), err)
		}
	}
	return nil, errors.New("every free loop device was taken by others")
}
