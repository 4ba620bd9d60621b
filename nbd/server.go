package nbd

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/semaphore"
)

const (
	// DefaultInFlight is 512 reads of 128 KiB: four times what a loop device or
	// a kernel NBD queue (128 deep) can have open, so one connection's stalled
	// reads never fill it.
	DefaultInFlight = 64 << 20
	// DefaultConns is several connections for each of the 64 images a worker
	// is made for. Each keeps a thread.
	DefaultConns = 512
	// minCharge is what a short read counts, so that the bound on bytes bounds
	// requests (to 4096) as well.
	minCharge = 16 << 10
	// cachePiece is how much of a CACHE request is read at a time.
	cachePiece = 256 << 10
	// handshakeTimeout is for the whole handshake, opening the export included.
	handshakeTimeout = 30 * time.Second
)

// Server serves exports. The fields are set before Serve and not changed after.
type Server struct {
	// Exports opens an export. Its error goes to the client; one that wraps
	// ErrUnknownExport says there is none of that name. Called once or more for
	// each connection, concurrently. A device that is an io.Closer is closed when
	// the connection it was opened for has ended, as often as it was returned.
	Exports func(ctx context.Context, name string) (Device, error)
	// Names answers LIST; nil means an empty list.
	Names func() []string
	// InFlight bounds the bytes of the reads under way on one connection; 0
	// means DefaultInFlight, and it is at least MaxPayload. A connection at its
	// bound is not read from.
	InFlight int64
	// Conns bounds the connections; more are closed at once. 0 means DefaultConns.
	Conns int
	// Connected is told 1 for each connection and -1 when it has ended; nil if
	// nobody counts.
	Connected func(delta int)
	// Log says why connections ended. nil discards.
	Log *slog.Logger

	buffers bufferPool
}

// Serve accepts connections, of sockets that have a descriptor, until ctx ends,
// then closes l and every connection, waits for their reads, and returns nil. It
// returns an error only when l fails.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel() // before Wait, which otherwise waits for idle clients
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	maxConns := s.Conns
	if maxConns == 0 {
		maxConns = DefaultConns
	}
	slots := semaphore.NewWeighted(int64(maxConns))
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED) {
				// Out of descriptors: wait for some to be freed.
				s.log().WarnContext(ctx, "nbd accept", "err", err)
				time.Sleep(50 * time.Millisecond)
				continue
			}
			return fmt.Errorf("accept nbd connection: %w", err)
		}
		if !slots.TryAcquire(1) {
			s.log().WarnContext(ctx, "nbd connection refused", "limit", maxConns)
			c.Close()
			continue
		}
		s.connected(1)
		conns.Go(func() {
			defer slots.Release(1)
			defer s.connected(-1)
			s.serveConn(ctx, c)
		})
	}
}

func (s *Server) connected(delta int) {
	if s.Connected != nil {
		s.Connected(delta)
	}
}

func (s *Server) log() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

// opened are the devices that one connection has asked for.
type opened struct {
	srv     *Server
	devices []Device
}

func (o *opened) open(ctx context.Context, name string) (Device, error) {
	if len(name) > MaxName {
		return nil, fmt.Errorf("%w: its name has %d bytes", ErrUnknownExport, len(name))
	}
	dev, err := o.srv.Exports(ctx, name)
	if err == nil {
		o.devices = append(o.devices, dev)
	}
	return dev, err
}

// close closes the devices that want to know when they are no longer used.
func (o *opened) close() {
	for _, dev := range o.devices {
		if c, ok := dev.(io.Closer); ok {
			c.Close()
		}
	}
}

// serveConn owns c: it is closed when serveConn returns, and every read of it
// has ended.
func (s *Server) serveConn(ctx context.Context, c net.Conn) {
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Closing unblocks whatever waits on the connection when the server stops.
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	br := bufio.NewReader(c)
	devices := &opened{srv: s}
	defer devices.close()
	sess, err := s.handshake(ctx, c, br, devices)
	if err != nil {
		if !errors.Is(err, errHandshakeOver) && !errors.Is(err, io.EOF) {
			s.log().InfoContext(ctx, "nbd handshake ended", "err", err)
		}
		return
	}
	if err := s.transmit(ctx, cancel, c, br, sess); err != nil && !errors.Is(err, io.EOF) {
		s.log().InfoContext(ctx, "nbd connection ended", "export", sess.name, "err", err)
	}
}

// transmit serves the requests of a connection after its handshake, of which br
// may hold the first; cancel ends ctx and with it every read.
func (s *Server) transmit(ctx context.Context, cancel context.CancelFunc, c net.Conn, br *bufio.Reader, sess *session) error {
	sock, err := newSocket(c)
	if err != nil {
		return err
	}
	defer sock.release()
	stop := context.AfterFunc(ctx, sock.shutdown)
	defer stop()
	early, err := br.Peek(br.Buffered())
	if err != nil {
		return err
	}
	inFlight := max(s.InFlight, MaxPayload)
	if s.InFlight == 0 {
		inFlight = DefaultInFlight
	}
	r := bufio.NewReader(io.MultiReader(bytes.NewReader(early), sock))
	sc := &serverConn{sess: sess, r: r, w: sock, budget: semaphore.NewWeighted(inFlight), bufs: &s.buffers, cancel: cancel, ended: make(chan error, 1)}
	return sc.serve(ctx)
}

func (s *Server) handshake(ctx context.Context, c net.Conn, r io.Reader, devices *opened) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	sess, err := haggle(ctx, devices, r, c)
	if err != nil {
		return nil, err
	}
	return sess, c.SetDeadline(time.Time{})
}
