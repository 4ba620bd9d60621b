package worker

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"quarry/internal/proc"
	"quarry/worker/timeline"
)

// Sweep removes what killed processes left half-made: sandboxes whose owner has
// ended, mounts without a user, attachments without a shim. A finished mount that
// someone still uses is not touched, nor anything another process is working on
// right now.
func (w *Worker) Sweep(ctx context.Context) error {
	defer timeline.Begin(ctx, timeline.Sweep)()
	// Sandboxes first: they use mounts.
	return errors.Join(w.sweepSandboxes(ctx), w.sweepMounts(ctx))
}

func (w *Worker) sweepMounts(ctx context.Context) error {
	entries, err := os.ReadDir(w.Dir.Mounts())
	if err != nil {
		return err
	}
	// By the folders too: one whose lock somebody has removed would stay for ever.
	names := map[string]bool{}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".lock"); ok || e.IsDir() {
			names[name] = true
		}
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(names)) {
		dir := filepath.Join(w.Dir.Mounts(), name)
		l, err := proc.TryLock(dir + ".lock")
		if errors.Is(err, proc.ErrLocked) {
			continue
		}
		if err == nil {
			err = w.sweepMount(ctx, dir)
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
	return w.stopIfUnused(ctx, dir, false)
}

func (w *Worker) sweepSandboxes(ctx context.Context) error {
	dead, err := w.deadSandboxes(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, b := range dead {
		errs = append(errs, b.remove())
	}
	return errors.Join(errs...)
}

// deadSandboxes takes over the sandboxes whose owner has ended. The lock keeps
// those out that are being made and are not owned yet.
func (w *Worker) deadSandboxes(ctx context.Context) ([]*sandbox, error) {
	l, err := proc.TakeLock(ctx, w.Dir.SandboxLock())
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	entries, err := os.ReadDir(w.Dir.Sandboxes())
	if err != nil {
		return nil, err
	}
	var dead []*sandbox
	for _, e := range entries {
		b := &sandbox{w: w, id: e.Name(), dir: filepath.Join(w.Dir.Sandboxes(), e.Name())}
		b.owner, err = proc.TryLockExisting(filepath.Join(b.dir, "owner"))
		if errors.Is(err, proc.ErrLocked) {
			continue
		}
		if errors.Is(err, fs.ErrNotExist) {
			os.Remove(b.dir) // its last part, or somebody is about to do that
			continue
		}
		if err != nil {
			return nil, err
		}
		dead = append(dead, b)
	}
	return dead, nil
}
