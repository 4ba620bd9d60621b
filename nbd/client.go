package nbd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
)

const (
	// maxCalls bounds the reads of View that have no answer.
	maxCalls = 1024
	// maxFull is how often a socket may have no room although every request that
	// was sent is answered: none that is read takes any.
	maxFull = 100
)

// ConnError says that the connection to the server is gone: every read that was
// in flight ended with it, and so does every later one.
type ConnError struct {
	Err error // what ended it
}

func (e *ConnError) Error() string { return fmt.Sprintf("nbd connection lost: %v", e.Err) }

// Unwrap returns what ended the connection.
func (e *ConnError) Unwrap() error { return e.Err }

// ReplyError is the server's error reply to one read.
type ReplyError struct {
	Errno syscall.Errno
	Off   int64
	Len   int
}

func (e *ReplyError) Error() string {
	return fmt.Sprintf("nbd read of %d bytes at %d: server answered %v", e.Len, e.Off, e.Errno)
}

// Unwrap returns the error number.
func (e *ReplyError) Unwrap() error { return e.Errno }

// Client is a connection to one export. It keeps 1024 reads and more in flight;
// replies come in any order.
type Client struct {
	offer offer
	sock  *socket
	slots chan struct{} // one token for each unanswered View
	done  chan struct{} // closed when err is set

	mu     sync.Mutex // guards what follows
	calls  map[uint64]*Call
	unsent []*Call // of them, those that the socket had no room for
	last   uint64  // cookie of the newest call
	err    error   // *ConnError once the connection is gone
}

// Call is one read that Start begins. It is the caller's memory, and may be
// started again when it has ended.
type Call struct {
	Off int64
	N   int // at most MaxPayload
	// End is called once: with the N bytes, which are right as long as the server
	// is and belong to the client again when End returns; or with *ReplyError or
	// *ConnError. It is called by any goroutine, also by Start itself, and must not
	// block.
	End func(p []byte, err error)

	cookie uint64
	state  callState // guarded by Client.mu
	unsent bool      // in Client.unsent; guarded by Client.mu
}

type callState uint8

const (
	callEnded     callState = iota // not in Client.calls: new, or about to end, or ended
	callWaiting                    // in Client.calls
	callAbandoned                  // in Client.calls until the reply has come; End is not called
)

func newClient(conn net.Conn, o offer) (*Client, error) {
	sock, err := newSocket(conn)
	if err != nil {
		return nil, err
	}
	sock.patience = int(payloadTimeout.Milliseconds())
	c := &Client{
		offer: o,
		sock:  sock,
		slots: make(chan struct{}, maxCalls),
		done:  make(chan struct{}),
		calls: map[uint64]*Call{},
	}
	// Ends when the connection does, at the latest by Close.
	go c.receive()
	return c, nil
}

// Size returns the export's length.
func (c *Client) Size() int64 { return c.offer.size }

// Export returns the export's name as the server says it.
func (c *Client) Export() string { return c.offer.name }

// Done is closed when the connection is gone; Err then says why.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns nil, or the *ConnError that every read now gets.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close leaves the server and ends the reads in flight.
func (c *Client) Close() error {
	var b [requestSize]byte
	request{typ: cmdDisc}.encode(&b)
	c.sock.send(b[:]) // only a courtesy
	c.fail(net.ErrClosed)
	return nil
}

// Start begins a read and returns at once. It needs no goroutine and no memory
// but k: the thread that reads replies calls k.End.
func (c *Client) Start(k *Call) {
	if k.Off < 0 || k.N < 0 || k.Off > c.offer.size || int64(k.N) > c.offer.size-k.Off || int64(k.N) > c.offer.maxPayload {
		k.End(nil, fmt.Errorf("nbd read of %d bytes at %d of %d: outside, or more than the %d the server allows", k.N, k.Off, c.offer.size, c.offer.maxPayload))
		return
	}
	c.mu.Lock()
	if err := c.err; err != nil {
		c.mu.Unlock()
		k.End(nil, err)
		return
	}
	c.last++
	cookie := c.last
	k.cookie, k.state, k.unsent = cookie, callWaiting, len(c.unsent) > 0
	c.calls[cookie] = k
	if k.unsent {
		c.unsent = append(c.unsent, k)
		c.mu.Unlock()
		return
	}
	b := k.request()
	c.mu.Unlock()
	switch err := c.sock.send(b[:]); {
	case err == errFull:
		c.mu.Lock()
		if c.calls[cookie] == k { // the connection is not lost
			k.unsent = true
			c.unsent = append(c.unsent, k)
		}
		c.mu.Unlock()
		c.flush()
	case err != nil:
		c.fail(err) // ends k with all the others
	}
}

func (k *Call) request() (b [requestSize]byte) {
	request{typ: cmdRead, cookie: k.cookie, off: uint64(k.Off), length: uint32(k.N)}.encode(&b)
	return b
}

// errUnread says that the server lies.
var errUnread = errors.New("replies to requests that the server has not read")

// flush sends what the socket had no room for, as far as it has now. It is called
// again after the next reply, which makes room: one is due as long as a request
// that was sent has none.
func (c *Client) flush() {
	c.mu.Lock()
	var err error
	for full := 0; len(c.unsent) > 0 && c.err == nil; {
		k := c.unsent[0]
		if k.state == callAbandoned {
			delete(c.calls, k.cookie)
		} else {
			b := k.request()
			err = c.sock.send(b[:])
		}
		if err == errFull && len(c.calls) == len(c.unsent) { // all replies have come: there must be room
			if full++; full < maxFull {
				continue
			}
			err = errUnread
		}
		if err != nil {
			break
		}
		k.unsent = false
		c.unsent = c.unsent[1:]
	}
	c.mu.Unlock()
	if err != nil && err != errFull {
		c.fail(err)
	}
}

// Abandon reports whether k was still waiting: then its reply will be dropped
// and End not be called, and k is not to be used again.
func (c *Client) Abandon(k *Call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k.state != callWaiting {
		return false
	}
	k.state = callAbandoned
	return true
}

// View calls fn once with the n bytes at off and returns its error, or one of its
// own without having called it: *ReplyError, *ConnError, ctx's; the end of ctx
// leaves other reads undisturbed. The slice belongs to the client and is shown to
// one fn at a time, so that any number of unanswered reads needs one buffer; fn
// must not block. n is at most MaxPayload.
func (c *Client) View(ctx context.Context, off int64, n int, fn func(p []byte) error) error {
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.Err()
	}
	defer func() { <-c.slots }()
	ended := make(chan error, 1)
	k := &Call{Off: off, N: n, End: func(p []byte, err error) {
		if err == nil {
			err = fn(p)
		}
		ended <- err
	}}
	c.Start(k)
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	if c.Abandon(k) {
		return ctx.Err()
	}
	// The payload is arriving, in bounded time, and is fn's to see.
	return <-ended
}

// claim takes the call of a reply, nil when there is none; abandoned says that nobody wants it. blocked
// says that flush is due.
func (c *Client) claim(cookie uint64) (k *Call, abandoned, blocked bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k = c.calls[cookie]
	if k == nil || k.unsent {
		return nil, false, false
	}
	delete(c.calls, cookie)
	abandoned = k.state == callAbandoned
	k.state = callEnded
	return k, abandoned, len(c.unsent) > 0
}

// fail ends the connection and every call that is not claimed.
func (c *Client) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = &ConnError{Err: err}
	var calls []*Call
	for _, k := range c.calls {
		if k.state == callWaiting {
			calls = append(calls, k)
		}
		k.state, k.unsent = callEnded, false
	}
	c.calls, c.unsent = nil, nil
	close(c.done)
	c.mu.Unlock()
	c.sock.shutdown()
	for _, k := range calls {
		k.End(nil, c.err)
	}
}
