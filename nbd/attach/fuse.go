package attach

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fuseServer serves one file, read-only, at a mount point.
type fuseServer struct {
	src      Source
	deadline time.Duration
	errs     *errorLog
	fd       int            // /dev/fuse
	wake     int            // an eventfd that ends the wait for a request
	cancel   func()         // answers all reads with EIO
	loop     sync.WaitGroup // the goroutine that reads requests
	reads    sync.WaitGroup // unanswered READs
	idle     sync.Pool      // of *startedRead
	started  chan error     // nil once INIT is answered
	ended    chan struct{}  // closed when no request is read any more
	opens    atomic.Int64   // of the file, now
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
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(fd) // which ends the file system
		return nil, errors.Join(fmt.Errorf("make an eventfd: %w", err), unmountAll(ctx, dir, busyGrace, nil))
	}
	serveCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &fuseServer{
		src:      cfg.Source,
		deadline: cfg.Deadline,
		errs:     &errorLog{log: cfg.Log},
		fd:       fd,
		wake:     wake,
		cancel:   cancel,
		started:  make(chan error, 1),
		ended:    make(chan struct{}),
	}
	if src, ok := cfg.Source.(Starter); ok {
		s.cancel = func() { cancel(); src.Cancel() }
	}
	s.loop.Go(func() { s.serve(serveCtx) })
	select {
	case err = <-s.started:
	case <-s.ended:
		err = errStopped
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

// lost reports whether the server has ended by itself.
func (s *fuseServer) lost() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// stop ends the server: reads under way get EIO. The file system should be
// unmounted; what still uses it gets EIO from the kernel.
func (s *fuseServer) stop() {
	unix.Write(s.wake, binary.NativeEndian.AppendUint64(nil, 1))
	s.loop.Wait()
	s.cancel()
	s.reads.Wait()
	unix.Close(s.fd)
	unix.Close(s.wake)
}

// errStopped says that stop was called.
var errStopped = errors.New("fuse server is stopped")

// next waits for a request. The thread waits in the kernel: through Go's poller
// each request would wake two more, and each wake-up of a sleeping processor
// costs more than the request itself.
func (s *fuseServer) next(buf []byte) (int, error) {
	for {
		fds := [...]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}, {Fd: int32(s.wake), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds[:], -1); err != nil && err != unix.EINTR {
			return 0, err
		}
		if fds[1].Revents != 0 {
			return 0, errStopped
		}
		n, err := unix.Read(s.fd, buf)
		switch err {
		case nil:
			return n, nil
		case unix.EAGAIN, unix.ENOENT, unix.EINTR: // the request was withdrawn before it was read
		default:
			return 0, err
		}
	}
}

// serve answers requests until the file system is unmounted or stop is called.
// After anything else every read fails, now and later: none waits for an answer
// that does not come.
func (s *fuseServer) serve(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(s.ended)
	err := s.answerAll(ctx)
	if errors.Is(err, unix.ENODEV) || errors.Is(err, errStopped) {
		return
	}
	s.errs.report(ctx, "read fuse request", err)
	s.cancel()
	if err := s.abort(); err != nil {
		s.errs.report(ctx, "end the fuse connection", err)
	}
}

// abort ends the connection to the kernel, which then fails every request: the
// descriptor is the last one, and nothing waits on it any more. What still writes
// to it writes to nobody.
func (s *fuseServer) abort() error {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(null)
	return unix.Dup3(null, s.fd, unix.O_CLOEXEC)
}

// answerAll reads requests until one cannot be had.
func (s *fuseServer) answerAll(ctx context.Context) error {
	buf := make([]byte, requestBuffer)
	for {
		n, err := s.next(buf)
		if err != nil {
			return err
		}
		h, body, err := decodeRequest(buf[:n])
		if err != nil {
			return err
		}
		if h.opcode == opRead {
			s.startRead(ctx, h, body)
			continue
		}
		s.answer(ctx, h, body)
	}
}

// startRead answers READ, from a goroutine of its own where the source wants one,
// so that a stalled read holds up no other. The kernel bounds how many there are:
// 128 by the loop device, maxBackground otherwise; none costs a buffer.
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
	src, ok := s.src.(Starter)
	if !ok {
		s.reads.Go(func() { s.read(ctx, h, int64(q.off), n) })
		return
	}
	r, ok := s.idle.Get().(*startedRead)
	if !ok {
		r = &startedRead{s: s}
		r.Answer = r.answer
	}
	r.h, r.Off, r.N = h, int64(q.off), n
	s.reads.Add(1)
	src.Start(&r.Read)
}

// startedRead is a READ that its source keeps until it has the answer.
type startedRead struct {
	Read
	s *fuseServer
	h inHeader
}

func (r *startedRead) answer(p []byte, err error) {
	s, h := r.s, r.h
	if err != nil {
		s.errs.report(context.Background(), "read answered with EIO", err)
		s.reply(h, syscall.EIO, nil)
	} else {
		s.reply(h, 0, p)
	}
	s.idle.Put(r)
	s.reads.Done()
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
		s.opens.Add(1)
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
	case opRelease:
		s.opens.Add(-1)
		s.reply(h, 0, nil)
	case opReleasedir:
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
