package sandboxes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

// response is a ResponseWriter that knows what was sent, and bounds each wait for the
// client.
type response struct {
	http.ResponseWriter
	ctl    *http.ResponseController
	stall  time.Duration
	status int
	bytes  int64
	wrote  bool
	tells  bool // the client reads trailers, and HeaderError is one
	in     *requestBody
}

func newResponse(w http.ResponseWriter, stall time.Duration) *response {
	return &response{ResponseWriter: w, ctl: http.NewResponseController(w), stall: stall, status: http.StatusOK}
}

// Unwrap lets http.ResponseController find the server's own writer.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (w *response) WriteHeader(status int) {
	w.wrote, w.status = true, status
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter. Errors: errClientGone.
func (w *response) Write(p []byte) (int, error) {
	w.wrote = true
	_ = w.ctl.SetWriteDeadline(time.Now().Add(w.stall)) // a test's recorder has no connection
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	if err != nil {
		return n, fmt.Errorf("%w: %w", errClientGone, err)
	}
	return n, nil
}

// flush sends what is buffered.
func (w *response) flush() error {
	_ = w.ctl.SetWriteDeadline(time.Now().Add(w.stall))
	if err := w.ctl.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errClientGone, err)
	}
	return nil
}

// json answers with a document.
func (w *response) json(status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, err = w.Write(append(b, '\n'))
	return err
}

// body bounds the waits for the request's body, and knows whether all of it came.
func (w *response) body(r *http.Request) {
	w.in = &requestBody{ReadCloser: r.Body, w: w}
	r.Body = w.in
}

// unread reports whether the client may still be sending.
func (w *response) unread(r *http.Request) bool {
	return r.ContentLength != 0 && (w.in == nil || !w.in.over)
}

// What a refused client may go on to send before its connection is cut, and for how
// long. Most read an answer only when all is sent, and lose it with a connection that
// is closed under them.
const (
	maxDrain  = 1 << 30
	drainTime = 10 * time.Second
)

// drain reads and drops what a client still sends that has been answered.
func (w *response) drain(r *http.Request, stopping context.Context) {
	from := r.Body
	if w.in != nil {
		from = w.in.ReadCloser
		if w.in.failed || w.in.got == 0 && r.Header.Get("Expect") != "" {
			return // nothing more comes, or it waits to be told that it may send
		}
	} else if r.Header.Get("Expect") != "" {
		return
	}
	_ = w.ctl.SetReadDeadline(time.Now().Add(drainTime))
	stop := context.AfterFunc(stopping, func() { _ = w.ctl.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_, _ = io.CopyN(io.Discard, from, maxDrain) // it is answered, however this ends
}

// requestBody is a body that must keep coming.
type requestBody struct {
	io.ReadCloser
	w      *response
	got    int64
	over   bool
	failed bool
}

// Read implements io.Reader. Errors: ErrSlowBody, ErrLength, ErrBody, errClientGone.
func (b *requestBody) Read(p []byte) (int, error) {
	_ = b.w.ctl.SetReadDeadline(time.Now().Add(b.w.stall))
	n, err := b.ReadCloser.Read(p)
	b.got += int64(n)
	if err != nil {
		b.over = errors.Is(err, io.EOF)
		b.failed = !b.over
		_ = b.w.ctl.SetReadDeadline(time.Time{}) // what watches the connection reads on
		return n, bodyError(err)
	}
	return n, nil
}

// bodyError says of what ended a body that it is the client's or its connection's, as
// who reads it may take it for a failure of the sandbox.
func bodyError(err error) error {
	broken, isNet := errors.AsType[net.Error](err)
	switch {
	case errors.Is(err, io.EOF):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: %w", ErrSlowBody, err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: %w", ErrLength, err)
	case isNet:
		return fmt.Errorf("%w: %w", errClientGone, broken)
	}
	return fmt.Errorf("%w: %w", ErrBody, err)
}
