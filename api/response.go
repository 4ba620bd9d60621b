package api

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"quarry/internal/strictjson"
)

// response is a ResponseWriter that knows what was sent.
type response struct {
	http.ResponseWriter
	ctl    *http.ResponseController
	status int
	bytes  int64
	wrote  bool // the status line is out: an error can only be shown by cutting the body off

	bodyTimeout time.Duration // for the request's
}

func newResponse(w http.ResponseWriter, bodyTimeout time.Duration) *response {
	return &response{ResponseWriter: w, ctl: http.NewResponseController(w), status: http.StatusOK, bodyTimeout: bodyTimeout}
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
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	if err != nil {
		return n, unsent(err)
	}
	return n, nil
}

// unsent is the error of a write to the client.
func unsent(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%w: %w", errClientStalled, err)
	}
	return fmt.Errorf("%w: %w", errClientGone, err)
}

// flush sends what is buffered. Writers of tests may not support it.
func (w *response) flush() error {
	if err := w.ctl.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return unsent(err)
	}
	return nil
}

func (w *response) setReadDeadline(t time.Time) {
	_ = w.ctl.SetReadDeadline(t) // a test's recorder has no connection
}

// NewServer returns a server of h with the timeouts that keep slow clients from
// holding connections. Answers have no overall time limit, because a big one
// may take long; what Handler.Listen returns bounds each write instead.
func NewServer(h *Handler) *http.Server {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    32 << 10,
		ConnContext:       connContext,
		ErrorLog:          slog.NewLogLogger(h.log.Handler(), slog.LevelWarn),
	}
	// Streams of events have no end of their own that Shutdown could wait for.
	srv.RegisterOnShutdown(h.endStreams)
	return srv
}

// strictJSON decodes one JSON document that has one meaning.
func strictJSON(b []byte, v any) error { return strictjson.RequestInto(b, v) }
