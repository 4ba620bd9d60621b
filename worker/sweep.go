package worker

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
)

// Sweep removes what killed processes left half-made: mounts without a user,
// attachments without a shim, sandboxes whose owner has ended. A finished mount
// that someone still uses is not touched, nor anything another process is
// working on right now.
func (m *Mounter) Sweep(ctx context.Context) error {
	locks, err := filepath.Glob(filepath.Join(m.Dir.path, "mounts", "*.lock"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range locks {
		l, err := tryLock(path)
		if errors.Is(err, errLocked) {
			continue
		}
		if err == nil {
			err = m.sweepMount(ctx, strings.TrimSuffix(path, ".lock"))
			l.unlock()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (m *Mounter) sweepMount(ctx context.Context, dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return m.stopIfUnused(ctx, dir)
}

// SweepSandboxes ends the sandboxes whose owner was killed and removes them.
func (s *Sandboxes) SweepSandboxes(ctx context.Context) error {
	dirs, err := filepath.Glob(filepath.Join(s.Dir.path, "sandboxes", "*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		var owner process
		if err := readJSON(filepath.Join(dir, "owner.json"), &owner); err == nil && owner.alive() {
			continue
		}
		errs = append(errs, s.remove(ctx, dir))
	}
	return errors.Join(errs...)
}
