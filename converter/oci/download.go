package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

// download reads one blob. When the connection breaks it goes on where it
// stopped, with a range, or by skipping when the registry knows none. Nothing is
// kept in memory but what is being read.
type download struct {
	get   func(off, size int64) (*http.Response, error)
	pause func(fails int, err error) error
	size  int64 // -1: not told

	body   io.ReadCloser
	off    int64 // bytes given out
	fails  int   // in a row
	failed int64 // off at the last failure
	err    error // the one that ended it
}

var _ io.ReadCloser = (*download)(nil)

// enough is the progress that makes the next failure the first again: less, and
// a connection that breaks at every byte would never end.
const enough = 1 << 20

// errStalled says that nothing came for a while.
var errStalled = errors.New("the registry sends no more")

// start opens the blob from its beginning.
func (d *download) start() error {
	for {
		resp, err := d.get(0, -1)
		if err == nil {
			d.body, d.size = resp.Body, resp.ContentLength
			return nil
		}
		if err = d.retry(err); err != nil {
			return err
		}
	}
}

// retry waits for the next try, or returns the error that ends it.
func (d *download) retry(err error) error {
	if d.off-d.failed >= enough {
		d.fails = 0
	}
	d.fails++
	d.failed = d.off
	d.err = d.pause(d.fails, err)
	return d.err
}

// Read implements io.Reader.
func (d *download) Read(p []byte) (int, error) {
	if d.err != nil || len(p) == 0 {
		return 0, d.err
	}
	for {
		if d.body == nil {
			if err := d.resume(); err != nil {
				return 0, err
			}
		}
		n, err := d.body.Read(p)
		d.off += int64(n)
		if n > 0 {
			return n, nil // an error comes again
		}
		switch {
		case err == nil:
			continue
		case d.off == d.size, errors.Is(err, io.EOF) && d.size < 0:
			return 0, io.EOF // whether it was the right blob is for the digest to say
		case errors.Is(err, io.EOF):
			err = fmt.Errorf("%d bytes came, %d were promised: %w", d.off, d.size, io.ErrUnexpectedEOF)
		}
		d.body.Close() // it is broken
		d.body = nil
		if err := d.retry(fmt.Errorf("at byte %d: %w", d.off, err)); err != nil {
			return 0, err
		}
	}
}

// resume opens the blob where reading stopped.
func (d *download) resume() error {
	for {
		resp, err := d.get(d.off, d.size)
		if err == nil {
			if err = d.position(resp); err == nil {
				d.body = resp.Body
				return nil
			}
			resp.Body.Close() // it is of no use
		}
		if err = d.retry(err); err != nil {
			return err
		}
	}
}

// position checks that an answer goes on with the same blob, and skips what was
// read before when it begins at the beginning.
func (d *download) position(resp *http.Response) error {
	skip := d.off
	if resp.StatusCode == http.StatusPartialContent {
		skip = 0
	}
	if n := resp.ContentLength; n >= 0 && d.size >= 0 && n != d.size-d.off+skip {
		return &permanentError{fmt.Errorf("the registry offered %d bytes before, now %d", d.size, n+d.off-skip)}
	}
	_, err := io.CopyN(io.Discard, resp.Body, skip)
	return err
}

// Close ends the reading.
func (d *download) Close() error {
	if d.body == nil {
		return nil
	}
	return d.body.Close()
}

// leastBytes is what must come in every StallTimeout that is waited for a body,
// or its rest: 64 KiB in 30 s. A byte now and then would otherwise hold a
// conversion, of which few run at once, for ever.
const leastBytes = 64 << 10

// watched is a body that fails when less than leastBytes come in timeout. The time
// that the reader itself takes does not count.
type watched struct {
	io.ReadCloser
	cancel  context.CancelFunc
	timeout time.Duration

	waited time.Duration // since leastBytes were complete
	came   int           // bytes since then
}

// Read implements io.Reader.
func (w *watched) Read(p []byte) (int, error) {
	if w.waited >= w.timeout {
		return 0, w.stall()
	}
	var stalled atomic.Bool
	begun := time.Now()
	t := time.AfterFunc(w.timeout-w.waited, func() { stalled.Store(true); w.cancel() })
	n, err := w.ReadCloser.Read(p)
	t.Stop()
	w.waited += time.Since(begun)
	w.came += n
	if err != nil && !errors.Is(err, io.EOF) && stalled.Load() {
		return n, w.stall()
	}
	if w.came >= leastBytes {
		w.waited, w.came = 0, 0
	}
	return n, err
}

func (w *watched) stall() error {
	if w.came == 0 {
		return fmt.Errorf("%w for %s", errStalled, w.timeout)
	}
	return fmt.Errorf("%w than %d bytes in %s, the least is %d", errStalled, w.came, w.timeout, leastBytes)
}

// Close implements io.Closer.
func (w *watched) Close() error {
	defer w.cancel()
	return w.ReadCloser.Close()
}
