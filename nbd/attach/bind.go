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
	var n int
	srv, err := serveFile(ctx, cfg, dir, func() (err error) {
		n, err = mountLoops(cfg, dir, mount)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &binding{
		device:    loopPath(n),
		bound:     func() bool { return !srv.lost() && loopBound(n, dir.image()) },
		release:   func(ctx context.Context) error { return releaseFile(ctx, srv, dir) },
		failReads: srv.cancel,
		abandon:   srv.stop,
	}, nil
}

// bindFile is the binder that has the EROFS on the FUSE file without a device.
// When this process is killed, reads fail with ENOTCONN in place of EIO.
func bindFile(ctx context.Context, cfg Config, dir folder, mount mountFunc) (*binding, error) {
	if cfg.DataOff > 0 && (cfg.Split || !flattens()) {
		return nil, errors.New("attach mode file takes bootstrap and data as one, Linux 6.12 or newer: attach through FUSE (--attach fuse)")
	}
	srv, err := serveFile(ctx, cfg, dir, func() error {
		err := mount(dir.image(), "")
		if errors.Is(err, unix.ENOTBLK) {
			err = fmt.Errorf("%w: this kernel mounts no EROFS from a file: attach through FUSE (--attach fuse)", err)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &binding{
		device:    dir.image(),
		bound:     func() bool { return !srv.lost() && srv.opens.Load() > 0 },
		release:   func(ctx context.Context) error { return releaseFile(ctx, srv, dir) },
		failReads: srv.cancel,
		abandon:   srv.stop,
	}, nil
}

// serveFile starts the FUSE server and calls mount, in isolation, to mount what
// it serves. It undoes everything when that fails or ctx ends.
func serveFile(ctx context.Context, cfg Config, dir folder, mount func() error) (*fuseServer, error) {
	srv, err := startFUSE(ctx, dir.fuse(), cfg)
	if err != nil {
		return nil, err
	}
	// The calls below wait for reads of the source; when ctx ends, they fail.
	stop := context.AfterFunc(ctx, srv.cancel)
	err = isolated(mount)
	if !stop() && err == nil {
		err = errors.Join(ctx.Err(), unmountAll(ctx, dir.root(), busyGrace, nil))
	}
	if err != nil {
		return nil, errors.Join(err, releaseFile(context.WithoutCancel(ctx), srv, dir))
	}
	return srv, nil
}

// releaseFile frees the loop devices on the file, unmounts it and ends its server.
func releaseFile(ctx context.Context, srv *fuseServer, dir folder) error {
	loopCtx, cancel := context.WithTimeout(ctx, releaseGrace)
	defer cancel()
	err := errors.Join(freeLoops(loopCtx, dir.image()), unmountAll(ctx, dir.fuse(), busyGrace, nil))
	srv.stop()
	return err
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
