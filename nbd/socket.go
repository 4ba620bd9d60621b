package nbd

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// payloadTimeout is how long a server may take between a reply's header and
	// the last byte of its payload. It has the whole payload when it writes the
	// header, so a longer pause means that it is stuck or gone.
	payloadTimeout = 30 * time.Second
)

// errFull says that the server has not taken earlier requests yet.
var errFull = errors.New("no room for a request")

// socket is a connection that is read with plain blocking calls, by one goroutine
// at a time, whose thread they keep. Go's poller would wake two more threads for each
// message, and each wake-up of a sleeping processor costs more than the message itself.
type socket struct {
	fd    int
	until time.Time // when the bytes that are being read must have come; of the reading goroutine
	// patience bounds every Read: EAGAIN. In ms, none if negative.
	patience int

	mu   sync.Mutex // held while a request is sent; guards open
	open bool       // the descriptor is this socket's
}

// newSocket takes conn over: as long as Go's poller knows the descriptor, it
// wakes a thread for whatever arrives.
func newSocket(conn net.Conn) (*socket, error) {
	defer conn.Close()
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("connection of type %T has no descriptor", conn)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &socket{open: true, patience: -1}
	ctlErr := raw.Control(func(fd uintptr) { s.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(ctlErr, err); err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(s.fd, false); err != nil {
		unix.Close(s.fd)
		return nil, err
	}
	return s, nil
}

// Read waits for bytes, as long as patience says.
func (s *socket) Read(p []byte) (int, error) {
	for {
		if !s.until.IsZero() && time.Now().After(s.until) {
			return 0, fmt.Errorf("the rest of a reply did not come in %v", payloadTimeout)
		}
		// A thread that waits in read(2) itself is also woken when the other side
		// has taken bytes that this side sent.
		fds := [...]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
		switch n, err := unix.Poll(fds[:], s.patience); {
		case err == unix.EINTR:
			continue
		case err != nil:
			return 0, err
		case n == 0:
			return 0, unix.EAGAIN
		}
		n, err := unix.Read(s.fd, p)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// send writes a whole request and never waits: errFull.
func (s *socket) send(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return net.ErrClosed
	}
	n, err := unix.SendmsgN(s.fd, b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	switch {
	case err == unix.EAGAIN:
		return errFull
	case err == nil && n < len(b):
		return fmt.Errorf("sent %d bytes of a request", n)
	}
	return err
}

// Write waits until all of b is taken. Only one thread calls it at a time, and
// none when release is called.
func (s *socket) Write(b []byte) (int, error) {
	for sent := 0; sent < len(b); {
		n, err := unix.SendmsgN(s.fd, b[sent:], nil, nil, unix.MSG_NOSIGNAL)
		if err != nil && err != unix.EINTR {
			return sent, err
		}
		sent += max(n, 0)
	}
	return len(b), nil
}

// shutdown ends the connection; Read and Write return.
func (s *socket) shutdown() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open {
		unix.Shutdown(s.fd, unix.SHUT_RDWR)
	}
}

// release closes the descriptor, after the last Read and Write.
func (s *socket) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = false
	unix.Close(s.fd)
}
