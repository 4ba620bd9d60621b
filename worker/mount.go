package worker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/store/chunk"
	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

// One EROFS mount and one shim per image are shared by all its users. A user is a
// running process, which holds the lock of a reference file, or another mount of
// the same file system, of which only the kernel's mount tables tell the truth.
// When none is left, the image is unmounted.

// Mount is one process's reference to a mounted image.
type Mount struct {
	w    *Worker
	dir  string // of the mount in the worker folder
	path string // reference file
	ref  *proc.Lock
	made bool // by this reference: nothing was read of it before
}

// Root is the folder the image is mounted on: read-only, nosuid, nodev, below a
// 0700 folder.
func (mt *Mount) Root() string { return filepath.Join(mt.dir, "root") }

// Acquire mounts the image when it is not, and takes a reference that lives as
// long as this process or until Release.
func (w *Worker) Acquire(ctx context.Context, im *folder.Image) (*Mount, error) {
	return w.acquire(ctx, im, false)
}

// acquire is Acquire; with noACL, of the mount without POSIX ACLs.
func (w *Worker) acquire(ctx context.Context, im *folder.Image, noACL bool) (*Mount, error) {
	dir := w.Dir.MountDir(im.ID)
	if noACL {
		dir = w.Dir.NoACLDir(im.ID)
	}
	locked := timeline.Begin(ctx, timeline.Lock)
	l, err := proc.TakeLock(ctx, dir+".lock")
	locked()
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	defer w.supervised(ctx)()
	made, err := w.ensureMounted(ctx, im, dir, noACL)
	if err != nil {
		return nil, fmt.Errorf("mount image %s: %w", im.ID, err)
	}
	mt := &Mount{w: w, dir: dir, path: filepath.Join(dir, "refs", rand.Text()), made: made}
	if err = w.awaitKeeper(ctx); err == nil {
		err = os.MkdirAll(filepath.Dir(mt.path), 0o700)
	}
	if err == nil {
		mt.ref, err = proc.TryLock(mt.path)
	}
	if err == nil && w.NoTrace {
		if err = w.leaveNoTrace(ctx, im.ID, dir); err != nil {
			os.Remove(mt.path)
			mt.ref.Unlock()
		}
	}
	if err != nil {
		return nil, errors.Join(err, w.stopIfUnused(context.WithoutCancel(ctx), dir, false))
	}
	return mt, nil
}

// leaveNoTrace has nothing recorded of a mount, by this reader and by the next, as
// long as the mount is there: the touches of all that use it are one.
func (w *Worker) leaveNoTrace(ctx context.Context, id chunk.Digest, dir string) error {
	if err := os.WriteFile(folder.NoTraceMark(dir), nil, 0o600); err != nil {
		return fmt.Errorf("mark the mount as one without trace: %w", err)
	}
	for end := time.Now().Add(figuresPatience); ; { // it may just be replaced
		err := reader.NoTrace(ctx, w.Dir, id)
		if err == nil || time.Now().After(end) || !sleep(ctx, poll) {
			return err
		}
	}
}

// Release gives the reference back and unmounts the image when it was the last.
func (mt *Mount) Release(ctx context.Context) error {
	defer timeline.Begin(ctx, timeline.Release)()
	l, err := proc.TakeLock(ctx, mt.dir+".lock")
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := mt.drop(); err != nil {
		return err
	}
	return mt.w.stopIfUnused(ctx, mt.dir, true)
}

// drop gives the reference up.
func (mt *Mount) drop() error {
	err := os.Remove(mt.path)
	if mt.ref != nil {
		mt.ref.Unlock()
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// poll is how often something is looked at again that tells nobody of a change.
const poll = 5 * time.Millisecond

// ensureMounted makes sure that the image is mounted and answers: its reader may
// have died since, and a new one is then found by the shim. made says that it was not.
func (w *Worker) ensureMounted(ctx context.Context, im *folder.Image, dir string, noACL bool) (made bool, err error) {
	if err := w.EnsureReader(ctx); err != nil {
		return false, err
	}
	if !mounted(dir) {
		return true, w.start(ctx, im, dir, noACL)
	}
	answers, err := w.probe(ctx, dir)
	if err != nil || answers {
		return false, err
	}
	return true, w.start(ctx, im, dir, noACL)
}

// probe reads one block of the bootstrap, which needs shim and reader and no
// store, until that succeeds; false when the shim has ended meanwhile.
func (w *Worker) probe(ctx context.Context, dir string) (bool, error) {
	defer timeline.Begin(ctx, timeline.Probe)()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		st, err := attach.ReadState(dir)
		if err == nil {
			err = st.Probe(ctx)
		}
		switch {
		case err == nil:
			return true, nil
		case !mounted(dir):
			return false, nil
		case ctx.Err() != nil:
			return false, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(poll):
		}
	}
}

func deviceOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Dev, nil
}

// mounted reports whether the folder holds a finished mount with a live shim.
func mounted(dir string) bool {
	st, err := attach.ReadState(dir)
	return err == nil && st.Phase == attach.PhaseMounted && st.Alive()
}

const (
	// cloneGrace is how long a mount may be in use by another mount namespace
	// alone before that counts: a process that has just been given one holds
	// copies of all mounts of this machine until it has left them.
	cloneGrace = 3 * time.Second
	// passingGrace is the same where only runsc has the namespace. What runsc uses
	// for long has a reference, so this is a sandbox that starts or is being taken
	// apart, which takes as long as the machine is busy.
	passingGrace = 30 * time.Second
)

// stopIfUnused ends the shim when the mount has no user. With wait, it waits for
// a use that is about to end; the caller holds the image's lock.
func (w *Worker) stopIfUnused(ctx context.Context, dir string, wait bool) error {
	for start := time.Now(); ; {
		use, err := inUse(dir)
		if err != nil {
			return err
		}
		if use == unused {
			break
		}
		if waited := time.Since(start); !wait || use == usedHere || use == usedElsewhere && waited > cloneGrace || waited > passingGrace {
			return nil
		}
		// A process that was killed owns its sandbox until the kernel has taken it
		// apart, which may be after this process has swept.
		if use == usedInPassing {
			if err := w.sweepSandboxes(ctx); err != nil {
				return err
			}
		}
		if !sleep(ctx, 4*poll) {
			return fmt.Errorf("wait for the users of %s: %w", dir, context.Cause(ctx))
		}
	}
	if err := attach.End(ctx, dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// use says who uses a mount.
type use int

const (
	unused        use = iota
	usedInPassing     // by a mount in a mount namespace that only runsc is in
	usedElsewhere     // by a mount in another mount namespace
	usedHere          // by a process, or by a mount in this namespace
)

// inUse reports who uses a mount, and removes the reference files of
// processes that have ended.
func inUse(dir string) (use, error) {
	refs, err := os.ReadDir(filepath.Join(dir, "refs"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return usedHere, err
	}
	live := false
	for _, e := range refs {
		path := filepath.Join(dir, "refs", e.Name())
		l, err := proc.TryLock(path)
		if errors.Is(err, proc.ErrLocked) {
			live = true
			continue
		}
		if err != nil {
			return usedHere, err
		}
		err = os.Remove(path)
		l.Unlock()
		if err != nil {
			return usedHere, err
		}
	}
	if live {
		return usedHere, nil
	}
	root := filepath.Join(dir, "root")
	dev, err := deviceOf(root)
	if errors.Is(err, fs.ErrNotExist) {
		return unused, nil
	}
	parent, parentErr := deviceOf(dir)
	if err != nil || parentErr != nil || dev == parent { // nothing is mounted there
		return unused, parentErr
	}
	return mountedElsewhere(dev, root)
}

// MountAt mounts the image on an existing empty folder and leaves it there.
func (w *Worker) MountAt(ctx context.Context, im *folder.Image, target string) (err error) {
	mt, err := w.Acquire(ctx, im)
	if err != nil {
		return err
	}
	cleanup := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, mt.Release(cleanup)) }()
	// Two commands must not find the same folder empty.
	l, err := proc.TakeLock(ctx, filepath.Join(w.Dir.Path(), "mount-at.lock"))
	if err != nil {
		return err
	}
	defer l.Unlock()
	if target, err = mountTarget(target); err != nil {
		return err
	}
	if err := bindReadOnly(mt.Root(), target); err != nil {
		return fmt.Errorf("mount on %s: %w", target, err)
	}
	if err := ctx.Err(); err != nil {
		return errors.Join(err, unix.Unmount(target, 0))
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

// mountedElsewhere reports whether a process on this machine sees the device
// mounted in a place other than root, in this mount namespace or another.
func mountedElsewhere(dev uint64, root string) (use, error) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return usedHere, err
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return usedHere, err
	}
	found := map[string]use{} // by mount namespace
	for _, p := range procs {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		ns, err := os.Readlink(filepath.Join("/proc", p.Name(), "ns/mnt"))
		if err != nil {
			continue // it has ended
		}
		u, known := found[ns]
		if !known {
			beside, err := seesBeside(p.Name(), dev, root)
			if err != nil {
				continue
			}
			if beside {
				u = usedInPassing
			}
		}
		switch {
		case u == unused:
		case ns == own:
			return usedHere, nil
		case u == usedInPassing && !isRunsc(p.Name()):
			u = usedElsewhere
		}
		found[ns] = u
	}
	most := unused
	for _, u := range found {
		most = max(most, u)
	}
	return most, nil
}

// isRunsc reports whether a process is one of runsc's, by the name it gives
// itself, such as runsc-gofer. One without arguments counts as that: its guests
// have none, nor has what is just being executed.
func isRunsc(pid string) bool {
	raw, err := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
	name, _, _ := strings.Cut(string(raw), "\x00")
	return err == nil && (name == "" || strings.HasPrefix(filepath.Base(name), "runsc"))
}

// seesBeside reports whether a process sees the device mounted elsewhere than on root.
func seesBeside(pid string, dev uint64, root string) (bool, error) {
	table, err := os.Open(filepath.Join("/proc", pid, "mountinfo"))
	if err != nil {
		return false, err
	}
	defer table.Close()
	return mountedBeside(table, dev, root)
}

// mountedBeside looks for the device in a mount table, in a place other than root.
func mountedBeside(table io.Reader, dev uint64, root string) (bool, error) {
	beside := false
	err := attach.Mounts(table, func(m attach.MountEntry) {
		beside = beside || m.Device == dev && m.Point != root
	})
	return beside, err
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
