package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

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
	// maxReadErrors bounds the failed reads kept for ImageStats.
	maxReadErrors = 64
)

// reader serves every image of a worker folder over NBD.
type reader struct {
	cfg   ReaderConfig
	cache *blockdev.Cache // of all images

	mu     sync.Mutex // guards the fields below
	open   map[chunk.Digest]*openImage
	conns  int
	active time.Time // last moment with a connection or a control request
}

type openImage struct {
	*blockdev.Device
	src   ChunkSource
	users int // connections; guarded by the reader's mu

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
	l, err := tryLock(filepath.Join(cfg.Dir.path, "reader.lock"))
	if errors.Is(err, errLocked) {
		return nil
	}
	if err != nil {
		return err
	}
	defer l.unlock()
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
	r := &reader{cfg: cfg, cache: blockdev.NewCache(cfg.CacheBytes), open: map[chunk.Digest]*openImage{}, active: time.Now()}
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
	err := g.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// watch renews the leases of open images and returns when the reader is idle.
func (r *reader) watch(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	renewed := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			r.mu.Lock()
			if r.conns > 0 {
				r.active = now
			}
			idle := now.Sub(r.active) > r.cfg.Idle
			r.mu.Unlock()
			if idle {
				return
			}
			if now.Sub(renewed) > leaseTTL/3 {
				renewed = now
				r.renewLeases(ctx)
			}
		}
	}
}

func (r *reader) renewLeases(ctx context.Context) {
	r.mu.Lock()
	images := make(map[chunk.Digest]*openImage, len(r.open))
	for id, im := range r.open {
		images[id] = im
	}
	r.mu.Unlock()
	for id, im := range images {
		r.renew(ctx, id, im.src)
	}
}

func (r *reader) renew(ctx context.Context, id chunk.Digest, src ChunkSource) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := src.KeepAlive(ctx, leaseName(id), id, leaseTTL); err != nil {
		r.cfg.Log.WarnContext(ctx, "lease not renewed", "image_id", id, "err", err)
	}
}

// leaseName names this reader's lease on an image.
func leaseName(id chunk.Digest) string {
	return fmt.Sprintf("reader-%d-%s", os.Getpid(), id.Hex()[:16])
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
	r.mu.Lock()
	defer r.mu.Unlock()
	im, ok := r.open[id]
	if !ok {
		if im, err = r.openImage(id); err != nil {
			return nil, fmt.Errorf("export %q: %w", name, err)
		}
		r.open[id] = im
		// The lease is renewed again and again; the first time must not delay a mount.
		go r.renew(ctx, id, im.src) // ends with ctx or its own 5 s deadline
	}
	im.users++
	return &usedImage{openImage: im, r: r, id: id}, nil
}

func (r *reader) openImage(id chunk.Digest) (*openImage, error) {
	local, err := r.cfg.Dir.loadImage(id)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("no such image on this worker: %w", nbd.ErrUnknownExport)
	}
	if err != nil {
		return nil, err
	}
	var origin Origin
	if err := readJSON(filepath.Join(r.cfg.Dir.imageDir(id), "origin.json"), &origin); err != nil {
		return nil, err
	}
	src, err := r.cfg.Open(origin)
	if err != nil {
		return nil, err
	}
	im := &openImage{src: src}
	im.Device, err = blockdev.New(blockdev.Config{
		Bootstrap: local.Bootstrap, Image: local.RAFS, Chunks: src, Cache: r.cache,
		Log: r.cfg.Log.With("image_id", id), OnError: im.readFailed,
	})
	if err != nil {
		src.Close()
		return nil, err
	}
	return im, nil
}

// usedImage is an open image as one connection has it.
type usedImage struct {
	*openImage
	r  *reader
	id chunk.Digest
}

// Close is called by the server when the connection has ended; the image is
// closed with its last one.
func (u *usedImage) Close() error {
	u.r.mu.Lock()
	u.users--
	last := u.users == 0
	if last {
		delete(u.r.open, u.id)
	}
	u.r.mu.Unlock()
	if last {
		u.r.closeImage(u.id, u.openImage)
	}
	return nil
}

func (r *reader) closeImage(id chunk.Digest, im *openImage) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	im.Device.Close()
	if err := im.src.EndLease(ctx, leaseName(id)); err != nil {
		r.cfg.Log.WarnContext(ctx, "lease not ended", "image_id", id, "err", err)
	}
	im.src.Close()
}

// ReadError is one read of an image that was answered with EIO.
type ReadError struct {
	Path  string       `json:"path"` // a file that uses the chunk
	Chunk chunk.Digest `json:"chunk"`
	Err   string       `json:"error"`
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
		if im == nil {
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

// Stats asks the reader what an image has cost so far; zero when it is not open.
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
		return st, json.NewDecoder(resp.Body).Decode(&st)
	case http.StatusNotFound:
		return st, nil
	}
	return st, fmt.Errorf("ask the reader: %s", resp.Status)
}

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

// startTimeout bounds the start of a reader or shim.
const startTimeout = time.Minute

// ensureReader starts the reader when none answers.
func (m *Mounter) ensureReader(ctx context.Context) error {
	if m.Dir.pingReader(ctx) {
		return nil
	}
	logPath := filepath.Join(m.Dir.path, "reader.log")
	cmd, err := detached(m.ReaderCommand, logPath)
	if err != nil {
		return fmt.Errorf("start the reader: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }() // ends with the reader, or with this process
	deadline := time.After(startTimeout)
	for !m.Dir.pingReader(ctx) {
		select {
		case err := <-done:
			if err != nil {
				return fmt.Errorf("the reader ended: %w: %s", err, lastLine(logPath))
			}
			done = nil // another reader has the lock and will answer
		case <-time.After(lockPoll):
		case <-deadline:
			return fmt.Errorf("the reader does not answer on %s after %s; see %s", m.Dir.ReaderControl(), startTimeout, logPath)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// lastLine returns the end of a log for an error message.
func lastLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}
