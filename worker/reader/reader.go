// Package reader is the process that serves the images of a worker folder over
// NBD and is the only one that fetches their chunks. It needs nothing but the
// folder, so that one that was killed can be replaced at any moment.
package reader

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/internal/proc"
	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/worker/folder"
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

// Config describes a reader.
type Config struct {
	Dir folder.Dir
	// Open connects to the store an image came from.
	Open func(folder.Origin) (ChunkSource, error)
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
	cfg   Config
	cache *blockdev.Cache // of all images

	opened chan struct{} // tells watch of a new image, whose lease is due

	mu     sync.Mutex // guards the fields below
	open   map[chunk.Digest]*openImage
	count  int // images opened so far
	conns  int
	active time.Time // last moment with a connection or a control request
}

// Run serves until ctx ends or nobody needs it. Only one reader runs per
// folder: a second one returns nil at once.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Idle == 0 {
		cfg.Idle = defaultReaderIdle
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l, err := proc.TryLock(cfg.Dir.ReaderLock())
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

func (r *reader) connState(delta int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns += delta
	r.active = time.Now()
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
