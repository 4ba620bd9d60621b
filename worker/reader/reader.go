package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/internal/proc"
	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/store"
	"quarry/store/chunk"
)

// ChunkSource is one image's way to its chunks, with its own counters.
type ChunkSource interface {
	store.BatchGetter
	// Traffic counts all requests and all bytes on the wire, both ways.
	Traffic() (requests, wireBytes int64)
	// KeepAlive tells the store that the image is mounted, for about ttl.
	KeepAlive(ctx context.Context, lease string, id chunk.Digest, ttl time.Duration) error
	// EndLease takes that back.
	EndLease(ctx context.Context, lease string) error
	Close()
}

// ReaderConfig describes a reader process.
type ReaderConfig struct {
	Dir Dir
	// Open connects to the store an image came from.
	Open func(Origin) (ChunkSource, error)
	// Idle is how long the reader stays without a connection; zero is 10 s.
	Idle time.Duration
	// CacheBytes bounds verified chunks held in memory; zero is 128 MiB.
	CacheBytes int64
	Log        *slog.Logger
}

const (
	defaultReaderIdle = 10 * time.Second
	// leaseTTL outlives a store node's restart; a lease is renewed at a third.
	leaseTTL = 30 * time.Second
	// leaseCall bounds a round of renewals, and the end of one lease.
	leaseCall = 5 * time.Second
	// maxReadErrors bounds the failed reads kept for ImageStats.
	maxReadErrors = 64
)

// reader serves every image of a worker folder over NBD.
type reader struct {
	cfg   ReaderConfig
	cache *blockdev.Cache // of all images

	opened chan struct{} // tells watch of a new image, whose lease is due

	mu     sync.Mutex // guards the fields below
	open   map[chunk.Digest]*openImage
	count  int // images opened so far
	conns  int
	active time.Time // last moment with a connection or a control request
}

// openImage is one image that is served. It is in the reader's map from the
// moment it is being loaded, so that loading holds up nobody else.
type openImage struct {
	number int           // of all images this reader has opened
	users  int           // connections; guarded by the reader's mu
	ready  chan struct{} // closed when the fields below are set
	err    error
	*blockdev.Device
	src ChunkSource

	mu     sync.Mutex // guards errors and failed
	errors []ReadError
	failed int64
}

// RunReader serves until ctx ends or nobody needs it. Only one reader runs per
// folder: a second one returns nil at once.
func RunReader(ctx context.Context, cfg ReaderConfig) error {
	if cfg.Idle == 0 {
		cfg.Idle = defaultReaderIdle
	}
	cfg.Log = logOr(cfg.Log)
	l, err := proc.TryLock(filepath.Join(cfg.Dir.path, "reader.lock"))
	if errors.Is(err, proc.ErrLocked) {
		return nil
	}
	if err != nil {
		return err
	}
	defer l.Unlock()
	blocks, err := listenUnix(cfg.Dir.ReaderSocket())
	if err != nil {
		return err
	}
	defer blocks.Close()
	control, err := listenUnix(cfg.Dir.ReaderControl())
	if err != nil {
		return err
	}
	defer control.Close()
	r := &reader{
		cfg: cfg, cache: blockdev.NewCache(cfg.CacheBytes), opened: make(chan struct{}, 1),
		open: map[chunk.Digest]*openImage{}, active: time.Now(),
	}
	return r.serve(ctx, blocks, control)
}

func (r *reader) serve(ctx context.Context, blocks, control net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	web := &http.Server{Handler: r.controlHandler(), ReadHeaderTimeout: 5 * time.Second}
	server := &nbd.Server{Exports: r.export, Log: r.cfg.Log}
	g.Go(func() error { return server.Serve(ctx, countingListener{blocks, r.connState}) })
	g.Go(func() error {
		if err := web.Serve(control); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		defer cancel()
		r.watch(ctx)
		return web.Close()
	})
	return g.Wait()
}

// watch keeps the leases of open images and returns when the reader is idle.
func (r *reader) watch(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	renewed := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.opened:
			renewed = time.Time{}
		case now := <-tick.C:
			if r.idle(now) {
				return
			}
		}
		if time.Since(renewed) > leaseTTL/3 {
			renewed = time.Now()
			r.renewLeases(ctx)
		}
	}
}

func (r *reader) idle(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conns > 0 {
		r.active = now
	}
	return now.Sub(r.active) > r.cfg.Idle
}

func (r *reader) renewLeases(ctx context.Context) {
	r.mu.Lock()
	images := maps.Clone(r.open)
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, leaseCall)
	defer cancel()
	var g errgroup.Group
	for id, im := range images {
		g.Go(func() error {
			select {
			case <-im.ready:
			case <-ctx.Done():
				return nil
			}
			if im.err != nil {
				return nil
			}
			if err := im.src.KeepAlive(ctx, im.lease(id), id, leaseTTL); err != nil {
				r.cfg.Log.WarnContext(ctx, "lease not renewed", "image_id", id, "err", err)
			}
			return nil
		})
	}
	g.Wait()
}

// lease names this opening of the image: one that ends must not end the lease of
// the next.
func (im *openImage) lease(id chunk.Digest) string {
	return fmt.Sprintf("reader-%d-%d-%s", os.Getpid(), im.number, id.Hex()[:16])
}

func (r *reader) connState(delta int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns += delta
	r.active = time.Now()
}

// export opens an image by id. The folder's copy is verified against the id, so
// a reader started after a crash serves the same bytes or nothing.
func (r *reader) export(ctx context.Context, name string) (nbd.Device, error) {
	id, err := chunk.ParseHex(name)
	if err != nil {
		return nil, fmt.Errorf("export %q: the name must be an image id: %w", name, nbd.ErrUnknownExport)
	}
	im, first := r.use(id)
	if first {
		im.err = r.load(im, id)
		close(im.ready)
	}
	select {
	case <-im.ready:
	case <-ctx.Done():
		r.leave(id, im)
		return nil, ctx.Err()
	}
	if im.err != nil {
		r.leave(id, im)
		return nil, fmt.Errorf("export %q: %w", name, im.err)
	}
	select {
	case r.opened <- struct{}{}:
	default: // watch is about to look anyway
	}
	return &usedImage{openImage: im, r: r, id: id}, nil
}

// use counts a user of an image and reports whether it must load it.
func (r *reader) use(id chunk.Digest) (im *openImage, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	im, ok := r.open[id]
	if !ok {
		r.count++
		im = &openImage{number: r.count, ready: make(chan struct{})}
		r.open[id] = im
	}
	im.users++
	return im, !ok
}

// leave takes a user away; the image is closed with its last one.
func (r *reader) leave(id chunk.Digest, im *openImage) {
	r.mu.Lock()
	im.users--
	last := im.users == 0
	if last {
		delete(r.open, id)
	}
	r.mu.Unlock()
	if last {
		r.close(id, im)
	}
}

func (r *reader) load(im *openImage, id chunk.Digest) error {
	local, err := r.cfg.Dir.loadImage(id)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("no such image on this worker: %w", nbd.ErrUnknownExport)
	}
	if err != nil {
		return err
	}
	var origin Origin
	if err := readJSON(filepath.Join(r.cfg.Dir.imageDir(id), "origin.json"), &origin); err != nil {
		return err
	}
	src, err := r.cfg.Open(origin)
	if err != nil {
		return err
	}
	im.src = src
	im.Device, err = blockdev.New(blockdev.Config{
		Bootstrap: local.Bootstrap, Image: local.RAFS, Chunks: src, Cache: r.cache,
		Log: r.cfg.Log.With("image_id", id), OnError: im.readFailed,
	})
	return err
}

func (r *reader) close(id chunk.Digest, im *openImage) {
	<-im.ready
	if im.Device != nil {
		im.Device.Close()
	}
	if im.src == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaseCall)
	defer cancel()
	if err := im.src.EndLease(ctx, im.lease(id)); err != nil {
		r.cfg.Log.WarnContext(ctx, "lease not ended", "image_id", id, "err", err)
	}
	im.src.Close()
}

// usedImage is an open image as one connection has it; the server closes it when
// the connection has ended.
type usedImage struct {
	*openImage
	r  *reader
	id chunk.Digest
}

// Close implements io.Closer.
func (u *usedImage) Close() error {
	u.r.leave(u.id, u.openImage)
	return nil
}

// ReadError is one read of an image that was answered with EIO.
type ReadError struct {
	Path  string       `json:"path"` // a file that uses the chunk
	Chunk chunk.Digest `json:"chunk"`
	Err   string       `json:"error"`
}

// loaded reports whether the image is there to be asked.
func (im *openImage) loaded() bool {
	select {
	case <-im.ready:
		return im.err == nil
	default:
		return false
	}
}

func (im *openImage) readFailed(e *blockdev.ReadError) {
	im.mu.Lock()
	defer im.mu.Unlock()
	im.failed++
	if len(im.errors) < maxReadErrors {
		im.errors = append(im.errors, ReadError{Path: e.Path, Chunk: e.Chunk, Err: e.Err.Error()})
	}
}

// ImageStats counts what one image cost since the reader opened it. All sizes
// are in bytes.
type ImageStats struct {
	Opening     string      `json:"opening"` // names the reader and its opening of the image
	Requests    int64       `json:"requests"`
	WireBytes   int64       `json:"wire_bytes"`
	ChunkBytes  int64       `json:"chunk_plain_bytes"`
	DeviceBytes int64       `json:"device_bytes"`
	FailedReads int64       `json:"failed_reads"`
	Errors      []ReadError `json:"errors,omitempty"` // the first 64
}

func (im *openImage) stats() ImageStats {
	requests, wire := im.src.Traffic()
	d := im.Device.Stats()
	im.mu.Lock()
	defer im.mu.Unlock()
	return ImageStats{
		Opening:  fmt.Sprintf("%d-%d", os.Getpid(), im.number),
		Requests: requests, WireBytes: wire, ChunkBytes: d.ChunkBytes, DeviceBytes: d.ReadBytes,
		FailedReads: im.failed, Errors: append([]ReadError(nil), im.errors...),
	}
}

// controlHandler answers GET /ping, which also keeps an idle reader for another
// while, and GET /images/<id>/stats.
func (r *reader) controlHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ping", func(w http.ResponseWriter, _ *http.Request) {
		r.connState(0)
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /images/{id}/stats", func(w http.ResponseWriter, q *http.Request) {
		id, err := chunk.ParseHex(q.PathValue("id"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.mu.Lock()
		im := r.open[id]
		r.mu.Unlock()
		if im == nil || !im.loaded() {
			http.Error(w, "image is not open", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(im.stats())
	})
	return mux
}

// countingListener tells how many connections it has given away and not seen
// closed.
type countingListener struct {
	net.Listener
	changed func(delta int)
}

func (l countingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.changed(1)
	return &countedConn{Conn: conn, closed: sync.OnceFunc(func() { l.changed(-1) })}, nil
}

type countedConn struct {
	net.Conn
	closed func()
}

func (c *countedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// listenUnix listens on a socket whose former owner is known to be gone.
func listenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return net.Listen("unix", path)
}

// readerClient asks the reader's control socket.
func (d Dir) readerClient() *http.Client {
	return &http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var nd net.Dialer
				return nd.DialContext(ctx, "unix", d.ReaderControl())
			},
		},
	}
}

// ErrNotOpen says that the reader does not have the image open.
var ErrNotOpen = errors.New("the reader does not have the image open")

// Stats asks the reader what an image has cost since it was opened. Errors:
// ErrNotOpen, and those of a reader that does not answer.
func (d Dir) Stats(ctx context.Context, id chunk.Digest) (ImageStats, error) {
	var st ImageStats
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://reader/images/"+id.Hex()+"/stats", nil)
	if err != nil {
		return st, err
	}
	resp, err := d.readerClient().Do(req)
	if err != nil {
		return st, fmt.Errorf("ask the reader: %w", err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
		err = json.NewDecoder(resp.Body).Decode(&st)
		return st, err
	case http.StatusNotFound:
		return st, ErrNotOpen
	}
	return st, fmt.Errorf("ask the reader: %s", resp.Status)
}

// startTimeout bounds the start of a reader or shim; it is longer than what a
// shim gives itself.
const startTimeout = 90 * time.Second

func (d Dir) pingReader(ctx context.Context) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://reader/ping", nil)
	if err != nil {
		return false
	}
	resp, err := d.readerClient().Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusNoContent
}

// ensureReader starts the reader when none answers.
func (w *Worker) ensureReader(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := proc.Ensure(ctx, w.ReaderCommand, filepath.Join(w.Dir.path, "reader.log"), w.Dir.pingReader); err != nil {
		return fmt.Errorf("the reader of %s: %w", w.Dir.path, err)
	}
	return nil
}
