package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/store/chunk"
)

// ErrNotMounted says that quarry has no mount on that folder.
var ErrNotMounted = errors.New("no image is mounted there by quarry")

// errOtherWorker says that the shim of a mount is of another folder: unmounted from
// here, it would stay until the next command with that folder.
var errOtherWorker = errors.New("the image is mounted by the worker of")

// UnmountAt ends a mount made by MountAt. What somebody else has mounted on the
// folder is left alone.
func (w *Worker) UnmountAt(ctx context.Context, target string) error {
	defer w.supervised(ctx)() // who has the image's lock may wait for a shim that does not run
	abs, err := filepath.Abs(target)
	if err != nil {
		return err
	}
	if abs, err = filepath.EvalSymlinks(abs); err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	dev, err := deviceOf(abs)
	if err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	parent, err := deviceOf(filepath.Dir(abs))
	if err != nil {
		return fmt.Errorf("umount: %w", err)
	}
	dir, live := w.mountOf(dev)
	if dev == parent || !live && !attach.OwnsMount(abs) {
		return fmt.Errorf("umount %s: %w", target, ErrNotMounted)
	}
	if !live {
		other, err := otherWorker(dev)
		if err != nil {
			return fmt.Errorf("umount %s: %w", target, err)
		}
		if other != "" {
			return fmt.Errorf("umount %s: %w %s: say --worker-dir %s", target, errOtherWorker, other, other)
		}
		return unmountBind(abs)
	}
	l, err := proc.TakeLock(ctx, dir+".lock")
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := unmountBind(abs); err != nil {
		return err
	}
	return w.stopIfUnused(ctx, dir, true)
}

func unmountBind(path string) error {
	if err := unix.Unmount(path, 0); err != nil {
		return fmt.Errorf("umount %s: %w", path, err)
	}
	return nil
}

// mountOf finds the image mount that has the device.
func (w *Worker) mountOf(dev uint64) (dir string, ok bool) {
	entries, err := os.ReadDir(w.Dir.Mounts())
	if err != nil {
		return "", false
	}
	for _, e := range entries {
		dir := filepath.Join(w.Dir.Mounts(), e.Name())
		if have, err := deviceOf(filepath.Join(dir, "root")); e.IsDir() && err == nil && have == dev {
			return dir, true
		}
	}
	return "", false
}

// otherWorker returns the folder of the worker whose mount of an image has the
// device, going by the places where workers mount theirs; "" when there is none.
func otherWorker(dev uint64) (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	other := ""
	err = attach.Mounts(f, func(m attach.MountEntry) {
		if dir, ok := workerOf(m.Point); ok && other == "" && m.Device == dev {
			other = dir
		}
	})
	return other, err
}

// workerOf takes DIR/mounts/ID/root apart.
func workerOf(point string) (dir string, ok bool) {
	mount, root := filepath.Split(point)
	mounts, id := filepath.Split(filepath.Clean(mount))
	dir, name := filepath.Split(filepath.Clean(mounts))
	_, err := chunk.ParseHex(strings.TrimSuffix(id, ".noacl"))
	return filepath.Clean(dir), err == nil && root == "root" && name == "mounts"
}
