package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrInUse says that a live process serves the folder's attachment.
var ErrInUse = errors.New("attachment is in use")

// Sweep unmounts and frees what a killed process left in the folder of an
// attachment, in whatever state; a folder without leftovers, or none at all, is
// fine. Errors: ErrInUse when the process lives.
func Sweep(ctx context.Context, path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	path, err = filepath.EvalSymlinks(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	dir := folder(path)
	lock, err := lockFolder(dir)
	if err != nil {
		return fmt.Errorf("sweep %s: %w", path, err)
	}
	defer lock.Close()
	if err := sweep(ctx, dir); err != nil {
		return fmt.Errorf("sweep %s: %w", path, err)
	}
	return nil
}

// lockFolder takes the lock that an attachment's process holds while it lives.
// The kernel drops it with the process, so there are no stale locks.
func lockFolder(dir folder) (*os.File, error) {
	f, err := os.OpenFile(dir.lock(), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, ErrInUse
		}
		return nil, fmt.Errorf("lock %s: %w", dir.lock(), err)
	}
	return f, nil
}

// sweep undoes an attachment from the outside in: what is mounted on the
// device, the device, the file under it, the folders, the record. Each step is tried.
func sweep(ctx context.Context, dir folder) error {
	freeCtx, cancel := context.WithTimeout(ctx, releaseGrace)
	defer cancel()
	return errors.Join(
		unmountAll(ctx, dir.root()),
		freeLoops(freeCtx, dir.image()),
		unmountAll(ctx, dir.fuse()),
		removeDir(dir.root()),
		removeDir(dir.fuse()),
		removeFile(filepath.Join(string(dir), stateFile)),
	)
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
