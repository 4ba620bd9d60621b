package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// sweepGrace is how long each of a sweep's three steps waits for users to go.
// They get nothing but EIO: it is for those that just close files.
const sweepGrace = 150 * time.Millisecond

// Sweep unmounts and frees what a killed process left in the folder of an
// attachment, in whatever state; a folder without leftovers, or none at all, is
// fine. A mount of the file system elsewhere is its owner's: reads of it get
// EIO, and the loop device goes free with it. Errors: ErrInUse when the process
// lives.
func Sweep(ctx context.Context, path string) error {
	dir, err := realFolder(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	lock, err := lockFolder(ctx, dir)
	if errors.Is(err, os.ErrNotExist) { // removed meanwhile
		return nil
	}
	if err != nil {
		return fmt.Errorf("sweep %s: %w", path, err)
	}
	defer lock.Close()
	if err := errors.Join(sweep(ctx, dir), dir.removeCounts()); err != nil {
		return fmt.Errorf("sweep %s: %w", path, err)
	}
	return nil
}

// sweep undoes an attachment that nobody serves from the outside in: what is
// mounted on the device, the device, the file under it, the folders, the record.
// Each step is tried. The first two end the reads under way, so that nothing
// after them waits for one: a dead process's FUSE has ended them already, its NBD
// has not.
func sweep(ctx context.Context, dir folder) error {
	b, err := backendOf(dir)
	if err != nil {
		return err
	}
	nbdCtx, cancelNBD := context.WithTimeout(ctx, releaseGrace)
	defer cancelNBD()
	err = errors.Join(
		disconnectNBDs(nbdCtx, b, true),
		abortFUSE(dir.fuse()),
		unmountAll(ctx, dir.root(), sweepGrace, nil),
	)
	deviceCtx, cancel := context.WithTimeout(ctx, 2*sweepGrace)
	defer cancel()
	state := filepath.Join(string(dir), stateFile)
	return errors.Join(
		err,
		ignoreUsed(awaitNBDs(deviceCtx, b, true)),
		ignoreUsed(freeLoops(deviceCtx, dir.image())),
		unmountAll(ctx, dir.fuse(), sweepGrace, nil),
		removeDir(dir.root()),
		removeDir(dir.fuse()),
		removeFile(state),
		removeFile(state+tmpSuffix),
	)
}

// abortFUSE makes every request to the file system fail, so that no step of a
// sweep can wait for one: some thread may still keep /dev/fuse open.
func abortFUSE(path string) error {
	n, err := mounted(path)
	if err != nil || n == 0 {
		return err
	}
	err = isolated(func() error { return unix.Unmount(path, unix.MNT_FORCE|unix.UMOUNT_NOFOLLOW) })
	if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("abort %s: %w", path, err)
	}
	return nil
}

// ignoreUsed forgives a loop device that others still use: it is told to go free
// with its last user.
func ignoreUsed(err error) error {
	if errors.Is(err, errDeviceUsed) {
		return nil
	}
	return err
}

// removeDir removes an empty folder, and nothing else in case of doubt.
func removeDir(path string) error {
	err := unix.Rmdir(path)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return &os.PathError{Op: "rmdir", Path: path, Err: err}
	}
	return nil
}

func removeFile(path string) error {
	err := os.Remove(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
