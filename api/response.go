package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"
)

const (
	// bodyTimeout is how long a client may take to send a request body.
	bodyTimeout = 30 * time.Second
	// writeStep is the most that one write sends in its Config.StallTimeout, so
	// that the time is the same for whatever is sent: 64 KiB in 10 s are 6.4 KiB
	// a second, which a link shared by all slots still gives each of them.
	writeStep = 64 << 10
)

// response is a ResponseWriter that knows what was sent, and gives up on a
// client that takes nothing.
type response struct {
	http.ResponseWriter
	ctl      *http.ResponseController
	status   int
	bytes    int64
	wrote    bool // the status line is out: an error can only be shown by cutting the body off
	stall    time.Duration
	extended time.Time
}

func newResponse(w http.ResponseWriter, stall time.Duration) *response {
	r := &response{ResponseWriter: w, ctl: http.NewResponseController(w), status: http.StatusOK, stall: stall}
	r.extend()
	return r
}

// Unwrap lets http.ResponseController find the server's own writer.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (w *response) WriteHeader(status int) {
	w.wrote, w.status = true, status
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *response) Write(p []byte) (int, error) {
	w.wrote = true
	sent := 0
	for {
		step := p[sent:min(sent+writeStep, len(p))]
		w.extend()
		n, err := w.ResponseWriter.Write(step)
		sent += n
		w.bytes += int64(n)
		if err != nil {
			return sent, fmt.Errorf("%w: %w", errClientGone, err)
		}
		if sent == len(p) {
			return sent, nil
		}
	}
}

// flush sends what is buffered. Writers of tests may not support it.
func (w *response) flush() error {
	if err := w.ctl.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("%w: %w", errClientGone, err)
	}
	return nil
}

// extend gives the next write its time. A tenth of that between two calls is precise
// enough and spares a timer reset per frame. The deadline is never cleared: the
// next request of the connection starts by setting its own.
func (w *response) extend() {
	if now := time.Now(); now.Sub(w.extended) > w.stall/10 {
		w.extended = now
		_ = w.ctl.SetWriteDeadline(now.Add(w.stall)) // a test's recorder has no connection
	}
}

func (w *response) setReadDeadline(t time.Time) {
	_ = w.ctl.SetReadDeadline(t) // a test's recorder has no connection
}

// NewServer returns a server of h with the timeouts that keep slow clients from
// holding connections. Answers have no overall time limit, because a big one
// may take long; the handler bounds each write instead.
func NewServer(h *Handler) *http.Server {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    32 << 10,
		ErrorLog:          slog.NewLogLogger(h.log.Handler(), slog.LevelWarn),
	}
	// Streams of events have no end of their own that Shutdown could wait for.
	srv.RegisterOnShutdown(h.endStreams)
	return srv
}

// strictJSON decodes one JSON document without unknown fields or trailing data.
func strictJSON(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("more than one JSON document")
	}
	return nil
}
