package gc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	indexmem "quarry/chunkindex/mem"
	"quarry/store/bucket"
	bucketmem "quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
)

// The simulation runs the real catalog, packed store, gate and collector over memory.
// One actor runs at a time: it hands back before each call of the bucket and of the
// journal, and the seed says who goes on, what fails, who crashes and who is stalled
// while another process takes over.

var (
	errCrashed = errors.New("the process has crashed")
	errLost    = errors.New("injected fault")
)

// world is one interleaving.
type world struct {
	rng    *rand.Rand
	bucket *bucketmem.Bucket
	procs  []*proc
	back   chan *actor
	now    time.Time     // jumps
	since  time.Duration // does not go back
	leases map[*actor]Lease
	jobs   map[*actor]chunk.Digest // sources that stay as long as a job is about them
	acked  map[string]uint64       // highest serial by tag that somebody was told of
	faults float64
	cfg    Config // of the collectors
	tmp    string
	err    error // what broke an invariant
	events int

	judge *catalog.Catalog // follows the journal, for verify
	dirty bool             // something was deleted or named since verify
	trace func(format string, args ...any)
}

// proc is one process that has the store open.
type proc struct {
	w       *world
	n       int
	index   *indexmem.Index
	catalog *catalog.Catalog
	store   *packed.Store
	gate    *Gate
	gc      *Collector
	actors  []*actor
	dead    bool
	stalled int // steps for which it does not run
}

// actor is one goroutine of a process; only the one that was resumed runs.
type actor struct {
	proc    *proc
	name    string
	resume  chan struct{}
	ended   bool
	locked  bool // it may hold a lock of its process
	waiting <-chan struct{}
}

type actorKey struct{}

func actorOf(ctx context.Context) *actor { a, _ := ctx.Value(actorKey{}).(*actor); return a }

// yield lets others run. Under a lock only those of other processes may.
func (a *actor) yield(locked bool) error {
	if a.proc.dead {
		return errCrashed
	}
	a.locked = locked
	a.proc.w.back <- a
	<-a.resume
	a.locked = false
	if a.proc.dead {
		return errCrashed
	}
	return nil
}

func await(ctx context.Context, ready <-chan struct{}) error {
	a := actorOf(ctx)
	a.waiting = ready
	defer func() { a.waiting = nil }()
	for {
		select {
		case <-ready:
			return nil
		default:
		}
		if err := a.yield(false); err != nil {
			return err
		}
	}
}

func (w *world) start(p *proc, name string, fn func(context.Context, *actor)) {
	a := &actor{proc: p, name: name, resume: make(chan struct{})}
	p.actors = append(p.actors, a)
	go func() { // ends with fn; the scheduler runs it to its end
		<-a.resume
		fn(context.WithValue(context.Background(), actorKey{}, a), a)
		a.ended = true
		w.back <- a
	}()
}

func (a *actor) runnable() bool {
	if a.ended {
		return false
	}
	if a.waiting != nil && !a.proc.dead {
		select {
		case <-a.waiting:
		default:
			return false
		}
	}
	for _, b := range a.proc.actors {
		if b != a && b.locked && !b.ended {
			return false
		}
	}
	return true
}

// step resumes one actor; false when none can run.
func (w *world) step() bool {
	var can []*actor
	stalled := false
	for _, p := range w.procs {
		if p.stalled > 0 {
			p.stalled--
			stalled = true
			continue
		}
		for _, a := range p.actors {
			if a.runnable() {
				can = append(can, a)
			}
		}
	}
	if len(can) == 0 {
		return stalled
	}
	w.resume(can[w.rng.IntN(len(can))])
	return true
}

func (w *world) resume(a *actor) {
	w.events++
	a.resume <- struct{}{}
	<-w.back
}

// crash ends a process: its calls fail from now on, and what it has in memory is gone.
func (w *world) crash(p *proc) {
	p.dead = true
	w.trace("process %d crashes", p.n)
	for slices.ContainsFunc(p.actors, func(a *actor) bool { return !a.ended }) {
		for _, a := range p.actors {
			if a.runnable() {
				w.resume(a)
			}
		}
	}
}

// boot starts a process on an index of its own, which may be an earlier one's.
func (w *world) boot(index *indexmem.Index) (*proc, error) {
	p := &proc{w: w, n: len(w.procs) + 1, index: index}
	io := &simBucket{p: p, b: w.bucket}
	w.trace("process %d starts", p.n)
	ctx := context.Background()
	var err error
	p.catalog, err = catalog.Open(ctx, catalog.Config{
		Journal: io, Clock: func() time.Time { return w.now },
		Writer: &catalog.Writer{ID: fmt.Sprintf("%032x", p.n), Folder: fmt.Sprintf("%032x", p.n), Host: "sim", PID: p.n},
	})
	if err != nil {
		return nil, err
	}
	if err := p.catalog.Claim(ctx); err != nil {
		return nil, err
	}
	p.store, err = packed.Open(ctx, packed.Config{
		Bucket: io, Catalog: p.catalog, Index: index, TmpDir: w.tmp, Workers: 1, PackSize: 256,
		Now: func() time.Time { return w.now },
	})
	if err != nil {
		return nil, err
	}
	p.gate = NewGate()
	p.gate.Await = await
	cfg := w.cfg
	cfg.Bucket, cfg.Catalog, cfg.Store, cfg.Gate = io, p.catalog, p.store, p.gate
	cfg.Leases = func(context.Context, bool) ([]Lease, error) { return w.liveLeases(), nil }
	cfg.Roots = func(context.Context) ([]chunk.Digest, error) { return w.liveJobs(), nil }
	cfg.Recipe, cfg.LayerChunks = simRecipe, simLayer
	cfg.Now, cfg.Since = func() time.Time { return w.now }, func() time.Duration { return w.since }
	p.gc = New(cfg)
	w.procs = append(w.procs, p)
	return p, nil
}

func (w *world) liveLeases() []Lease {
	var ls []Lease
	for _, p := range w.procs {
		for _, a := range p.actors {
			if l, ok := w.leases[a]; ok {
				ls = append(ls, l)
			}
		}
	}
	return ls
}

func (w *world) liveJobs() []chunk.Digest {
	var sources []chunk.Digest
	for _, p := range w.procs {
		for _, a := range p.actors {
			if source, ok := w.jobs[a]; ok {
				sources = append(sources, source)
			}
		}
	}
	return sources
}

// simBucket is bucket and journal as a process sees them. Calls without an actor, at
// start, are not scheduled.
type simBucket struct {
	p *proc
	b *bucketmem.Bucket
}

var (
	_ bucket.Bucket  = (*simBucket)(nil)
	_ bucket.Journal = (*simBucket)(nil)
)

// call schedules one call: others may run before it and after it, and it may fail with
// or without having had its effect.
func (s *simBucket) call(ctx context.Context, what string, locked, mayFail bool, fn func() error) error {
	a := actorOf(ctx)
	if a == nil {
		return fn()
	}
	if err := a.yield(locked); err != nil {
		return err
	}
	return s.now(a, what, locked, mayFail, fn)
}

func (s *simBucket) now(a *actor, what string, locked, mayFail bool, fn func() error) error {
	w := s.p.w
	if s.p.dead {
		return errCrashed
	}
	if mayFail && w.rng.Float64() < w.faults {
		return errLost
	}
	if err := fn(); err != nil {
		return err
	}
	w.trace("%d: process %d %s: %s", w.events, s.p.n, a.name, what)
	if mayFail && w.rng.Float64() < w.faults {
		w.trace("    but told that it failed")
		return errLost
	}
	if w.rng.IntN(4) == 0 {
		return a.yield(locked)
	}
	return nil
}

// change calls fn. A change of anything but a pack is not held up: whoever makes it has
// just asked whether it may, and docs/decisions/gc.md says what that leaves.
func (s *simBucket) change(ctx context.Context, what, key string, fn func() error) error {
	a := actorOf(ctx)
	if a == nil || strings.HasPrefix(key, "packs/") {
		return s.call(ctx, what+key, false, true, fn)
	}
	return s.now(a, what+key, false, true, fn)
}

func (s *simBucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	return s.change(ctx, "put ", key, func() error { return s.b.Put(ctx, key, body, size) })
}

func (s *simBucket) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	return s.call(ctx, "read "+key, false, false, func() error { return s.b.ReadAt(ctx, key, p, off) })
}

func (s *simBucket) Stat(ctx context.Context, key string) (o bucket.Object, err error) {
	err = s.call(ctx, "stat "+key, true, false, func() error { o, err = s.b.Stat(ctx, key); return err })
	return o, err
}

func (s *simBucket) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	return func(yield func(bucket.Object, error) bool) {
		if err := s.call(ctx, "list "+prefix, false, false, func() error { return nil }); err != nil {
			yield(bucket.Object{}, err)
			return
		}
		s.b.List(ctx, prefix)(yield)
	}
}

func (s *simBucket) Delete(ctx context.Context, key string) error {
	return s.change(ctx, "delete ", key, func() error { s.p.w.dirty = true; return s.b.Delete(ctx, key) })
}

func (s *simBucket) Append(ctx context.Context, n uint64, entry []byte) error {
	return s.call(ctx, fmt.Sprintf("append %d %s", n, entry), true, true, func() error {
		s.p.w.dirty = true
		return s.b.Append(ctx, n, entry)
	})
}

func (s *simBucket) Read(ctx context.Context, from uint64) iter.Seq2[bucket.Entry, error] {
	return func(yield func(bucket.Entry, error) bool) {
		a := actorOf(ctx)
		if a != nil {
			if err := a.yield(true); err != nil {
				yield(bucket.Entry{}, err)
				return
			}
		}
		s.b.Read(ctx, from)(yield)
	}
}

// simImages are the images there are: numbers of chunks, many of them shared.
var simImages = [][]int{{0, 1, 2, 3}, {2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}, {6, 7}, {1, 7, 8}}

func simChunk(n int) []byte {
	return bytes.Repeat([]byte{byte('a' + n)}, 60+n)
}

var simContent = func() map[chunk.Digest][]byte {
	m := map[chunk.Digest][]byte{}
	for n := range 16 {
		m[chunk.Sum(simChunk(n))] = simChunk(n)
	}
	return m
}()

func simBoot(im int) []byte {
	var b bytes.Buffer
	for _, n := range simImages[im] {
		d := chunk.Sum(simChunk(n))
		b.Write(d[:])
	}
	return b.Bytes()
}

func simRecipe(boot []byte) (Recipe, error) {
	var r Recipe
	for p := range slices.Chunk(boot, len(chunk.Digest{})) {
		r.Chunks = append(r.Chunks, chunk.Digest(p))
	}
	v := chunk.Sum(append([]byte("blob"), boot...))
	r.Blob = &v
	return r, nil
}

func simLayer(record []byte) ([]chunk.Digest, bool) {
	r, err := simRecipe(record)
	return r.Chunks, err == nil
}

func simSource(im int) chunk.Digest { return chunk.Sum(fmt.Appendf(nil, "source %d", im)) }

func simStatement(im int) []byte {
	boot := simBoot(im)
	r, _ := simRecipe(boot)
	b, err := image.EncodeStatement(image.Statement{
		Source: simSource(im), Platform: image.HostPlatform(), Config: chunk.Sum(fmt.Appendf(nil, "config %d", im%2)),
		Bootstrap: chunk.Sum(boot), BootstrapSize: 4096, Blob: r.Blob, Tree: chunk.Sum(boot), ChunkSize: chunk.DefaultSize, Converter: "sim",
	})
	if err != nil {
		panic(err)
	}
	return b
}
