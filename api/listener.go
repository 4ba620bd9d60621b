package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// MaxConnections is how many connections a listener has at once by default: 4096
	// that wait for a request hold some 20 KiB each, 80 MiB together.
	MaxConnections = 4096
	// maxRefusing bounds the connections beyond the limit that are told so. What
	// comes while all of them are is closed at once.
	maxRefusing = 64
	// writeStep is what a client must take in each Config.StallTimeout, so that the
	// time is the same for whatever is sent: 64 KiB in 10 s are 6.4 KiB a second,
	// which a link shared by all slots still gives each of them.
	writeStep = 64 << 10
)

// Listen returns l with the bounds that keep clients from holding the server:
// connections at once, at most limit (0 = MaxConnections), and the time in which
// one must take what is written to it. A client beyond the limit has its first
// request answered with too_many_connections. It goes below TLS.
func (h *Handler) Listen(l net.Listener, limit int) net.Listener {
	setDefault(&limit, MaxConnections)
	return &listener{Listener: l, shared: h.shared, limit: limit}
}

type listener struct {
	net.Listener
	shared *shared
	limit  int

	mu       sync.Mutex // guards the two below
	open     int        // connections within the limit
	refusing int        // and beyond it
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if refused, ok := l.admit(); ok {
			return &conn{Conn: c, listener: l, refused: refused}, nil
		}
		l.shared.metrics.refused("too_many_connections")
		c.Close() // whatever it says of a connection that nobody has yet
	}
}

// admit counts a connection in, and says whether it is one to refuse.
func (l *listener) admit() (refused, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.open < l.limit:
		l.open++
		l.shared.metrics.connections.Inc()
		return false, true
	case l.refusing < maxRefusing:
		l.refusing++
		return true, true
	}
	return true, false
}

func (l *listener) left(refused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if refused {
		l.refusing--
		return
	}
	l.open--
	l.shared.metrics.connections.Dec()
}

// conn is a connection that gives up on a client that takes nothing.
type conn struct {
	net.Conn
	listener *listener
	refused  bool // its first request is to be answered that there are too many
	once     sync.Once
	busy     atomic.Int32 // requests being handled
	head     atomic.Bool  // bytes came of a request that no handler has seen
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.busy.Load() == 0 {
		c.head.Store(true)
	}
	return n, err
}

// Write implements net.Conn. However much is written at once, the client has the
// same time for each writeStep of it.
func (c *conn) Write(p []byte) (int, error) {
	for n := 0; ; {
		_ = c.Conn.SetWriteDeadline(time.Now().Add(c.listener.shared.cfg.StallTimeout)) // fails as the write will
		m, err := c.Conn.Write(p[n:])
		n += m
		if m < writeStep || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
}

// CloseWrite ends what is sent, for the server that waits for the client to have
// read an error. Not every kind of connection has it.
func (c *conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.once.Do(func() {
		c.listener.left(c.refused)
		if c.head.Load() {
			// Too large, too slow or no HTTP: net/http has answered, or has hung up.
			c.listener.shared.metrics.refused("bad_request_head")
		}
	})
	return c.Conn.Close()
}

// connKey has a request's *conn in its context.
type connKey struct{}

// connContext puts it there, from below TLS where there is any.
func connContext(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn()
	}
	return context.WithValue(ctx, connKey{}, c)
}

// beginOn notes that a request of a connection has reached the handler, and returns
// what to call at its end. The error is that of a connection beyond the limit.
func beginOn(ctx context.Context) (done func(), over error) {
	c, ok := ctx.Value(connKey{}).(*conn)
	if !ok {
		return func() {}, nil
	}
	c.head.Store(false)
	c.busy.Add(1)
	if c.refused {
		over = fmt.Errorf("%w: all %d are in use, try again", ErrTooManyConnections, c.listener.limit)
	}
	return func() { c.busy.Add(-1) }, over
}
