package attach

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fuseServer serves one file, read-only, at a mount point.
type fuseServer struct {
	src      Source
	deadline time.Duration
	errs     *errorLog
	dev      *os.File // /dev/fuse, for reading requests
	fd       int      // the same descriptor, for replies; dev closes it
	cancel   context.CancelFunc
	loop     sync.WaitGroup // the goroutine that reads requests
	reads    sync.WaitGroup // those that answer READ
	started  chan error     // nil once INIT is answered
}

// startFUSE mounts the file at dir and serves it until stop.
func startFUSE(ctx context.Context, dir string, cfg Config) (*fuseServer, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/fuse: %w", err)
	}
	opts := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,max_read=%d", fd, maxReadPages*4096)
	if err := unix.Mount("quarry", dir, "fuse.quarry", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, opts); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("mount fuse at %s: %w", dir, err)
	}
	serveCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &fuseServer{
		src:      cfg.Source,
		deadline: cfg.Deadline,
		errs:     &errorLog{log: cfg.Log},
		dev:      os.NewFile(uintptr(fd), "/dev/fuse"),
		fd:       fd,
		cancel:   cancel,
		started:  make(chan error, 1),
	}
	s.loop.Go(func() { s.serve(serveCtx) })
	select {
	case err = <-s.started:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		unmountAll(ctx, dir, busyGrace, nil)
		s.stop()
		return nil, fmt.Errorf("start fuse at %s: %w", dir, err)
	}
	return s, nil
}

// stop ends the server: reads under way get EIO. The file system should be
// unmounted; what still uses it gets EIO from the kernel.
func (s *fuseServer) stop() {
	s.dev.SetReadDeadline(time.Unix(1, 0)) // the loop may be waiting for a request
	s.loop.Wait()
	s.cancel()
	s.reads.Wait()
	s.dev.Close()
}

// serve reads requests until the file system is unmounted or stop is called.
func (s *fuseServer) serve(ctx context.Context) {
	buf := make([]byte, requestBuffer)
	for {
		n, err := s.dev.Read(buf)
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINTR):
			continue // the request was withdrawn before it was read
		case errors.Is(err, unix.ENODEV), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, io.EOF):
			return
		case err != nil:
			s.errs.report(ctx, "read fuse request", err)
			return
		}
		h, body, err := decodeRequest(buf[:n])
		if err != nil {
			s.errs.report(ctx, "read fuse request", err)
			return
		}
		if h.opcode == opRead {
			s.startRead(ctx, h, body)
			continue
		}
		s.answer(ctx, h, body)
	}
}

// startRead answers READ from a goroutine of its own, so that a stalled read
// holds up no other. The kernel bounds how many there are: 128 by the loop
// device, maxBackground otherwise; each costs one small stack and no buffer.
func (s *fuseServer) startRead(ctx context.Context, h inHeader, body []byte) {
	q, ok := decodeRead(body)
	size := uint64(s.src.Size())
	switch {
	case !ok || h.nodeID != imageID || q.size > maxReadPages*4096:
		s.reply(h, syscall.EINVAL, nil)
		return
	case q.off >= size:
		s.reply(h, 0, nil)
		return
	}
	n := int(min(uint64(q.size), size-q.off))
	s.reads.Go(func() { s.read(ctx, h, int64(q.off), n) })
}

func (s *fuseServer) read(ctx context.Context, h inHeader, off int64, n int) {
	ctx, cancel := context.WithTimeout(ctx, s.deadline)
	defer cancel()
	err := s.src.View(ctx, off, n, func(p []byte) error {
		s.reply(h, 0, p)
		return nil
	})
	if err != nil {
		s.errs.report(ctx, "read answered with EIO", err)
		s.reply(h, syscall.EIO, nil)
	}
}

// answer serves everything but READ; all of it is at hand.
func (s *fuseServer) answer(ctx context.Context, h inHeader, body []byte) {
	size := s.src.Size()
	switch h.opcode {
	case opInit:
		out, err := initReply(body)
		if err != nil {
			s.reply(h, syscall.EPROTO, nil)
		} else {
			s.reply(h, 0, out)
		}
		s.started <- err
	case opLookup:
		if name, _, _ := bytes.Cut(body, []byte{0}); h.nodeID != rootID || string(name) != imageName {
			s.reply(h, syscall.ENOENT, nil)
			return
		}
		s.reply(h, 0, entryReply(imageID, size))
	case opGetattr:
		s.reply(h, 0, attrReply(h.nodeID, size))
	case opOpen:
		s.reply(h, 0, openReply(openDirectIO))
	case opOpendir:
		s.reply(h, 0, openReply(0))
	case opReaddir:
		q, ok := decodeRead(body)
		if out := direntsReply(q.off); ok && len(out) <= int(q.size) {
			s.reply(h, 0, out)
			return
		}
		s.reply(h, syscall.EINVAL, nil)
	case opStatfs:
		s.reply(h, 0, make([]byte, 80))
	case opRelease, opReleasedir:
		s.reply(h, 0, nil)
	case opForget, opBatchForget: // have no reply
	case opSetattr, opSymlink, opMknod, opMkdir, opUnlink, opRmdir, opRename, opRename2, opLink, opWrite,
		opSetxattr, opRemovexattr, opCreate, opFallocate:
		s.reply(h, syscall.EROFS, nil)
	default:
		s.reply(h, syscall.ENOSYS, nil)
	}
}

// reply sends a whole reply in one call. Its error means that the kernel no
// longer wants it: the reader was killed, or the file system is gone.
func (s *fuseServer) reply(h inHeader, errno syscall.Errno, body []byte) {
	bufs := [][]byte{outHeader(h.unique, errno, len(body))}
	if len(body) > 0 {
		bufs = append(bufs, body)
	}
	unix.Writev(s.fd, bufs)
}

// errorLog writes read errors, at most one a second: a dead reader makes
// thousands, all alike.
type errorLog struct {
	log *slog.Logger

	mu      sync.Mutex // guards what follows
	last    time.Time
	skipped int
}

func (e *errorLog) report(ctx context.Context, msg string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if time.Since(e.last) < time.Second {
		e.skipped++
		return
	}
	e.log.ErrorContext(ctx, msg, "err", err, "not_logged_before", e.skipped)
	e.last, e.skipped = time.Now(), 0
}
