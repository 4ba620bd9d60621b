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
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/internal/proc"
	"quarry/internal/wakeup"
	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/worker/folder"
)

// ChunkSource is one image's way to its chunks, with its own counters.
type ChunkSource interface {
	store.BatchGetter
	// Content has the image's other parts, for a folder in which they are damaged.
	folder.Content
	// Traffic counts what this image has cost the network and its stores.
	Traffic() Traffic
	// KeepAlive tells the stores that the image with that bootstrap is mounted, for
	// about ttl.
	KeepAlive(ctx context.Context, lease string, id, bootstrap chunk.Digest, ttl time.Duration) error
	// EndLease takes that back.
	EndLease(ctx context.Context, lease string) error
	// SendTrace sends the encoded record of a run.
	SendTrace(ctx context.Context, id chunk.Digest, record []byte) error
	Close()
}

// Traffic is what was exchanged with stores.
type Traffic struct {
	Requests    int64
	WireBytes   int64 // both ways, headers and all
	BucketBytes int64 // read by store nodes from their buckets for it, as they say
	Hedges      int64 // second requests for chunks that did not come
	HedgesWon   int64 // those that brought a chunk first
	AskedAgain  int64 // chunks asked for once more, by those and after failures
}

// Config describes a reader.
type Config struct {
	Dir folder.Dir
	// Open connects to the store an image came from.
	Open func(folder.Origin) (ChunkSource, error)
	// Idle is how long the reader stays without a connection; zero is 10 s.
	Idle time.Duration
	// MemoryBytes bounds verified chunks held in memory; zero is
	// blockdev.DefaultMemoryBytes.
	MemoryBytes int64
	// DiskBytes bounds the chunks kept on disk, in the worker folder; zero is a
	// tenth of the disk, and 20 GiB at most; less than zero is no such cache.
	DiskBytes int64
	// ReadTimeout is how long a read waits for a good copy of a chunk; zero is
	// blockdev.DefaultTimeout.
	ReadTimeout time.Duration
	// Sleep leaves it to the kernel how deep idle processors sleep while reads follow
	// one another.
	Sleep bool
	Log   *slog.Logger
}

const (
	defaultReaderIdle = 10 * time.Second
	// leaseTTL outlives a store node's restart; a lease is renewed at a third.
	leaseTTL = 30 * time.Second
	// leaseCall bounds one renewal, and the end of one lease.
	leaseCall = 5 * time.Second
	// leasesAtOnce are renewed at the same time: with 128 images a round takes 10 s,
	// a third of leaseTTL, when no store answers.
	leasesAtOnce = 64
)

// reader serves every image of a worker folder over NBD.
type reader struct {
	cfg     Config
	stands  func() error     // why nobody finds this reader any more
	memory  *blockdev.Memory // of all images
	disk    disk             // of all images
	metrics *metrics
	wakeups *wakeup.Latency // nil where the kernel is not asked
	pulls   chan struct{}   // those under way

	starts chan struct{} // streams being taken
	unsent sync.Once     // for the log line of a record that was not sent

	opened chan struct{} // tells watch of a new image, whose lease is due
	ending chan struct{} // closed when the reader is about to end
	ended  chan struct{} // closed when nothing is served any more

	mu     sync.Mutex     // guards the fields below
	tasks  sync.WaitGroup // in the background; none is added once ended is closed
	open   map[chunk.Digest]*openImage
	count  int // images opened so far
	conns  int
	active time.Time // last moment with a connection or a control request
	said   time.Time // when an image that could not be opened was last logged

	unrepaired map[chunk.Digest]unrepaired
}

// Run serves until ctx ends or nobody needs it. Only one reader runs per
// folder: a second one returns nil soon.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Idle == 0 {
		cfg.Idle = defaultReaderIdle
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l, err := proc.TakeFree(ctx, cfg.Dir.ReaderLock())
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
		cfg: cfg, stands: func() error { return errors.Join(stands(l), blocks.stands(), control.stands()) },
		memory: blockdev.NewMemory(cfg.MemoryBytes), disk: openDisk(ctx, cfg), pulls: make(chan struct{}, maxPulls), opened: make(chan struct{}, 1),
		starts: make(chan struct{}, maxStarts), ending: make(chan struct{}), ended: make(chan struct{}),
		open: map[chunk.Digest]*openImage{}, unrepaired: map[chunk.Digest]unrepaired{}, active: time.Now(),
	}
	if !cfg.Sleep {
		if r.wakeups, err = wakeup.Open(); err != nil {
			cfg.Log.InfoContext(ctx, "the kernel is not asked for short wake-ups, which make reads faster on an idle machine", "error", err)
		}
		defer r.wakeups.Close()
	}
	r.metrics = newMetrics(r)
	return errors.Join(r.serve(ctx, blocks, control), r.disk.close())
}

func (r *reader) serve(ctx context.Context, blocks, control net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	context.AfterFunc(ctx, func() { close(r.ending) })
	web := &http.Server{
		Handler: r.untilEnd(r.controlHandler()), ReadHeaderTimeout: 5 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	server := &nbd.Server{Exports: r.export, Connected: r.connState, Log: r.cfg.Log}
	g.Go(func() error { return server.Serve(ctx, blocks) })
	g.Go(func() error {
		r.wakeups.Run(ctx)
		return nil
	})
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
	r.mu.Lock()
	close(r.ended)
	r.mu.Unlock()
	r.tasks.Wait()
	return err
}

// background runs a task that ends soon after the reader, which waits for it, or
// reports false when the reader has ended.
func (r *reader) background(task func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.ended:
		return false
	default:
	}
	r.tasks.Go(task)
	return true
}

// untilEnd serves with h until the reader has ended, which waits for what h serves
// then: it uses what is closed after.
func (r *reader) untilEnd(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		served := make(chan struct{})
		defer close(served)
		if !r.background(func() { <-served }) { // ends with the request, whose context ends with the reader
			http.Error(w, "the reader ends", http.StatusServiceUnavailable)
			return
		}
		h.ServeHTTP(w, q)
	})
}

// watch keeps the leases of open images and returns when the reader is idle, or when
// nobody finds it any more: the next one is found. A round of renewals goes on beside
// it, and may take its time.
func (r *reader) watch(ctx context.Context) {
	round := make(chan struct{}, 1) // held by the one under way
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
			if err := r.stands(); err != nil {
				r.cfg.Log.WarnContext(ctx, "reader ends for another to take its place", "err", err)
				return
			}
		}
		if time.Since(renewed) <= leaseTTL/3 {
			continue
		}
		select {
		case round <- struct{}{}:
			renewed = time.Now()
			r.background(func() { // ends with ctx
				r.renewLeases(ctx)
				<-round
			})
		default: // the next tick sees whether it has ended
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
