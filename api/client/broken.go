package client

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"syscall"
	"time"

	"quarry/api"
	"quarry/store"
)

// minProgress is how many bytes an attempt must receive in one IdleTimeout:
// with the default of 30 s that is half a KiB a second, which a link shared by
// 64 requests still gives each of them. One byte in time is not enough, or a
// store that drips bytes would hold a worker for ever.
const minProgress = 16 << 10

// idleBody runs the idle timer while a read waits. The time of all waits adds
// up until minProgress bytes have come in them; a body that ends before that has
// made its progress. A handler that keeps it must close it, which ends its attempt.
type idleBody struct {
	io.ReadCloser
	end     func() // gives back what the attempt holds
	kept    bool   // by the handler, beyond its attempt
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

// Close implements io.Closer.
func (b *idleBody) Close() error {
	defer b.end()
	return b.ReadCloser.Close()
}

// keep makes the body outlive its attempt, for whoever closes it.
func keep(body io.ReadCloser) {
	if b, ok := body.(*idleBody); ok {
		b.kept = true
	}
}

// StoreError is what one store said or did instead of giving what was asked of
// it. It is store.ErrUnreachable when its Outcome is.
type StoreError struct {
	Store   string // its URL or socket
	Outcome store.Outcome
	Err     error
}

func (e *StoreError) Error() string { return "store " + e.Store + ": " + e.Err.Error() }

// Unwrap returns the error without the store's name.
func (e *StoreError) Unwrap() error { return e.Err }

// Is implements the outcome unreachable, which no error below may tell of.
func (e *StoreError) Is(target error) bool {
	return target == store.ErrUnreachable && e.Outcome == store.Unreachable
}

// noAnswer marks an error before any header of an answer.
type noAnswer struct{ err error }

func (e *noAnswer) Error() string        { return e.err.Error() }
func (e *noAnswer) Unwrap() error        { return e.err }
func (e *noAnswer) Is(target error) bool { return target == store.ErrUnreachable }

// foreign marks an answer of a status other than 200 without an error document:
// it is not of a quarry server but of something on the way, today.
type foreign struct{ err *api.Error }

// Unwrap returns what was made of the status.
func (e *foreign) Unwrap() error { return e.err }

func (e *foreign) Error() string { return e.err.Error() }

// transportError says what went wrong without an answer, in place of url.Error,
// whose text is an address that nobody asked for.
func (c *Client) transportError(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	switch {
	case c.cfg.Socket == "":
		err = &StoreError{Store: c.base, Outcome: store.Unreachable, Err: err}
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
