package sandboxes

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"quarry/api/access"
	"quarry/internal/strictjson"
	"quarry/worker/sandbox"
)

// Config is what a Handler serves.
type Config struct {
	Node sandbox.Node
	// Authorize holds a request against what it needs; nil: everybody may do
	// everything, which is for loopback.
	Authorize func(r *http.Request, need access.Scope, repo string) error
	// HostAllowed says whether requests may name this host; nil: any.
	HostAllowed func(host string) bool
	// MetricsOpen serves /metrics to whoever has no token, too.
	MetricsOpen bool
	// Page serves the page for people and what belongs to it; nil: there is none.
	Page     http.Handler
	Registry *prometheus.Registry // for the handler's metrics and /metrics; nil = a new one
	Log      *slog.Logger         // nil = discard
	// StallTimeout bounds the wait of one write for a client that does not read, and
	// of one read for a body that does not come; 0 = 30 s.
	StallTimeout time.Duration
	// Pulse is how often a stream without news says that it lives; 0 = 15 s.
	Pulse time.Duration
}

// Handler serves the HTTP contract of a worker. Safe for concurrent use.
type Handler struct {
	cfg      Config
	log      *slog.Logger
	metrics  *metrics
	gather   http.Handler
	stopping context.Context
	stop     context.CancelFunc
}

// NewHandler returns a handler of cfg.
func NewHandler(cfg Config) *Handler {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Registry == nil {
		cfg.Registry = prometheus.NewRegistry()
	}
	if cfg.StallTimeout == 0 {
		cfg.StallTimeout = 30 * time.Second
	}
	if cfg.Pulse == 0 {
		cfg.Pulse = 15 * time.Second
	}
	h := &Handler{cfg: cfg, log: cfg.Log, metrics: newMetrics(cfg.Registry), gather: promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{})}
	h.stopping, h.stop = context.WithCancel(context.Background())
	return h
}

// With returns a handler of the same state whose Config change has changed, for a
// second listener.
func (h *Handler) With(change func(*Config)) *Handler {
	other := *h
	change(&other.cfg)
	return &other
}

// Stop ends the streams and waits that would hold up the end of a server.
func (h *Handler) Stop() { h.stop() }

// NewServer returns a server of h with the timeouts that keep slow clients from
// holding connections. Answers have no time limit of their own: each write has one.
func NewServer(h *Handler) *http.Server {
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 48 << 10,
		ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelWarn),
	}
	srv.RegisterOnShutdown(h.Stop)
	return srv
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	start := time.Now()
	h.metrics.inFlight.Inc()
	defer h.metrics.inFlight.Dec()
	w := newResponse(rw, h.cfg.StallTimeout)
	id := requestID(r)
	w.Header().Set(HeaderRequestID, id)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	name := "none"
	rt, c, err := find(r.Method, r.URL.EscapedPath(), r.URL.RawQuery)
	c.w, c.r = w, r
	if rt != nil {
		name = rt.name
	}
	if err == nil {
		err = h.authorize(rt, c)
	}
	if enc := r.Header.Get("Content-Encoding"); err == nil && enc != "" && !strings.EqualFold(enc, "identity") {
		err = ErrEncoding
	}
	if err == nil {
		w.body(r)
		err = rt.serve(h, c)
	}
	begun, cut := w.wrote, false
	if err != nil {
		e := toError(err)
		e.about(c)
		h.metrics.refused(e.Code)
		if begun {
			w.status = e.Status // what it would have been, for metrics and log
			cut = !w.tell(e)
		} else {
			h.writeError(c, e)
		}
	}
	took := time.Since(start)
	h.metrics.observe(name, w.status, took)
	attrs := []any{"request_id", id, "route", name, "sandbox", c.id, "exec", c.exec, "status", w.status, "bytes", w.bytes, "took_ms", took.Milliseconds()}
	switch {
	case err != nil && w.status >= 500 && !toError(err).busy():
		h.log.ErrorContext(r.Context(), "request failed", append(attrs, "err", err)...)
	case err != nil:
		h.log.InfoContext(r.Context(), "request refused", append(attrs, "err", err)...)
	default:
		h.log.DebugContext(r.Context(), "request served", attrs...)
	}
	if cut {
		panic(http.ErrAbortHandler) // a body that cannot be finished must not look complete
	}
}

// authorize holds a request against what its route needs.
func (h *Handler) authorize(rt *route, c call) error {
	if h.cfg.Authorize == nil {
		if h.cfg.HostAllowed != nil && !h.cfg.HostAllowed(c.r.Host) || c.r.Header.Get("Origin") != "" && rt.method != http.MethodGet {
			return ErrHost
		}
		return nil
	}
	if token, ok := strings.CutPrefix(c.r.Header.Get("Authorization"), "Bearer "); ok && strings.HasPrefix(token, sandbox.TokenPrefix) {
		switch {
		case rt.who == anyone:
			return nil
		case rt.who == owner && h.cfg.Node.Authorize(c.r.Context(), c.id, token):
			return nil
		case rt.who == owner:
			return fmt.Errorf("%w: it is not the token of this sandbox", access.ErrUnauthenticated)
		}
		return fmt.Errorf("%w: the token of a sandbox is good for that sandbox alone", access.ErrForbidden)
	}
	switch rt.who {
	case anyone:
		return nil
	case manager:
		if rt.name == "metrics" && h.cfg.MetricsOpen {
			return nil
		}
		return h.cfg.Authorize(c.r, access.Admin, "")
	}
	return h.cfg.Authorize(c.r, access.Run, "")
}

// writeError answers a request that failed before anything was sent.
func (h *Handler) writeError(c call, e *Error) {
	w := c.w
	w.Header().Del("Trailer") // of the answer that it would have been
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(int64(math.Ceil(e.RetryAfter.Seconds())), 10))
	}
	if e.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", `Bearer realm="quarry worker"`)
		w.Header().Add("WWW-Authenticate", `Basic realm="quarry worker"`)
	}
	if !w.unread(c.r) {
		_ = w.json(e.Status, errorBody{e}) // who asked may have gone
		return
	}
	w.Header().Set("Connection", "close") // else the server reads on for the next request
	duplex := w.ctl.EnableFullDuplex()    // the answer does not wait for the body then
	if w.json(e.Status, errorBody{e}) == nil && w.flush() == nil && duplex == nil {
		w.drain(c.r, h.stopping)
	}
}

// about says of which request an error is.
func (e *Error) about(c call) {
	e.RequestID = c.w.Header().Get(HeaderRequestID)
	if e.SandboxID == "" {
		e.SandboxID = c.id
	}
}

// requestID takes the client's, when it can stand in a log, or makes one.
func requestID(r *http.Request) string {
	if id := r.Header.Get(HeaderRequestID); validID(id) {
		return id
	}
	return strings.ToLower(rand.Text()[:16])
}

// decode reads a JSON body strictly.
func decode[T any](c call) (T, error) {
	var v, zero T
	raw, err := io.ReadAll(io.LimitReader(c.r.Body, MaxBody+1))
	if err != nil {
		return zero, err
	}
	if len(raw) > MaxBody {
		return zero, fmt.Errorf("%w: the body has more than %d bytes", sandbox.ErrTooLarge, MaxBody)
	}
	if len(raw) == 0 {
		return zero, nil
	}
	if err := strictjson.RequestInto(raw, &v); err != nil {
		return zero, fmt.Errorf("%w: body: %w", sandbox.ErrInvalid, err)
	}
	return v, nil
}

// number reads a parameter that is a number of 0 or more; def when it is not there.
func (c call) number(key string, def, most int64) (int64, error) {
	text := c.q.Get(key)
	if text == "" {
		return def, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > most {
		return 0, fmt.Errorf("%w: %s=%q: want a number from 0 to %d", sandbox.ErrInvalid, key, text, most)
	}
	return n, nil
}

// flag reads a parameter that is true or false.
func (c call) flag(key string) (bool, error) {
	text := c.q.Get(key)
	if text == "" {
		return false, nil
	}
	v, err := strconv.ParseBool(text)
	if err != nil {
		return false, fmt.Errorf("%w: %s=%q: want true or false", sandbox.ErrInvalid, key, text)
	}
	return v, nil
}

// path reads the parameter path, which must be there.
func (c call) path() (string, error) {
	p := c.q.Get("path")
	switch {
	case p == "":
		return "", fmt.Errorf("%w: parameter path is missing", sandbox.ErrInvalid)
	case len(p) > MaxPath:
		return "", fmt.Errorf("%w: path has %d bytes, at most %d", sandbox.ErrFilePath, len(p), MaxPath)
	case strings.ContainsRune(p, 0):
		return "", fmt.Errorf("%w: path has a NUL byte", sandbox.ErrFilePath)
	}
	return p, nil
}
