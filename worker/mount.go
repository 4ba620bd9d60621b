package worker

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/store/chunk"
)

// One EROFS mount and one shim per image are shared by all its users. Each user
// is a reference file; the last one to go unmounts.

// ref is one user of a mount: a running process, or a bind mount.
type ref struct {
	Owner  process `json:"owner"`            // the process that made it
	Target string  `json:"target,omitempty"` // folder of a bind mount, which outlives its owner
	Device uint64  `json:"device,omitempty"` // st_dev of the mounted image, to know the bind mount by
}

// Mount is one reference to a mounted image.
type Mount struct {
	w    *Worker
	id   chunk.Digest
	path string // reference file
}

// Root is the folder the image is mounted on: read-only, nosuid, nodev, below a
// 0700 folder.
func (mt *Mount) Root() string { return filepath.Join(mt.w.Dir.mountDir(mt.id), "root") }

// Acquire mounts the image when it is not, and takes a reference that lives as
// long as this process or until Release.
func (w *Worker) Acquire(ctx context.Context, im *Image) (*Mount, error) {
	return w.acquire(ctx, im, "")
}

func (w *Worker) acquire(ctx context.Context, im *Image, target string) (*Mount, error) {
	l, err := proc.TakeLock(ctx, w.Dir.mountDir(im.ID)+".lock")
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	dir := w.Dir.mountDir(im.ID)
	if err := w.ensureMounted(ctx, im, dir); err != nil {
		return nil, fmt.Errorf("mount image %s: %w", im.ID, err)
	}
	r := ref{Target: target}
	mt := &Mount{w: w, id: im.ID, path: filepath.Join(dir, "refs", rand.Text())}
	if r.Owner, err = self(); err == nil {
		r.Device, err = deviceOf(mt.Root())
	}
	if err == nil {
		err = writeJSON(mt.path, r)
	}
	if err != nil {
		return nil, errors.Join(err, w.stopIfUnused(context.WithoutCancel(ctx), dir))
	}
	return mt, nil
}

// ensureMounted makes sure that the image is mounted and answers: its reader may
// have died since, and a new one is then found by the shim.
func (w *Worker) ensureMounted(ctx context.Context, im *Image, dir string) error {
	if err := w.ensureReader(ctx); err != nil {
		return err
	}
	if !mounted(dir) {
		return w.start(ctx, im, dir)
	}
	deadline := time.Now().Add(startTimeout)
	for {
		err := probe(dir)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(poll):
		}
	}
}

// probe reads one block of the bootstrap, which needs shim and reader and no
// store, past every cache.
func probe(dir string) error {
	f, err := os.Open(filepath.Join(dir, "fuse", "image"))
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.ReadAt(make([]byte, 4096), 0)
	return err
}

func deviceOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Dev, nil
}

// Release gives the reference back and unmounts the image when it was the last.
func (mt *Mount) Release(ctx context.Context) error {
	dir := mt.w.Dir.mountDir(mt.id)
	l, err := proc.TakeLock(ctx, dir+".lock")
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := os.Remove(mt.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return mt.w.stopIfUnused(ctx, dir)
}

// mounted reports whether the folder holds a finished mount with a live shim.
func mounted(dir string) bool {
	st, err := attach.ReadState(dir)
	return err == nil && st.Phase == attach.PhaseMounted && st.Alive()
}

// start runs a shim in dir; the caller holds the image's lock.
func (w *Worker) start(ctx context.Context, im *Image, dir string) error {
	if err := attach.Sweep(ctx, dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "refs"), 0o700); err != nil {
		return err
	}
	args := []string{w.ShimPath, "--socket", w.Dir.ReaderSocket(), "--export", im.ID.Hex(),
		"--size", strconv.FormatInt(im.RAFS.DeviceSize(), 10), "--dir", dir, "--log", filepath.Join(dir, "shim.log"),
		"--read-ahead", strconv.Itoa(w.ReadAheadKiB)}
	if b := im.RAFS.Blob; b != nil {
		args = append(args, "--data-offset", strconv.FormatInt(b.MappedOff, 10))
	}
	if err := runShim(ctx, args, filepath.Join(dir, "shim.log")); err != nil {
		return errors.Join(err, attach.Sweep(context.WithoutCancel(ctx), dir))
	}
	return nil
}

// runShim starts a shim and returns when it says that the mount is ready.
func runShim(ctx context.Context, args []string, logPath string) error {
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	cmd, err := proc.Start(args, logPath, in)
	in.Close()
	if err != nil {
		return fmt.Errorf("start the shim: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { out.Close() })
	defer stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	if line == "ready\n" {
		// The shim outlives this process; init reaps it, or this wait does.
		go cmd.Wait() // ends with the shim or with this process
		return nil
	}
	cmd.Process.Kill()
	waitErr := cmd.Wait()
	if ctx.Err() != nil {
		return fmt.Errorf("the shim is not ready: %w; see %s", ctx.Err(), logPath)
	}
	return fmt.Errorf("the shim ended (%w): %s", errors.Join(err, waitErr), proc.LastLine(logPath))
}

// stopIfUnused drops dead references and ends the shim when none is left; the
// caller holds the image's lock.
func (w *Worker) stopIfUnused(ctx context.Context, dir string) error {
	live, err := liveRefs(dir)
	if err != nil || live > 0 {
		return err
	}
	return w.stop(ctx, dir)
}

// shimExit bounds the wait for a shim that was told to end; it gives a busy
// mount 15 s itself.
const shimExit = 20 * time.Second

// shimKilled bounds the wait for one that was killed.
const shimKilled = 5 * time.Second

// poll is how often something is looked at again that tells nobody of a change.
const poll = 5 * time.Millisecond

func (w *Worker) stop(ctx context.Context, dir string) error {
	st, err := attach.ReadState(dir)
	if err == nil && st.Alive() {
		if err := w.endShim(ctx, st); err != nil {
			return err
		}
	}
	if err := attach.Sweep(ctx, dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// endShim tells a shim to end, and kills one that does not.
func (w *Worker) endShim(ctx context.Context, st attach.State) error {
	for _, step := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{syscall.SIGTERM, shimExit}, {syscall.SIGKILL, shimKilled}} {
		if err := syscall.Kill(st.PID, step.signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("end shim %d: %w", st.PID, err)
		}
		for deadline := time.Now().Add(step.wait); time.Now().Before(deadline); time.Sleep(poll) {
			if !st.Alive() {
				return nil
			}
		}
		w.log().WarnContext(ctx, "shim does not end", "pid", st.PID, "signal", step.signal)
	}
	return fmt.Errorf("shim %d does not end", st.PID)
}

// liveRefs counts the references of a mount and removes the dead ones: those of
// ended processes, and of bind mounts that are gone.
func liveRefs(dir string) (int, error) {
	entries, err := os.ReadDir(filepath.Join(dir, "refs"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	live := 0
	for _, e := range entries {
		path := filepath.Join(dir, "refs", e.Name())
		var r ref
		err := readJSON(path, &r)
		switch {
		case err == nil && (r.Owner.alive() || r.bound()):
			live++
			continue
		case err != nil && !errors.Is(err, errDamaged):
			return 0, err // not read is not dead
		}
		if err := os.Remove(path); err != nil {
			return 0, err
		}
	}
	return live, nil
}

// bound reports whether the bind mount is there: its folder shows the image's
// own device, not its parent's and not what somebody else mounted over it.
func (r ref) bound() bool {
	if r.Target == "" {
		return false
	}
	dev, err := deviceOf(r.Target)
	return err == nil && dev == r.Device
}

// MountAt mounts the image on an existing empty folder and leaves it there.
func (w *Worker) MountAt(ctx context.Context, im *Image, target string) error {
	target, err := mountTarget(target)
	if err != nil {
		return err
	}
	mt, err := w.acquire(ctx, im, target)
	if err != nil {
		return err
	}
	if err := bindReadOnly(mt.Root(), target); err != nil {
		return errors.Join(fmt.Errorf("mount on %s: %w", target, err), mt.Release(context.WithoutCancel(ctx)))
	}
	if err := ctx.Err(); err != nil {
		return errors.Join(err, w.UnmountAt(context.WithoutCancel(ctx), target))
	}
	return nil
}

func mountTarget(target string) (string, error) {
	abs, err := filepath.Abs(target)
	if err != nil {
		return "", err
	}
	// Mount points are known by their real path.
	if abs, err = filepath.EvalSymlinks(abs); err != nil {
		return "", fmt.Errorf("mount point %s: %w", target, err)
	}
	entries, err := os.ReadDir(abs)
	if err != nil {
		return "", fmt.Errorf("mount point %s: %w", target, err)
	}
	if len(entries) > 0 {
		return "", fmt.Errorf("mount point %s is not empty", target)
	}
	dev, err := deviceOf(abs)
	if err != nil {
		return "", err
	}
	parent, err := deviceOf(filepath.Dir(abs))
	if err != nil {
		return "", err
	}
	if dev != parent {
		return "", fmt.Errorf("%s is already a mount point; unmount it first", target)
	}
	return abs, nil
}

func bindReadOnly(from, to string) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV)
	if err := unix.Mount("", to, "", flags, ""); err != nil {
		return errors.Join(err, unix.Unmount(to, unix.MNT_DETACH))
	}
	return nil
}

// ErrNotMounted says that quarry has no mount on that folder.
var ErrNotMounted = errors.New("no image is mounted there by quarry")

// UnmountAt ends a mount made by MountAt.
func (w *Worker) UnmountAt(ctx context.Context, target string) error {
	abs, err := filepath.Abs(target)
	if err != nil {
		return err
	}
	// The folder's parent is resolved, not the folder: a dead mount can be
	// unmounted but not looked into.
	parent, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if err != nil {
		return fmt.Errorf("umount %s: %w", target, err)
	}
	abs = filepath.Join(parent, filepath.Base(abs))
	refs, err := filepath.Glob(filepath.Join(w.Dir.path, "mounts", "*", "refs", "*"))
	if err != nil {
		return err
	}
	for _, path := range refs {
		var r ref
		if err := readJSON(path, &r); err != nil || r.Target != abs {
			continue
		}
		id, err := chunk.ParseHex(filepath.Base(filepath.Dir(filepath.Dir(path))))
		if err != nil {
			return err
		}
		bound := r.bound()
		if bound {
			if err := unix.Unmount(abs, 0); err != nil {
				return fmt.Errorf("umount %s: %w", target, err)
			}
		}
		if err := (&Mount{w: w, id: id, path: path}).Release(ctx); err != nil || bound {
			return err
		}
		break // somebody else has unmounted it
	}
	return fmt.Errorf("umount %s: %w", target, ErrNotMounted)
}
