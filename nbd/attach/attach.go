// Package attach binds an export to a kernel block device and mounts the EROFS
// on it. It is the kernel side of a mounted image: whatever dies, a reader of
// the mount gets the right bytes or EIO, and what is left can be swept.
package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/nbd"
)

const (
	// DefaultReadAhead is in KiB. docs/decisions/attach-read-ahead.md has the
	// measurement, attach-nbd.md beside it that of the kernel's NBD.
	DefaultReadAhead = 128
	// MaxReadAhead is in KiB: 64 MiB, twice what one read of a device can ask for.
	MaxReadAhead = 64 << 10
	// DefaultDeadline answers EIO before any timeout of the kernel's (300 s and
	// more) makes it give up the device.
	DefaultDeadline = 270 * time.Second
	// releaseGrace is how long a detach waits for the device's last user.
	releaseGrace = 5 * time.Second
	// watchInterval is how soon an unmount by somebody else is seen.
	watchInterval = 250 * time.Millisecond
)

// Source is what is attached.
type Source = nbd.Viewer

// Config says what to attach and where.
type Config struct {
	// Dir is the folder that holds the attachment, made with mode 0700 when it
	// is not there. Attach owns fuse, root and lock in it.
	Dir string
	// Lock is the folder's, when it was taken before; Dir is not read then. It is
	// Attach's from now on, also when Attach fails.
	Lock *Lock
	// Mode is how; "" means ModeAuto.
	Mode Mode
	// Source is read until Detach has returned.
	Source Source
	// DataOff is where the data that the bootstrap's device table speaks of begins
	// in Source, a multiple of 4096; 0 when there is none. Kernels before Linux
	// 6.4 do not look for it there and get it as a device of its own.
	DataOff int64
	// Split gives every kernel two devices.
	Split bool
	// NoACL mounts without POSIX ACLs, as if no file had one.
	NoACL bool
	// ReadAhead is the device's read-ahead in KiB; 0 means DefaultReadAhead,
	// less than 0 none.
	ReadAhead int
	// Deadline is for one read; EIO after it. 0 means DefaultDeadline.
	Deadline time.Duration
	// Log gets read errors. nil discards.
	Log *slog.Logger
}

// Attachment is a mounted export.
type Attachment struct {
	lock    *Lock
	binding *binding
	mode    Mode
	steps   []Step
	gone    chan struct{}
	stop    context.CancelFunc // ends watch
	watch   sync.WaitGroup
}

// folder is the layout of Config.Dir.
type folder string

func (f folder) fuse() string  { return filepath.Join(string(f), "fuse") }
func (f folder) image() string { return filepath.Join(f.fuse(), imageName) }
func (f folder) root() string  { return filepath.Join(string(f), "root") }
func (f folder) lock() string  { return filepath.Join(string(f), "lock") }

// binding is an export bound to a block device.
type binding struct {
	device    string                          // such as /dev/loop0 or /dev/nbd0
	failReads func()                          // ends the reads under way and all later ones with EIO
	bound     func() bool                     // false once the kernel has let go of it
	release   func(ctx context.Context) error // undoes the binding; the file system on it is unmounted
	abandon   func()                          // instead of release: ends the service and touches no path
}

// A binder binds cfg.Source to a block device and calls mount with it and the
// mount options it needs while it is sure to stay bound. It undoes its work when
// mount fails.
type binder func(ctx context.Context, cfg Config, dir folder, mount mountFunc) (*binding, error)

type mountFunc func(device, options string) error

// Attach sweeps what a killed process left in cfg.Dir, binds the source to a
// block device and mounts it at Root, read-only, nosuid, nodev. When ctx ends
// first, or anything fails, nothing is left. Errors: ErrInUse, ErrNoNBD.
func Attach(ctx context.Context, cfg Config) (*Attachment, error) {
	mode := cfg.Mode.Used()
	bind, err := mode.binder()
	var a *Attachment
	if err == nil {
		a, err = attachWith(ctx, cfg, bind)
	}
	if err == nil {
		a.mode = mode
	}
	if err != nil && cfg.Lock != nil {
		cfg.Lock.Release()
	}
	return a, err
}

func attachWith(ctx context.Context, cfg Config, bind binder) (*Attachment, error) {
	if size := cfg.Source.Size(); size <= 0 || size%loopBlockSize != 0 {
		return nil, fmt.Errorf("attach: device of %d bytes, want a multiple of %d", size, loopBlockSize)
	}
	if cfg.DataOff < 0 || cfg.DataOff >= cfg.Source.Size() || cfg.DataOff%loopBlockSize != 0 {
		return nil, fmt.Errorf("attach: data at %d of %d bytes, want a multiple of %d below", cfg.DataOff, cfg.Source.Size(), loopBlockSize)
	}
	switch {
	case cfg.ReadAhead == 0:
		cfg.ReadAhead = DefaultReadAhead
	case cfg.ReadAhead < 0:
		cfg.ReadAhead = 0
	}
	if cfg.Deadline == 0 {
		cfg.Deadline = DefaultDeadline
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	began := time.Now()
	lock, err := prepare(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("attach at %s: %w", cfg.Dir, err)
	}
	dir := lock.dir
	mount := Step{Name: StepMount}
	b, err := bind(ctx, cfg, dir, func(device, options string) error {
		if cfg.NoACL {
			options = strings.TrimPrefix(options+",noacl", ",")
		}
		mount.Began = time.Now()
		defer func() { mount.Ended = time.Now() }()
		if err := unix.Mount(device, dir.root(), "erofs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return fmt.Errorf("mount erofs of %s at %s: %w", device, dir.root(), err)
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("attach at %s: %w", dir, err)
		// The caller's ctx may be what ended it.
		ctx = context.WithoutCancel(ctx)
		if lost := lock.regain(ctx); lost != nil {
			return nil, errors.Join(err, lost, lock.Release())
		}
		return nil, errors.Join(err, finish(ctx, lock))
	}
	a := watched(ctx, lock, b)
	a.steps = []Step{{Name: StepAttach, Began: began, Ended: time.Now()}, mount}
	if !lock.ours() {
		return nil, errors.Join(fmt.Errorf("attach at %s: the folder was removed", dir), a.Detach(context.WithoutCancel(ctx)))
	}
	return a, nil
}

// prepare makes the folder, takes its lock and clears it of leftovers.
func prepare(ctx context.Context, cfg Config) (_ *Lock, err error) {
	lock := cfg.Lock
	if lock == nil {
		if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
			return nil, err
		}
		if lock, err = TakeLock(ctx, cfg.Dir); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil {
			lock.Release()
		}
	}()
	dir := lock.dir
	info, err := os.Stat(string(dir))
	if err != nil {
		return nil, err
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("folder %s has mode %#o, others must be shut out: chmod 700", dir, mode)
	}
	if !lock.ours() {
		return nil, fmt.Errorf("folder %s was removed", dir)
	}
	if err := sweep(ctx, dir); err != nil {
		return nil, err
	}
	if err := errors.Join(makeDir(dir.fuse()), makeDir(dir.root())); err != nil {
		return nil, err
	}
	return lock, nil
}

// makeDir makes a folder, private to root, unless it is there.
func makeDir(path string) error {
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}

func watched(ctx context.Context, lock *Lock, b *binding) *Attachment {
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	a := &Attachment{lock: lock, binding: b, gone: make(chan struct{}), stop: stop}
	a.watch.Go(func() {
		for a.binding.bound() && a.lock.ours() {
			if sleep(ctx, watchInterval) != nil {
				return
			}
		}
		close(a.gone)
	})
	return a
}

// Root is where the file system is mounted.
func (a *Attachment) Root() string { return a.lock.dir.root() }

// Steps says when the parts of the attach began and ended.
func (a *Attachment) Steps() []Step { return a.steps }

// Mode is how the export is attached, never ModeAuto.
func (a *Attachment) Mode() Mode { return a.mode }

// Device is the block device's path; in ModeFile, the file's.
func (a *Attachment) Device() string { return a.binding.device }

// WriteState writes the record into the folder while that is this attachment's.
func (a *Attachment) WriteState(s State) error {
	if !a.lock.ours() {
		return nil // nobody looks for this attachment there
	}
	return s.Write(string(a.lock.dir))
}

// Gone is closed when somebody else has unmounted the file system everywhere:
// at Root and in every mount namespace that had a copy; or has removed the
// folder's lock. Detach is still due.
func (a *Attachment) Gone() <-chan struct{} { return a.gone }

// Detach unmounts and releases everything, at the latest when ctx ends. While
// the file system is busy it keeps serving for a few seconds; then it detaches
// lazily, and who still reads gets EIO. Called once.
func (a *Attachment) Detach(ctx context.Context) error {
	a.stop()
	a.watch.Wait()
	if err := a.lock.regain(ctx); err != nil {
		// What is in the folder by now was attached by another, who swept this.
		a.binding.abandon()
		return errors.Join(err, a.lock.Release())
	}
	return errors.Join(
		unmountAll(ctx, a.Root(), busyGrace, a.binding.failReads),
		a.binding.release(ctx),
		finish(ctx, a.lock),
	)
}

// finish removes what prepare made and lets the folder go. A folder that lost
// its lock file was being removed, so that is done as far as it can be.
func finish(ctx context.Context, lock *Lock) error {
	err := errors.Join(sweep(ctx, lock.dir), lock.dir.removeCounts())
	if lock.regained {
		err = errors.Join(err, removeFile(lock.dir.lock()))
		unix.Rmdir(string(lock.dir))
	}
	return errors.Join(err, lock.Release())
}
