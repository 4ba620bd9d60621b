package rafs_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
)

// mountErofs mounts a file that holds a flattened device read-only and returns where.
// The mount and its loop device go when the test ends.
func mountErofs(t testing.TB, image string) string {
	t.Helper()
	need.Root(t)
	loop, err := attachLoop(image)
	if err != nil {
		t.Fatalf("attach %s: %v", image, err)
	}
	// The loop device clears itself with its last user, which the mount is.
	defer loop.Close()
	mnt := t.TempDir()
	if err := unix.Mount(loop.Name(), mnt, "erofs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
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

// attachLoop binds image to a free loop device. It speaks to the kernel itself:
// losetup and mount look at every loop device there is, and hang when the server
// behind one of them does.
func attachLoop(image string) (*os.File, error) {
	file, err := os.Open(image)
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
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		loop, err := os.Open(fmt.Sprint("/dev/loop", number))
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
