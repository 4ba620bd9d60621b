package attach

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"quarry/nbd"
)

// section is a part of a source as a device of its own.
type section struct {
	src       Source
	off, size int64
}

func (s section) Size() int64 { return s.size }

func (s section) View(ctx context.Context, off int64, n int, fn func(p []byte) error) error {
	return s.src.View(ctx, s.off+off, n, fn)
}

// nbdDevice is a kernel NBD device that this process serves.
type nbdDevice struct {
	path  string
	conn  net.Conn
	ended chan struct{} // closed when the kernel has let go of its end
}

// nbdServer serves the devices of one attachment.
type nbdServer struct {
	backend backend
	errs    *errorLog
	cancel  context.CancelFunc
	devices []*nbdDevice
	serving sync.WaitGroup
}

// bindNBD binds the source to devices of the kernel's NBD client.
func bindNBD(ctx context.Context, cfg Config, dir folder, mount mountFunc) (*binding, error) {
	b, err := backendOf(dir)
	if err != nil {
		return nil, err
	}
	serveCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	srv := &nbdServer{backend: b, errs: &errorLog{log: cfg.Log}, cancel: cancel}
	if err = srv.connect(ctx, serveCtx, cfg); err == nil {
		// The calls below wait for reads of the source; when ctx ends, they fail.
		stop := context.AfterFunc(ctx, cancel)
		err = isolated(func() error { return srv.mount(mount) })
		if !stop() && err == nil {
			err = errors.Join(ctx.Err(), unmountAll(ctx, dir.root(), busyGrace, nil))
		}
	}
	if err != nil {
		return nil, errors.Join(err, srv.release(context.WithoutCancel(ctx)))
	}
	return &binding{
		device:    srv.devices[0].path,
		failReads: cancel,
		bound:     srv.bound,
		release:   srv.release,
		abandon:   srv.abandon,
	}, nil
}

// connect makes the device, or the bootstrap's and the data's.
func (s *nbdServer) connect(ctx, serveCtx context.Context, cfg Config) error {
	parts := []section{{cfg.Source, 0, cfg.Source.Size()}}
	if cfg.DataOff > 0 && (cfg.Split || !flattens()) {
		parts = []section{{cfg.Source, 0, cfg.DataOff}, {cfg.Source, cfg.DataOff, cfg.Source.Size() - cfg.DataOff}}
	}
	g, err := openNBD()
	if err != nil {
		return err
	}
	defer g.close()
	for _, part := range parts {
		if err := s.connectOne(ctx, serveCtx, g, part, cfg); err != nil {
			return err
		}
	}
	return nil
}

func (s *nbdServer) connectOne(ctx, serveCtx context.Context, g *genl, part section, cfg Config) error {
	ours, kernels, err := socketPair()
	if err != nil {
		return err
	}
	n, err := g.connectNBD(ctx, kernels, part.size, cfg.Deadline, s.backend)
	// The kernel has its own reference; with this one gone, the end of the kernel's
	// is the end of the connection.
	kernels.Close()
	if err != nil {
		ours.Close()
		return err
	}
	d := &nbdDevice{path: nbdPath(n), conn: ours, ended: make(chan struct{})}
	s.devices = append(s.devices, d)
	t := &nbd.Transmission{
		Conn: ours, Source: part, Deadline: cfg.Deadline,
		OnEIO: func(ctx context.Context, err error) { s.errs.report(ctx, "read answered with EIO", err) },
	}
	s.serving.Go(func() {
		defer close(d.ended)
		if err := t.Serve(serveCtx); err != nil {
			s.errs.report(serveCtx, "serve "+d.path, err)
		}
	})
	return tuneNBD(d.path, part.size, cfg.ReadAhead)
}

// socketPair returns a connection and the other end of it as a file, which the
// kernel waits on as long as it likes.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	ours, kernels := os.NewFile(uintptr(fds[0]), "nbd"), os.NewFile(uintptr(fds[1]), "nbd kernel")
	defer ours.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		kernels.Close()
		return nil, nil, err
	}
	return conn, kernels, nil
}

// mount mounts the file system while it holds the devices open, so that they
// stay this attachment's: what is not in use could be disconnected by another
// and become another's. Called in isolation.
func (s *nbdServer) mount(mount mountFunc) error {
	for _, d := range s.devices {
		fd, err := unix.Open(d.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) { // in a container whose /dev has only some
			return fmt.Errorf("%w: the others are taken, and %s is not in this /dev: put it there, or attach through FUSE (--attach fuse)", ErrNoNBD, d.path)
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", d.path, err)
		}
		defer unix.Close(fd)
		if got := nbdBackend(d.path); got != s.backend.String() {
			return fmt.Errorf("%s became another's: its backend is %q", d.path, got)
		}
	}
	options := ""
	if len(s.devices) > 1 {
		options = "device=" + s.devices[1].path
	}
	return mount(s.devices[0].path, options)
}

// bound reports whether the file system is mounted somewhere, in whatever mount
// namespace, on devices that the kernel still has connected.
func (s *nbdServer) bound() bool {
	for _, d := range s.devices {
		select {
		case <-d.ended:
			return false
		default:
		}
	}
	return erofsMounted(s.devices[0].path)
}

// erofsMounted reports whether an EROFS on the device is mounted anywhere, which
// EROFS itself says since Linux 5.16.
func erofsMounted(device string) bool {
	_, err := os.Stat("/sys/fs/erofs/" + device[len("/dev/"):])
	return err == nil
}

// release disconnects the devices and ends the service. A device that others
// still use goes free with them, and gives them EIO until then.
func (s *nbdServer) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, releaseGrace)
	defer cancel()
	err := disconnectNBDs(ctx, s.backend, false)
	s.stop()
	return errors.Join(err, awaitNBDs(ctx, s.backend, false))
}

// stop ends the service: what the kernel still waits for then waits for a
// disconnect.
func (s *nbdServer) stop() {
	s.cancel()
	for _, d := range s.devices {
		d.conn.Close()
	}
	s.serving.Wait()
}

func (s *nbdServer) abandon() {
	ctx, cancel := context.WithTimeout(context.Background(), releaseGrace)
	defer cancel()
	// Only what this very process has connected, if another has not done it yet.
	if err := disconnectNBDs(ctx, s.backend, false); err != nil {
		s.errs.report(ctx, "disconnect", err)
	}
	s.stop()
}
