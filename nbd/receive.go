package nbd

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// receiveBuffer holds the reply to a read of three blocks with its header, so
// that a short reply costs one system call and no copy. Longer payloads are read
// to their place.
const receiveBuffer = 16 << 10

// receiver reads the replies of a client.
type receiver struct {
	c   *Client
	r   *bufio.Reader
	buf []byte // for payloads beyond receiveBuffer, grown to the longest
}

// receive reads replies until the connection ends.
func (c *Client) receive() {
	// A thread of its own: see socket.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer c.sock.release()
	r := &receiver{c: c, r: bufio.NewReaderSize(c.sock, receiveBuffer)}
	for {
		if err := r.next(); err != nil {
			c.fail(err)
			return
		}
	}
}

// next handles one reply. Its error ends the connection.
func (r *receiver) next() error {
	h, err := r.r.Peek(simpleSize)
	for errors.Is(err, unix.EAGAIN) && r.r.Buffered() == 0 {
		h, err = r.r.Peek(simpleSize) // no reply for a while: there may be no request
	}
	if err != nil {
		return err
	}
	if m := binary.BigEndian.Uint32(h[0:]); m != magicSimple {
		return fmt.Errorf("reply has magic %#x", m)
	}
	errno := syscall.Errno(binary.BigEndian.Uint32(h[4:]))
	k, abandoned, blocked := r.c.claim(binary.BigEndian.Uint64(h[8:]))
	r.r.Discard(simpleSize)
	if blocked {
		r.c.flush()
	}
	switch {
	case k == nil:
		return errors.New("reply to a request that was never sent")
	case errno != 0 && !abandoned:
		k.End(nil, &ReplyError{Errno: errno, Off: k.Off, Len: k.N})
		return nil
	case errno != 0:
		return nil
	}
	return r.payload(k, abandoned)
}

// payload reads what follows a good reply's header, and ends k.
func (r *receiver) payload(k *Call, abandoned bool) error {
	if r.r.Buffered() < k.N {
		r.c.sock.until = time.Now().Add(payloadTimeout)
		defer func() { r.c.sock.until = time.Time{} }()
	}
	var p []byte
	var err error
	inBuffer := k.N <= receiveBuffer
	switch {
	case abandoned:
		_, err = r.r.Discard(k.N)
		return err
	case inBuffer:
		p, err = r.r.Peek(k.N)
	default:
		if cap(r.buf) < k.N {
			r.buf = make([]byte, k.N)
		}
		p = r.buf[:k.N]
		_, err = io.ReadFull(r.r, p)
	}
	if err != nil {
		k.End(nil, &ConnError{Err: err})
		return err
	}
	n := k.N // End may start k again
	k.End(p, nil)
	if inBuffer {
		r.r.Discard(n)
	}
	return nil
}
