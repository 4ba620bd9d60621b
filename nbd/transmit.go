package nbd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Viewer shows its bytes instead of filling a buffer of the caller's, so that a
// hundred stalled reads hold no memory.
type Viewer interface {
	// Size is the length in bytes, constant, a multiple of 4096.
	Size() int64
	// View calls fn at most once, with the n bytes at off, all of them right,
	// and returns fn's error; or it returns an error and has not called fn. The
	// slice is valid only during the call; fn does not block. Safe for
	// concurrent use.
	View(ctx context.Context, off int64, n int, fn func(p []byte) error) error
}

var _ Viewer = (*Client)(nil)

const (
	// MaxView is the longest read that a Transmission answers: the source may need
	// a buffer of that size, and 1 MiB fits a shim's 8 MiB with all the rest. It is
	// four times what attach lets the kernel ask for.
	MaxView = 1 << 20
	// maxUnanswered bounds the reads under way on a connection: a kernel has at
	// most 128 open on each (its queue depth), and each costs a small stack here.
	maxUnanswered = 256
)

// Transmission serves the transmission phase alone, to a client that was told by
// other means what it connects to: the kernel, to which netlink has said all
// that the handshake would. Replies are simple.
type Transmission struct {
	// Conn is closed when Serve returns.
	Conn   net.Conn
	Source Viewer
	// Deadline is for one read, from when its request has come; EIO after it. 0
	// means none.
	Deadline time.Duration
	// OnEIO is called before a read is answered with EIO, with the reason. nil
	// ignores it. Concurrent.
	OnEIO func(ctx context.Context, err error)

	wmu sync.Mutex // held while one whole reply is written
}

// Serve answers requests until the client disconnects or the connection is lost,
// ends the reads under way then, and returns nil when the client did not break
// the protocol. While ctx has ended, every read gets EIO: that ends the waiting
// and not the connection. A request that waits holds no buffer, a stalled one
// holds up no other.
func (t *Transmission) Serve(ctx context.Context) error {
	var reads sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	err := t.receive(ctx, &reads)
	cancel() // nobody is left to wait for an answer
	t.Conn.Close()
	reads.Wait()
	if errors.Is(err, errDisconnect) || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// receive reads requests and answers each read from its own goroutine.
func (t *Transmission) receive(ctx context.Context, reads *sync.WaitGroup) error {
	in := serverConn{r: bufio.NewReader(t.Conn)}
	slots := make(chan struct{}, maxUnanswered)
	for {
		q, err := in.next()
		if err != nil {
			return err
		}
		if errno := t.validate(q); errno != 0 {
			if err := t.reply(q, errno, nil); err != nil {
				return err
			}
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			return fmt.Errorf("client has more than %d reads under way", maxUnanswered)
		}
		reads.Go(func() {
			t.read(ctx, q)
			<-slots
		})
	}
}

// validate returns the error number that answers q, 0 for a read to be served.
func (t *Transmission) validate(q request) uint32 {
	if errno := q.validate(t.Source.Size(), false); errno != 0 {
		return errno
	}
	if q.typ != cmdRead || q.length > MaxView {
		return errnoInval
	}
	return 0
}

func (t *Transmission) read(ctx context.Context, q request) {
	if t.Deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, t.Deadline)
		defer cancel()
	}
	shown := false
	err := t.Source.View(ctx, int64(q.off), int(q.length), func(p []byte) error {
		shown = true
		return t.reply(q, 0, p)
	})
	switch {
	case err == nil:
		return
	case shown:
		// The reply could not be written whole; nothing after it can be
		// understood, so the connection ends.
		t.Conn.Close()
		return
	}
	if t.OnEIO != nil {
		t.OnEIO(ctx, err)
	}
	if err := t.reply(q, errnoIO, nil); err != nil {
		t.Conn.Close()
	}
}

// reply writes a whole reply: header and payload in one call.
func (t *Transmission) reply(q request, errno uint32, payload []byte) error {
	t.wmu.Lock()
	defer t.wmu.Unlock()
	bufs := net.Buffers{simpleHeader(q, errno)}
	if len(payload) > 0 {
		bufs = append(bufs, payload)
	}
	_, err := bufs.WriteTo(t.Conn)
	return err
}
