package sandboxes

import (
	"container/list"
	"net"
	"net/http"
	"sync"
)

// Limit returns l for s with at most limit connections at once. What comes beyond it
// waits, but not for connections that wait for nothing: for each that comes, the one that
// has been without a request for longest is closed, whether or not it ever had one. s must
// not be serving yet, and its ConnState is Limit's.
func Limit(l net.Listener, s *http.Server, limit int) net.Listener {
	b := &bounded{Listener: l, limit: limit, room: make(chan struct{}, 1), closed: make(chan struct{})}
	s.ConnState = b.note
	return b
}

type bounded struct {
	net.Listener
	limit  int
	room   chan struct{} // something may have left, or be without a request
	closed chan struct{}
	once   sync.Once

	mu   sync.Mutex // guards what follows, and idle of each boundedConn
	open int
	idle list.List // of *boundedConn without a request, the one that has been so for longest first
}

// boundedConn is one that counts.
type boundedConn struct {
	net.Conn
	l    *bounded
	once sync.Once
	idle *list.Element // nil while it has a request
}

// Accept implements net.Listener. One connection is taken beyond the limit, so that those
// that are idle stay until somebody else comes.
func (b *bounded) Accept() (net.Conn, error) {
	c, err := b.Listener.Accept()
	if err != nil {
		return nil, err
	}
	for {
		ok, oldest := b.admit()
		if ok {
			return &boundedConn{Conn: c, l: b}, nil
		}
		if oldest != nil {
			oldest.Close()
			continue
		}
		select {
		case <-b.room:
		case <-b.closed:
			c.Close()
			return nil, net.ErrClosed
		}
	}
}

// admit counts a connection in, or names the one to close for it, if there is one.
func (b *bounded) admit() (ok bool, oldest *boundedConn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open < b.limit {
		b.open++
		return true, nil
	}
	if e := b.idle.Front(); e != nil {
		oldest = e.Value.(*boundedConn)
		oldest.forget()
	}
	return false, oldest
}

// Close implements net.Listener.
func (b *bounded) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.Listener.Close()
}

// note takes what the server says of a connection.
func (b *bounded) note(nc net.Conn, state http.ConnState) {
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok { // of TLS
		nc = t.NetConn()
	}
	c, ok := nc.(*boundedConn)
	if !ok {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c.forget()
	if state == http.StateIdle || state == http.StateNew {
		c.idle = b.idle.PushBack(c)
		b.signal()
	}
}

// signal has Accept look again.
func (b *bounded) signal() {
	select {
	case b.room <- struct{}{}:
	default:
	}
}

// forget takes it from those that are idle. l.mu is held.
func (c *boundedConn) forget() {
	if c.idle != nil {
		c.l.idle.Remove(c.idle)
		c.idle = nil
	}
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	c.once.Do(func() {
		c.l.mu.Lock()
		defer c.l.mu.Unlock()
		c.forget()
		c.l.open--
		c.l.signal()
	})
	return c.Conn.Close()
}
