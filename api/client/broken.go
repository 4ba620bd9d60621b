package client

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"syscall"
	"time"
)

// minProgress is how many bytes an attempt must receive in one IdleTimeout:
// with the default of 30 s that is half a KiB a second, which a link shared by
// 64 requests still gives each of them. One byte in time is not enough, or a
// store that drips bytes would hold a worker for ever.
const minProgress = 16 << 10

// idleBody runs the idle timer while a read waits. The time of all waits adds
// up until minProgress bytes have come in them; a body that ends before that has
// made its progress.
type idleBody struct {
	io.ReadCloser
	timer   *time.Timer
	timeout time.Duration
	enough  int           // bytes that earn a new timeout
	got     int           // of enough
	waited  time.Duration // of timeout
}

func (b *idleBody) Read(p []byte) (int, error) {
	start := time.Now()
	b.timer.Reset(max(b.timeout-b.waited, 1)) // 0 would be no time at all for what is there already
	n, err := b.ReadCloser.Read(p)
	b.timer.Stop()
	b.waited += time.Since(start)
	if b.got += n; b.got >= b.enough {
		b.got, b.waited = 0, 0
	}
	return n, err
}

// noAnswer marks an error before any header of an answer.
type noAnswer struct{ err error }

func (e *noAnswer) Error() string { return e.err.Error() }
func (e *noAnswer) Unwrap() error { return e.err }

// transportError says what went wrong without an answer, in place of url.Error,
// whose text is an address that nobody asked for.
func (c *Client) transportError(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	switch {
	case c.cfg.Socket == "":
		err = fmt.Errorf("store %s: %w", c.base, err)
	case connectionLost(err):
		err = fmt.Errorf("the server on %s ended the connection: %w", c.cfg.Socket, err)
	}
	return &noAnswer{err}
}

// connectionLost: the server ended before it answered.
func connectionLost(err error) bool {
	for _, lost := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, syscall.ECONNREFUSED} {
		if errors.Is(err, lost) {
			return true
		}
	}
	return false
}

// again reports whether attempt n of a request may be followed by another.
func (c *Client) again(rq request, n int, err error) bool {
	switch {
	case n >= c.cfg.Attempts || !retryable(err):
		return false
	case rq.once:
		return false
	case rq.job:
		// A background server that was told to end drops the connections that
		// it has not looked at yet. All jobs give the same result when they are
		// done twice, but take long, so that is the one case, and only once.
		return n == 1 && connectionLost(err) && errors.As(err, new(*noAnswer))
	}
	return true
}
