package api

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"quarry/api/access"
	"quarry/api/gate"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
	"quarry/store/packed"
)

// Chunks is what the handler reads chunks from.
type Chunks interface {
	store.Getter
	store.BatchGetter
	// StoredBatch is GetBatch with the bytes as they are stored, their checksum
	// compared, so that serving costs no decompression.
	StoredBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, packed.Stored, error) error) error
}

// Names is what the handler needs of the catalog.
type Names interface {
	Name(repo, tag string) (catalog.Name, bool)
	Names() []catalog.Name
	Tags(repo string) []string
	NameSince(repo, tag string) time.Time
	DeleteName(ctx context.Context, repo, tag string) error
}

// Config is what a Handler serves. The funcs are wired by cmd, because the
// packages that do the work are not below this one; a nil func makes its route
// answer not_offered.
type Config struct {
	Chunks Chunks
	Names  Names
	Bucket bucket.Bucket
	// Local offers the convert and admin routes as well, and asks for no token. Only
	// for a listener that nobody but the owner of the data folder can reach.
	Local bool

	// Authorize holds a request against what it needs; nil: everybody may read, and
	// nobody may do more. Covered says which repositories it may see in lists.
	// Token answers the token flow of registries.
	Authorize func(r *http.Request, need access.Scope, repo string) error
	Covered   func(r *http.Request, need access.Scope) (func(repo string) bool, error)
	Token     func(w http.ResponseWriter, r *http.Request) error
	// Admin tells whose token has the scope admin, of requests that were let in, and
	// TokenName what it is called: a lease is ended by who began it.
	Admin     func(r *http.Request) bool
	TokenName func(r *http.Request) string
	// HostAllowed says whether requests may name this host, with its port, when they do
	// not come over the local socket; nil: any.
	HostAllowed func(host string) bool
	// MetricsOpen serves /metrics to whoever has no token, too.
	MetricsOpen bool

	Convert func(context.Context, ConvertRequest, func(Progress)) (ConvertResult, error)
	Sign    func(context.Context, image.Ref, SignRequest) error // of a ref with a digest
	Check   func(context.Context, CheckRequest, func(Problem)) (CheckSummary, error)
	Rebuild func(context.Context) (RebuildResult, error)
	// GC collects garbage and tells of its steps; what it returns is sent as JSON.
	GC func(context.Context, GCRequest, func(Progress)) (any, error)
	// Pin and Unpin keep the images of a source, or no longer. Pins lists them.
	Pin, Unpin func(context.Context, chunk.Digest) error
	Pins       func() []chunk.Digest
	// Leases is told of every lease, so that it outlives the server and gc knows of it.
	Leases LeaseKeeper
	Stats  func(context.Context) (StoreStats, error)
	// ReadOnly makes a node that only reads its store: it returns what requests that
	// change the store are answered, which is ReadOnlyError. nil = the writer.
	ReadOnly func(context.Context) error
	// Lag tells how far such a node is behind the journal; nil = not at all.
	Lag func() Lag
	// Ready returns why the store cannot serve now; nil func means always ready.
	Ready func(context.Context) error
	// Job tells about a source that ref names and that has no image statement for p:
	// an error such as JobError makes, or nil when no job is known.
	Job func(ctx context.Context, ref image.Ref, source chunk.Digest, p image.Platform) error
	// Jobs is the queue of conversions. nil: none are offered.
	Jobs *jobs.Queue
	// Page serves the page for people: /, /page.css and /page.js. sees says of which
	// repositories whoever asks may know, and admin whether the node is its business.
	// nil: there is none.
	Page func(w http.ResponseWriter, r *http.Request, sees func(repo string) bool, admin bool) error

	// V2 serves the paths of the registry, /v2 and what is below it but for the token
	// flow, and V2Local those of the local handler, which asks for no token. Nil:
	// there is none.
	V2, V2Local http.Handler

	Registry *prometheus.Registry // for the handler's metrics and /metrics; nil = a new one
	Log      *slog.Logger         // nil = discard

	MaxReads     int           // reads of the bucket by all requests together, see maxReads; 0 = 1024
	MaxJobs      int           // convert, check and rebuild at once, others wait; 0 = 4
	QueueTimeout time.Duration // wait of a read before 503; 0 = 2 s
	ChunkTimeout time.Duration // silence of the store in a batch before the rest gets error frames; 0 = 15 s
	StallTimeout time.Duration // wait of one write for a client that does not read, which holds a slot for nothing; 0 = 10 s
	BodyTimeout  time.Duration // for a client to send a request body; 0 = 30 s
	Now          func() time.Time
}

// Requests that read the bucket are admitted by what they hold while a read
// stalls: buffers of about 1 MiB each, the most that is read at once unless a
// chunk is longer.
const (
	// maxReads bounds them all: 1 GiB, besides the ranges of packed's helpers. A
	// burst of 256 workers has room for four requests each.
	maxReads = 1024
	// bulkReads is what a large request may hold: a start keeps 4 MiB of bootstrap
	// beside its buffers, a blob request a window of 1 MiB plain and stored, read in
	// 8 ranges. A batch has 1: it always has one range, and more of them only while
	// helpers are free, which no other request waits for.
	bulkReads = 8
)

// Handler serves the HTTP contract. Safe for concurrent use.
type Handler struct {
	*shared
	local bool
}

// shared is the state of the handlers of one store.
type shared struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	gather  http.Handler
	leases  *leases
	blobs   *blobCache
	boots   *bootCache
	traces  *traces
	reads   gate.Gate
	jobs    gate.Gate
	started time.Time

	siblings *siblings

	requests atomic.Uint64
	sent     atomic.Uint64

	mu       sync.Mutex // guards what is below
	inFlight int
	lastEnd  time.Time
	streams  map[int]func() // end the streams that would not end by themselves
	nth      int            // of a stream
	closing  bool           // a server was told to end
}

// NewHandler returns a handler of cfg.
func NewHandler(cfg Config) *Handler {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Registry == nil {
		cfg.Registry = prometheus.NewRegistry()
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	setDefault(&cfg.MaxReads, maxReads)
	setDefault(&cfg.MaxJobs, 4)
	setDefault(&cfg.QueueTimeout, 2*time.Second)
	setDefault(&cfg.ChunkTimeout, 15*time.Second)
	setDefault(&cfg.StallTimeout, 10*time.Second)
	setDefault(&cfg.BodyTimeout, 30*time.Second)
	s := &shared{
		cfg:     cfg,
		log:     cfg.Log,
		metrics: newMetrics(cfg.Registry),
		gather:  promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{}),
		leases:  newLeases(cfg.Now),
		blobs:   newBlobCache(),
		boots:   newBootCache(),
		traces:  newTraces(cfg.Bucket, cfg.Log, cfg.Now),
		reads:   gate.New(int64(cfg.MaxReads), "reads", cfg.QueueTimeout),
		jobs:    gate.New(int64(cfg.MaxJobs), "jobs", 0),
		started: cfg.Now(),
		lastEnd: cfg.Now(),
	}
	s.siblings = newSiblings(s)
	return &Handler{local: cfg.Local, shared: s}
}

func setDefault[T int | time.Duration](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// WithLocal returns a handler of the same state that does or does not offer the
// local routes, for a second listener.
func (h *Handler) WithLocal(local bool) *Handler {
	return &Handler{shared: h.shared, local: local}
}

// IdleSince returns since when no request has been served and true, or false
// while one is, a lease is live or a conversion is queued or running.
func (h *Handler) IdleSince() (time.Time, bool) {
	h.mu.Lock()
	inFlight, last := h.inFlight, h.lastEnd
	h.mu.Unlock()
	if inFlight > 0 || len(h.leases.live()) > 0 || h.busy() {
		return time.Time{}, false
	}
	return last, true
}

func (h *Handler) busy() bool {
	if h.cfg.Jobs == nil {
		return false
	}
	queued, running := h.cfg.Jobs.Active()
	return queued+running > 0
}

func (h *Handler) begin() {
	h.metrics.inFlight.Inc()
	h.requests.Add(1)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inFlight++
}

func (h *Handler) end() {
	h.metrics.inFlight.Dec()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inFlight--
	h.lastEnd = h.cfg.Now()
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	h.begin()
	defer h.end()
	start := time.Now()
	w := newResponse(rw, h.cfg.BodyTimeout)
	id := requestID(r)
	w.Header().Set(HeaderRequestID, id)
	w.Header().Set("X-Content-Type-Options", "nosniff")

	if r.ContentLength != 0 { // until whoever reads the body says otherwise: a request that is refused is read on
		w.setReadDeadline(start.Add(h.cfg.BodyTimeout))
	}
	done, over := beginOn(r.Context())
	defer done()
	site := h.foreign(r)
	if front := h.front(r.URL.EscapedPath()); front != nil && site == nil && over == nil {
		defer func() { h.account(r, "v2", id, w, nil, time.Since(start)) }() // also when it cuts its answer off
		front.ServeHTTP(w, r)
		return
	}
	name := "none"
	rt, row, err := parse(r.Method, r.URL.EscapedPath(), r.URL.RawQuery)
	if row != nil {
		name = row.name
		if why := h.closed(rt, row); why != nil {
			err = why
		}
	}
	if over != nil {
		w.Header().Set("Connection", "close")
		err = over
	}
	if site != nil {
		err = site
	}
	if err == nil {
		err = h.authorize(r, rt)
	}
	if err == nil {
		err = h.serve(w, r, rt)
	}
	begun := w.wrote
	if err != nil {
		h.metrics.refused(toError(err).Code)
	}
	switch {
	case err != nil && !begun:
		h.writeError(w, err, id)
	case err != nil:
		w.status = toError(err).Status // what it would have been, for metrics and log
	}
	h.account(r, name, id, w, err, time.Since(start))
	if err != nil && begun {
		// A body that was begun and cannot be finished must not look complete.
		panic(http.ErrAbortHandler)
	}
}

// front returns what serves a path of the registry, nil for other paths.
func (h *Handler) front(path string) http.Handler {
	if path != "/v2" && !strings.HasPrefix(path, "/v2/") || path == access.TokenPath {
		return nil
	}
	if h.local {
		return h.cfg.V2Local
	}
	return h.cfg.V2
}

// account counts and logs a request that was served.
func (h *Handler) account(r *http.Request, name, id string, w *response, err error, took time.Duration) {
	h.sent.Add(uint64(w.bytes))
	h.metrics.sent.Add(float64(w.bytes))
	h.metrics.observe(name, w.status, took)
	h.logRequest(r, name, id, w, err, took)
}

// serve answers one parsed request, or returns why it cannot.
func (h *Handler) serve(w *response, r *http.Request, rt route) error {
	ctx := r.Context()
	if h.cfg.ReadOnly != nil && rt.op.writes() {
		return h.cfg.ReadOnly(ctx)
	}
	switch rt.op {
	case opImages:
		return h.serveNames(w, r, rt)
	case opImage:
		return h.serveImage(ctx, w, rt)
	case opImageDelete:
		return h.deleteName(ctx, w, rt)
	case opStart:
		return h.serveStart(ctx, w, r, rt)
	case opSignatures, opSign:
		return h.serveSignatures(ctx, w, r, rt)
	case opTrace:
		return h.serveTrace(ctx, w, r, rt.digest)
	case opBootstrap:
		return h.serveBootstrap(ctx, w, r, rt.digest)
	case opConfig:
		return h.serveConfig(ctx, w, r, rt.digest)
	case opChunk:
		return h.serveChunk(ctx, w, r, rt.digest)
	case opBatch:
		return h.serveBatch(ctx, w, r)
	case opBlob:
		return h.serveBlob(ctx, w, r, rt.digest)
	case opMetrics:
		h.gather.ServeHTTP(w, r)
		return nil
	case opHealth:
		return writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	case opReady:
		return h.serveReady(ctx, w)
	case opJobs:
		return h.serveJobs(w, r, rt)
	case opJob:
		return h.serveJob(w, r, rt)
	case opJobEvents, opJobsEvents:
		return h.serveJobEvents(ctx, w, r, rt)
	case opStats:
		return h.serveStats(ctx, w)
	case opToken:
		return h.serveToken(ctx, w, r)
	case opPage, opPageAsset:
		return h.servePage(w, r, rt)
	}
	return h.serveLocal(ctx, w, r, rt)
}

// keptHeaders are those that an error has too, whatever was set before it.
var keptHeaders = []string{HeaderRequestID, "X-Content-Type-Options", "Content-Range", "Connection"}

func (h *Handler) writeError(w *response, err error, id string) {
	e := toError(err)
	e.RequestID = id
	if !h.local {
		e.withoutPaths()
	}
	for name := range w.Header() {
		if !slices.Contains(keptHeaders, name) {
			w.Header().Del(name)
		}
	}
	if e.Retryable && e.Status != statusClientGone {
		w.Header().Set("Retry-After", "1")
	}
	if allow, ok := e.Details["allow"]; ok {
		w.Header()["Allow"] = allow
	}
	if ref, ok := errors.AsType[*access.Refusal](err); ok && len(ref.Challenges) > 0 {
		w.Header()["Www-Authenticate"] = ref.Challenges
	}
	if e.Status == http.StatusAccepted {
		doc := Image{Status: e.Code}
		if ids := e.Details["job"]; len(ids) == 1 {
			doc.Job = ids[0]
		}
		_ = writeJSON(w, e.Status, doc) // the client is gone if it fails
		return
	}
	_ = writeJSON(w, e.Status, errorBody{e})
}

func (h *Handler) logRequest(r *http.Request, name, id string, w *response, err error, took time.Duration) {
	level := slog.LevelDebug
	attrs := []slog.Attr{
		slog.String("request_id", id), slog.String("method", r.Method), slog.String("route", name),
		slog.String("path", r.URL.EscapedPath()), slog.Int("status", w.status),
		slog.Int64("sent", w.bytes), slog.Duration("took", took),
	}
	if err != nil {
		level = slog.LevelInfo
		if e := toError(err); e.Blame == BlameInfra && e.Status >= http.StatusInternalServerError {
			level = slog.LevelError
		}
		attrs = append(attrs, slog.Any("error", err))
	}
	h.log.LogAttrs(r.Context(), level, "request served", attrs...)
}

// requestID keeps a caller's id when it is harmless in a log, or makes one.
func requestID(r *http.Request) string {
	id := r.Header.Get(HeaderRequestID)
	var probe route
	if id == "" || probe.setLease(id) != nil {
		return rand.Text()
	}
	return id
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	b = append(b, '\n')
	w.Header().Set("Content-Type", TypeJSON)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, err = w.Write(b)
	return err
}

// readBody reads a request body of at most limit bytes.
func readBody(w *response, r *http.Request, limit int64) ([]byte, error) {
	w.setReadDeadline(time.Now().Add(w.bodyTimeout))
	b, err := io.ReadAll(http.MaxBytesReader(w.ResponseWriter, r.Body, limit))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return nil, fmt.Errorf("%w: at most %d bytes are allowed here", ErrTooLarge, limit)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, fmt.Errorf("%w: it has to be here in %s", ErrSlowBody, w.bodyTimeout)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: read request body: %w", ErrBadRequest, err)
	}
	w.setReadDeadline(time.Time{}) // only now: of a body that is refused the server reads on
	return b, nil
}

// decodeJSON reads a request body strictly: one document, no unknown field.
func decodeJSON(w *response, r *http.Request, limit int64, v any) error {
	b, err := readBody(w, r, limit)
	if err != nil {
		return err
	}
	if !utf8.Valid(b) {
		return fmt.Errorf("%w: request body is not UTF-8", ErrBadRequest) // decoding would make other names of it
	}
	if err := strictJSON(b, v); err != nil {
		return fmt.Errorf("%w: request body: %w", ErrBadRequest, err)
	}
	return nil
}
