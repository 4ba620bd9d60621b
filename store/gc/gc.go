// Package gc deletes what no root needs: mark, condemn, wait for who counted on it,
// mark again, delete. It works beside conversions and reads, and everything it depends
// on is injected, so that a simulation can stop, crash and overtake it at every step.
// docs/decisions/gc.md says why each step is there.
package gc

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/packed"
	"quarry/store/registry"
)

// ErrRunning says that a collection is under way already.
var ErrRunning = errors.New("gc is running already; wait until it has ended")

const (
	// DefaultRetain is how long the images of moved and deleted names stay.
	DefaultRetain = 7 * 24 * time.Hour
	// DefaultGrace is how long a retired pack stays in the bucket when other nodes may
	// read it: they follow the journal within seconds, and say when they do not.
	DefaultGrace = time.Hour
	// DefaultWait bounds the wait for conversions that were under way.
	DefaultWait = time.Hour
	// DefaultPush is how long a client may take between its question for a blob and the
	// manifest that names it: it may push many large ones in between.
	DefaultPush = 2 * time.Hour
	// DefaultRatio is which part of a pack must be live, or else it is copied: a pack
	// that is half dead costs one read and half a write to get its other half back.
	DefaultRatio = 0.5
)

// Lease is what one mount needs.
type Lease struct {
	Image     chunk.Digest // image id; zero when it is not known
	Bootstrap chunk.Digest // zero when it is not known
}

// Limits say how careful a run is.
type Limits struct {
	Retain time.Duration // 0 = an image goes as soon as its last name has
	Grace  time.Duration // 0 = nobody else reads the bucket
	Wait   time.Duration // 0 = DefaultWait
	Ratio  float64       // 0 = DefaultRatio
	// Push is how long what was pushed stays after a client was told that it is there,
	// which may name it yet.
	Push time.Duration
}

func (l Limits) withDefaults() Limits {
	l.Wait = cmp.Or(l.Wait, DefaultWait)
	l.Ratio = cmp.Or(l.Ratio, DefaultRatio)
	return l
}

// Config is what a Collector works on.
type Config struct {
	Bucket  bucket.Bucket
	Catalog *catalog.Catalog
	Store   *packed.Store
	Gate    *Gate
	// Leases returns the live leases of mounts; only to look, it changes nothing.
	Leases func(ctx context.Context, look bool) ([]Lease, error)
	// Roots returns further sources whose images stay: those of jobs. nil: none.
	Roots func(context.Context) ([]chunk.Digest, error)
	// Stored returns sources that stay as long as they lost no name more than Retain ago:
	// those of manifests that were pushed and may never have had a tag. nil: none.
	Stored func(context.Context) ([]chunk.Digest, error)
	// Pushed deletes what nobody needs of what was pushed; nil: nothing was. Told reports
	// whether a client was told of a manifest so recently.
	Pushed func(context.Context, registry.Collect) error
	Told   func(source chunk.Digest, within time.Duration) bool
	// Recipe reads a bootstrap; nil = ReadRecipe.
	Recipe func(boot []byte) (Recipe, error)
	// LayerChunks returns the chunks that a layer record names; false when it is none
	// that is known, and stays.
	LayerChunks func(record []byte) ([]chunk.Digest, bool)

	Limits Limits // of runs that bring none

	Now     func() time.Time     // nil = time.Now; how long ago a name was left
	Since   func() time.Duration // nil = since the process started; never goes back
	Log     *slog.Logger
	Metrics *Metrics

	// The two protections that the simulation must miss when they are off.
	noSecondMark, noWait bool
}

// Collector collects the garbage of one store. Safe for concurrent use.
type Collector struct {
	cfg     Config
	running sync.Mutex
	// seen is when this process first saw an object that is no pack of the catalog.
	// running guards it.
	seen map[chunk.Digest]time.Duration
	// recordsDue says that packs were retired since the layer records were looked at, or
	// may have been, by an earlier process. running guards it.
	recordsDue bool
}

// New returns a Collector.
func New(cfg Config) *Collector {
	if cfg.Recipe == nil {
		cfg.Recipe = ReadRecipe
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Since == nil {
		start := time.Now() // has a monotonic reading
		cfg.Since = func() time.Duration { return time.Since(start) }
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics()
	}
	return &Collector{cfg: cfg, seen: map[chunk.Digest]time.Duration{}, recordsDue: true}
}

// Metrics returns the counters, for their owner to register.
func (c *Collector) Metrics() *Metrics { return c.cfg.Metrics }

// Options say what one run does.
type Options struct {
	DryRun bool    // say what would be deleted, as far as one mark tells
	Limits *Limits // nil = those of the Collector
	// Step is told what the run does now; nil = nobody asks.
	Step func(string)
}

// Amount is a number of objects and their bytes.
type Amount struct {
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

func (a *Amount) add(bytes int64) { a.Objects++; a.Bytes += bytes }

// Report says what a run did or, dry, would do.
type Report struct {
	DryRun  bool              `json:"dry_run"`
	Images  int64             `json:"images"`  // that are needed
	Chunks  int64             `json:"chunks"`  // that are needed
	Deleted map[string]Amount `json:"deleted"` // by kind: the first part of the key
	// Repacked are live chunks of condemned packs, and their stored bytes.
	Repacked Amount `json:"repacked"`
	// Condemned are packs that are being emptied, Retired those that this run took out
	// of the store, Waiting those whose objects are deleted after the grace.
	Condemned Amount `json:"condemned"`
	Retired   Amount `json:"retired"`
	Waiting   Amount `json:"waiting"`
	// Spared are images that a conversion asked for while they were condemned.
	Spared int64 `json:"spared"`
	// Problems say what was left alone, and what to do.
	Problems []string `json:"problems"`
}

func (r *Report) deleted(kind string, bytes int64) {
	a := r.Deleted[kind]
	a.add(bytes)
	r.Deleted[kind] = a
}

// run is one collection.
type run struct {
	*Collector
	limits  Limits
	report  *Report
	step    func(string)
	marks   *marks
	asked   time.Duration         // when the last mark began to look for roots
	firm    map[chunk.Digest]bool // sources that have a root
	loose   map[chunk.Digest]bool // those that are stored and never had a name
	dead    *inventory
	victims []packed.Use
	size    map[chunk.Digest]int64 // of victims and orphans
	orphans []bucket.Object
}

// Run collects. What it has deleted when an error comes stays deleted, and the next run
// goes on from there. Errors: ErrRunning; ErrUnsure and catalog.ErrFenced, after which
// nothing more was deleted.
func (c *Collector) Run(ctx context.Context, opts Options) (Report, error) {
	if !c.running.TryLock() {
		return Report{}, ErrRunning
	}
	defer c.running.Unlock()
	r := &run{
		Collector: c, limits: c.cfg.Limits, step: opts.Step, marks: newMarks(), size: map[chunk.Digest]int64{},
		firm: map[chunk.Digest]bool{}, loose: map[chunk.Digest]bool{},
		report: &Report{DryRun: opts.DryRun, Deleted: map[string]Amount{}, Problems: []string{}},
	}
	if r.step == nil {
		r.step = func(string) {}
	}
	if opts.Limits != nil {
		r.limits = *opts.Limits
	}
	r.limits = r.limits.withDefaults()
	err := r.run(ctx)
	if errors.Is(err, ErrUnsure) {
		// Another writer may have deleted what this one looked for.
		err = cmp.Or(c.cfg.Catalog.Confirm(ctx), err)
	}
	c.cfg.Metrics.ended(*r.report, err)
	if err != nil {
		return *r.report, fmt.Errorf("gc: %w", err)
	}
	c.cfg.Log.InfoContext(ctx, "gc ended", "dry_run", opts.DryRun, "images", r.report.Images, "deleted", r.report.Deleted, "problems", len(r.report.Problems))
	return *r.report, nil
}

func (r *run) run(ctx context.Context) error {
	if err := r.cfg.Catalog.Confirm(ctx); err != nil {
		return err
	}
	r.step("mark")
	if err := r.mark(ctx, r.marks); err != nil {
		return err
	}
	r.report.Images, r.report.Chunks = int64(len(r.marks.images)), int64(len(r.marks.chunks.digests))
	if err := r.survey(ctx); err != nil {
		return err
	}
	if r.report.DryRun {
		r.foresee()
		return r.collectPushed(ctx)
	}
	defer r.cfg.Gate.pardon()
	if err := r.condemn(ctx); err != nil {
		return err
	}
	sessions := r.cfg.Gate.current()
	if err := r.copy(ctx); err != nil {
		return err
	}
	if err := r.wait(ctx, sessions); err != nil {
		return err
	}
	if !r.cfg.noSecondMark {
		r.step("mark again")
		if err := r.mark(ctx, r.marks); err != nil {
			return err
		}
	}
	if err := r.markNew(ctx); err != nil {
		return err
	}
	// Before the images: one whose manifest stays is spared, or it would be forgotten when
	// its source lost its last name.
	if err := r.collectPushed(ctx); err != nil {
		return err
	}
	r.step("delete images")
	if err := r.deleteImages(ctx); err != nil {
		return err
	}
	if err := r.deleteObjects(ctx); err != nil {
		return err
	}
	r.step("delete packs")
	return r.deletePacks(ctx)
}

// wait waits for the conversions that may count on what is condemned.
func (r *run) wait(ctx context.Context, sessions []*Session) error {
	if r.cfg.noWait {
		return nil
	}
	r.step(fmt.Sprintf("wait for %d conversions", len(sessions)))
	late := fmt.Errorf("they still run after %s, so nothing is deleted: run gc again later", r.limits.Wait)
	ctx, cancel := context.WithTimeoutCause(ctx, r.limits.Wait, late)
	defer cancel()
	return r.cfg.Gate.wait(ctx, sessions)
}

func (r *run) problem(format string, args ...any) {
	if len(r.report.Problems) < maxProblems {
		r.report.Problems = append(r.report.Problems, fmt.Sprintf(format, args...))
	}
}

// maxProblems bounds what a report tells; check tells all.
const maxProblems = 100

func compareDigests(a, b chunk.Digest) int { return bytes.Compare(a[:], b[:]) }
