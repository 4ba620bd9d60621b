package attach

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// bindFUSE is the binder that works on every kernel: loop devices on a file that
// this process serves by FUSE.
func bindFUSE(ctx context.Context, cfg Config, dir folder, mount mountFunc) (*binding, error) {
	srv, err := startFUSE(ctx, dir.fuse(), cfg)
	if err != nil {
		return nil, err
	}
	// The calls below wait for reads of the source; when ctx ends, they fail.
	stop := context.AfterFunc(ctx, srv.cancel)
	var n int
	err = isolated(func() (err error) {
		n, err = mountLoops(cfg, dir, mount)
		return err
	})
	release := func(ctx context.Context) error {
		loopCtx, cancel := context.WithTimeout(ctx, releaseGrace)
		defer cancel()
		err := errors.Join(freeLoops(loopCtx, dir.image()), unmountAll(ctx, dir.fuse(), busyGrace, nil))
		srv.stop()
		return err
	}
	if !stop() && err == nil {
		err = errors.Join(ctx.Err(), unmountAll(ctx, dir.root(), busyGrace, nil))
	}
	if err != nil {
		return nil, errors.Join(err, release(context.WithoutCancel(ctx)))
	}
	return &binding{
		device:    loopPath(n),
		bound:     func() bool { return loopBound(n, dir.image()) },
		release:   release,
		failReads: srv.cancel,
		abandon:   srv.stop,
	}, nil
}

// mountLoops binds the image to a loop device, or to two, and mounts it. It
// returns the one the file system is on. Called in isolation.
func mountLoops(cfg Config, dir folder, mount mountFunc) (int, error) {
	n, fd, err := bindLoop(dir.image(), 0, cfg.ReadAhead)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	if cfg.DataOff == 0 || !cfg.Split && flattens() {
		return n, mount(loopPath(n), "")
	}
	data, dataFD, err := bindLoop(dir.image(), cfg.DataOff, cfg.ReadAhead)
	if err != nil {
		return 0, err
	}
	defer unix.Close(dataFD)
	return n, mount(loopPath(n), "device="+loopPath(data))
}

// flattens reports whether this kernel finds the data of an image behind its
// bootstrap on one device, as Linux does since 6.4.
func flattens() bool {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return false
	}
	var major, minor int
	fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	return major > 6 || major == 6 && minor >= 4
}
