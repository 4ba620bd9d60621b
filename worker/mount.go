package worker

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
	"quarry/store/chunk"
)

// Mounter mounts images: one EROFS mount and one shim per image, shared by all
// its users. Each user is a reference file; the last one to go unmounts.
type Mounter struct {
	Dir           Dir
	ReaderCommand []string // how to start the reader
	ShimPath      string   // the quarry-shim program
	ReadAheadKiB  int      // of the attached device; below 0 is the default
	Log           *slog.Logger
}

// ref is one user of a mount: a running process, or a bind mount.
type ref struct {
	Owner  process `json:"owner"`            // the process that made it
	Target string  `json:"target,omitempty"` // folder of a bind mount, which outlives its owner
}

// Mount is one reference to a mounted image.
type Mount struct {
	m    *Mounter
	id   chunk.Digest
	path string // reference file
}

// Root is the folder the image is mounted on: read-only, nosuid, nodev, below a
// 0700 folder.
func (mt *Mount) Root() string { return filepath.Join(mt.m.Dir.mountDir(mt.id), "root") }

// Acquire mounts the image when it is not, and takes a reference that lives as
// long as this process or until Release.
func (m *Mounter) Acquire(ctx context.Context, im *Image) (*Mount, error) {
	return m.acquire(ctx, im, "")
}

func (m *Mounter) acquire(ctx context.Context, im *Image, target string) (*Mount, error) {
	l, err := lock(ctx, m.Dir.mountDir(im.ID)+".lock")
	if err != nil {
		return nil, err
	}
	defer l.unlock()
	dir := m.Dir.mountDir(im.ID)
	if !mounted(dir) {
		if err := m.start(ctx, im, dir); err != nil {
			return nil, fmt.Errorf("mount image %s: %w", im.ID, err)
		}
	}
	owner, err := self()
	if err != nil {
		return nil, err
	}
	mt := &Mount{m: m, id: im.ID, path: filepath.Join(dir, "refs", rand.Text())}
	if err := writeJSON(mt.path, ref{Owner: owner, Target: target}); err != nil {
		return nil, errors.Join(err, m.stopIfUnused(ctx, dir))
	}
	return mt, nil
}

// Release gives the reference back and unmounts the image when it was the last.
func (mt *Mount) Release(ctx context.Context) error {
	dir := mt.m.Dir.mountDir(mt.id)
	l, err := lock(ctx, dir+".lock")
	if err != nil {
		return err
	}
	defer l.unlock()
	if err := os.Remove(mt.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return mt.m.stopIfUnused(ctx, dir)
}

// mounted reports whether the folder holds a finished mount with a live shim.
func mounted(dir string) bool {
	st, err := attach.ReadState(dir)
	return err == nil && st.Phase == attach.PhaseMounted && st.Alive()
}

// start runs a shim in dir; the caller holds the image's lock.
func (m *Mounter) start(ctx context.Context, im *Image, dir string) error {
	if err := attach.Sweep(ctx, dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "refs"), 0o700); err != nil {
		return err
	}
	if err := m.ensureReader(ctx); err != nil {
		return err
	}
	args := []string{m.ShimPath, "--socket", m.Dir.ReaderSocket(), "--export", im.ID.Hex(),
		"--size", strconv.FormatInt(im.RAFS.DeviceSize(), 10), "--dir", dir, "--log", filepath.Join(dir, "shim.log")}
	if m.ReadAheadKiB >= 0 {
		args = append(args, "--read-ahead", strconv.Itoa(m.ReadAheadKiB))
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
	cmd, err := detachedTo(args, logPath, in)
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
	return fmt.Errorf("the shim ended (%w): %s", errors.Join(err, waitErr), lastLine(logPath))
}

// stopIfUnused drops dead references and ends the shim when none is left; the
// caller holds the image's lock.
func (m *Mounter) stopIfUnused(ctx context.Context, dir string) error {
	live, err := liveRefs(dir)
	if err != nil || live > 0 {
		return err
	}
	return m.stop(ctx, dir)
}

// shimExit bounds the wait for a shim that was told to end; it gives a busy
// mount 15 s itself.
const shimExit = 20 * time.Second

func (m *Mounter) stop(ctx context.Context, dir string) error {
	st, err := attach.ReadState(dir)
	if err == nil && st.Alive() {
		if err := syscall.Kill(st.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("end shim %d: %w", st.PID, err)
		}
		deadline := time.Now().Add(shimExit)
		for st.Alive() {
			if ctx.Err() != nil || time.Now().After(deadline) {
				m.Log.WarnContext(ctx, "shim did not end, killing it", "pid", st.PID)
				syscall.Kill(st.PID, syscall.SIGKILL)
				break
			}
			time.Sleep(lockPoll)
		}
	}
	if err := attach.Sweep(ctx, dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
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
	mounts, err := mountPoints()
	if err != nil {
		return 0, err
	}
	live := 0
	for _, e := range entries {
		path := filepath.Join(dir, "refs", e.Name())
		var r ref
		if err := readJSON(path, &r); err == nil && (r.Owner.alive() || r.Target != "" && mounts[r.Target]) {
			live++
			continue
		}
		if err := os.Remove(path); err != nil {
			return 0, err
		}
	}
	return live, nil
}

// MountAt mounts the image on an existing empty folder and leaves it there.
func (m *Mounter) MountAt(ctx context.Context, im *Image, target string) error {
	target, err := mountTarget(target)
	if err != nil {
		return err
	}
	mt, err := m.acquire(ctx, im, target)
	if err != nil {
		return err
	}
	if err := bindReadOnly(mt.Root(), target); err != nil {
		return errors.Join(fmt.Errorf("mount on %s: %w", target, err), mt.Release(context.WithoutCancel(ctx)))
	}
	if err := ctx.Err(); err != nil {
		return errors.Join(err, m.UnmountAt(context.WithoutCancel(ctx), target))
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
	mounts, err := mountPoints()
	if err != nil {
		return "", err
	}
	if mounts[abs] {
		return "", fmt.Errorf("%s is already a mount point; quarry umount it first", target)
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
func (m *Mounter) UnmountAt(ctx context.Context, target string) error {
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
	refs, err := filepath.Glob(filepath.Join(m.Dir.path, "mounts", "*", "refs", "*"))
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
		if err := unix.Unmount(abs, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("umount %s: %w", target, err)
		}
		return (&Mount{m: m, id: id, path: path}).Release(ctx)
	}
	return fmt.Errorf("umount %s: %w", target, ErrNotMounted)
}

// mountPoints reads the mount points of this mount namespace.
func mountPoints() (map[string]bool, error) {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	points := map[string]bool{}
	for line := range strings.Lines(string(raw)) {
		const pointField = 4
		if f := strings.Fields(line); len(f) > pointField {
			points[unescapeMount.Replace(f[pointField])] = true
		}
	}
	return points, nil
}

// unescapeMount undoes the octal escapes of mountinfo.
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// detached starts a program in its own session, so that no terminal signal or
// end of this process reaches it.
func detached(args []string, logPath string) (*exec.Cmd, error) {
	return detachedTo(args, logPath, nil)
}

func detachedTo(args []string, logPath string, stdout *os.File) (*exec.Cmd, error) {
	logFile, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer logFile.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stderr = logFile
	cmd.Stdout = logFile
	if stdout != nil {
		cmd.Stdout = stdout
	}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd, cmd.Start()
}
