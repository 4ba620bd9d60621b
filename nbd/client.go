package nbd

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	// maxCalls bounds the unanswered reads of a client. So many requests of 28
	// bytes fit any socket's buffer: sending one never blocks, even when the
	// server has stopped reading.
	maxCalls = 1024
	// payloadTimeout is how long a server may take between a reply's header and
	// the last byte of its payload. It has the whole payload when it writes the
	// header, so a longer pause means that it is stuck or gone.
	payloadTimeout = 30 * time.Second
	// disconnectTimeout is for telling the server that the client leaves.
	disconnectTimeout = time.Second
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

// Client is a connection to one export. It keeps up to 1024 reads in flight;
// replies come in any order.
type Client struct {
	offer offer
	slots chan struct{} // one token for each unanswered read
	done  chan struct{} // closed when err is set

	wmu  sync.Mutex // held while one request is written
	conn net.Conn

	mu    sync.Mutex // guards what follows
	calls map[uint64]*call
	last  uint64 // cookie of the newest call
	err   error  // *ConnError once the connection is gone
}

var _ Device = (*Client)(nil)

// call is one unanswered read.
type call struct {
	off   int64
	n     int
	dst   []byte             // where the payload goes, or
	fn    func([]byte) error // who is shown it
	err   error              // set before done is closed
	done  chan struct{}
	state callState // guarded by Client.mu
}

type callState uint8

const (
	callWaiting   callState = iota // in Client.calls, its caller waits
	callAbandoned                  // in Client.calls until the reply has come, nobody waits
	callClaimed                    // out of Client.calls: the receiver fills and ends it
)

func newClient(conn net.Conn, o offer) *Client {
	c := &Client{
		offer: o,
		slots: make(chan struct{}, maxCalls),
		done:  make(chan struct{}),
		conn:  conn,
		calls: map[uint64]*call{},
	}
	// Ends when the connection does, at the latest by Close.
	go c.receive()
	return c
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
	c.wmu.Lock()
	c.conn.SetWriteDeadline(time.Now().Add(disconnectTimeout))
	c.conn.Write(b[:]) // only a courtesy
	c.wmu.Unlock()
	c.fail(net.ErrClosed)
	return nil
}

// ReadAt fills p with the bytes at off. Errors: *ReplyError, *ConnError, ctx's;
// the end of ctx leaves other reads undisturbed.
func (c *Client) ReadAt(ctx context.Context, p []byte, off int64) error {
	for len(p) > 0 {
		n := int(min(int64(len(p)), c.offer.maxPayload))
		if err := c.do(ctx, &call{off: off, n: n, dst: p[:n]}); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// View calls fn once with the n bytes at off and returns its error, or one of
// ReadAt's without having called it. The slice belongs to the client and is
// shown to one fn at a time, so that any number of unanswered reads needs one
// buffer; fn must not block. n is at most MaxPayload.
func (c *Client) View(ctx context.Context, off int64, n int, fn func(p []byte) error) error {
	if int64(n) > c.offer.maxPayload {
		return fmt.Errorf("nbd view of %d bytes, the server allows %d", n, c.offer.maxPayload)
	}
	return c.do(ctx, &call{off: off, n: n, fn: fn})
}

func (c *Client) do(ctx context.Context, k *call) error {
	if k.off < 0 || k.n < 0 || k.off > c.offer.size || int64(k.n) > c.offer.size-k.off {
		return fmt.Errorf("nbd read of %d bytes at %d is outside the export of %d", k.n, k.off, c.offer.size)
	}
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.Err()
	}
	k.done = make(chan struct{})
	if err := c.send(k); err != nil {
		return err
	}
	select {
	case <-k.done:
		return k.err
	case <-ctx.Done():
	}
	if c.abandon(k) {
		return ctx.Err()
	}
	// The payload is arriving, in bounded time, into the caller's memory.
	<-k.done
	return k.err
}

// send registers k and writes its request.
func (c *Client) send(k *call) error {
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		<-c.slots
		return c.err
	}
	c.last++
	cookie := c.last
	c.calls[cookie] = k
	c.mu.Unlock()

	var b [requestSize]byte
	request{typ: cmdRead, cookie: cookie, off: uint64(k.off), length: uint32(k.n)}.encode(&b)
	c.wmu.Lock()
	_, err := c.conn.Write(b[:])
	c.wmu.Unlock()
	if err != nil {
		c.fail(err) // ends k with all the others
	}
	return nil
}

// abandon reports whether k was still waiting; its reply will be dropped.
func (c *Client) abandon(k *call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k.state != callWaiting {
		return false
	}
	k.state = callAbandoned
	return true
}

// claim takes the call of a reply; abandoned says that nobody wants it.
func (c *Client) claim(cookie uint64) (k *call, abandoned bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k = c.calls[cookie]
	if k == nil {
		return nil, false
	}
	delete(c.calls, cookie)
	abandoned = k.state == callAbandoned
	k.state = callClaimed
	return k, abandoned
}

// end gives a claimed call its result.
func (c *Client) end(k *call, err error) {
	k.err = err
	close(k.done)
	<-c.slots
}

// fail ends the connection and every call that is not claimed.
func (c *Client) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = &ConnError{Err: err}
	calls := c.calls
	c.calls = nil
	for _, k := range calls {
		k.state = callClaimed
	}
	close(c.done)
	c.mu.Unlock()
	c.conn.Close()
	for _, k := range calls {
		c.end(k, c.err)
	}
}

// receive reads replies until the connection ends.
func (c *Client) receive() {
	// Large enough for headers only: payloads are read straight to their place.
	r := bufio.NewReaderSize(c.conn, 512)
	var buf []byte // shown to fn, grown to the longest View
	for {
		if err := c.receiveOne(r, &buf); err != nil {
			c.fail(err)
			return
		}
	}
}

// receiveOne handles one reply. Its error ends the connection.
func (c *Client) receiveOne(r *bufio.Reader, buf *[]byte) error {
	var h [simpleSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return err
	}
	if m := binary.BigEndian.Uint32(h[0:]); m != magicSimple {
		return fmt.Errorf("reply has magic %#x", m)
	}
	errno := syscall.Errno(binary.BigEndian.Uint32(h[4:]))
	k, abandoned := c.claim(binary.BigEndian.Uint64(h[8:]))
	switch {
	case k == nil:
		return errors.New("reply to a request that was never sent")
	case errno != 0:
		c.end(k, &ReplyError{Errno: errno, Off: k.off, Len: k.n})
		return nil
	}
	c.conn.SetReadDeadline(time.Now().Add(payloadTimeout))
	err := c.payload(r, k, abandoned, buf)
	c.conn.SetReadDeadline(time.Time{})
	return err
}

// payload reads what follows a good reply's header, to where k wants it.
func (c *Client) payload(r *bufio.Reader, k *call, abandoned bool, buf *[]byte) error {
	var err error
	dst := k.dst
	switch {
	case abandoned:
		_, err = r.Discard(k.n)
	case k.fn != nil:
		if cap(*buf) < k.n {
			*buf = make([]byte, k.n)
		}
		dst = (*buf)[:k.n]
		fallthrough
	default:
		_, err = io.ReadFull(r, dst)
	}
	if err != nil {
		c.end(k, &ConnError{Err: err})
		return err
	}
	if k.fn != nil && !abandoned {
		c.end(k, k.fn(dst))
		return nil
	}
	c.end(k, nil)
	return nil
}
