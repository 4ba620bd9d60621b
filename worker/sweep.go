package worker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"quarry/internal/proc"
)

// Sweep removes what killed processes left half-made: sandboxes whose owner has
// ended, mounts without a user, attachments without a shim. A finished mount that
// someone still uses is not touched, nor anything another process is working on
// right now.
func (w *Worker) Sweep(ctx context.Context) error {
	// Sandboxes first: they use mounts.
	return errors.Join(w.sweepSandboxes(ctx), w.sweepMounts(ctx))
}

func (w *Worker) sweepMounts(ctx context.Context) error {
	locks, err := filepath.Glob(filepath.Join(w.Dir.path, "mounts", "*.lock"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range locks {
		l, err := proc.TryLock(path)
		if errors.Is(err, proc.ErrLocked) {
			continue
		}
		if err == nil {
			err = w.sweepMount(ctx, strings.TrimSuffix(path, ".lock"))
			l.Unlock()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (w *Worker) sweepMount(ctx context.Context, dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return w.stopIfUnused(ctx, dir)
}

func (w *Worker) sweepSandboxes(ctx context.Context) error {
	dead, err := w.deadSandboxes(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dead {
		if w.Runsc == "" {
			errs = append(errs, fmt.Errorf("sandbox %s of an ended process stays: runsc, which ends it, is not on the PATH", filepath.Base(dir)))
			continue
		}
		errs = append(errs, w.remove(ctx, dir))
	}
	return errors.Join(errs...)
}

// deadSandboxes lists the folders whose owner has ended. The lock keeps those out
// that are being made and do not say yet whose they are.
func (w *Worker) deadSandboxes(ctx context.Context) ([]string, error) {
	l, err := proc.TakeLock(ctx, w.Dir.sandboxLock())
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	dirs, err := filepath.Glob(filepath.Join(w.Dir.path, "sandboxes", "*"))
	if err != nil {
		return nil, err
	}
	var dead []string
	for _, dir := range dirs {
		var owner process
		err := readJSON(filepath.Join(dir, "owner.json"), &owner)
		switch {
		case err == nil && owner.alive():
		case err == nil || errors.Is(err, errDamaged) || errors.Is(err, fs.ErrNotExist):
			dead = append(dead, dir)
		default:
			return nil, err
		}
	}
	return dead, nil
}
