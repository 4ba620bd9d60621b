package gc

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	indexmem "quarry/chunkindex/mem"
	bucketmem "quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
)

var (
	simCount = flag.Int("sim.count", simDefault, "interleavings of the simulation")
	simTrace = flag.Bool("sim.trace", false, "print each step; with one interleaving")
	simSeed  = flag.Uint64("sim.seed", 1, "seed of the first interleaving")
)

// simulate runs one interleaving.
func simulate(seed uint64, tmp string, off func(*Config)) (events int, err error) {
	rng := rand.New(rand.NewPCG(seed, 0))
	w := &world{
		rng: rng, bucket: bucketmem.New(), back: make(chan *actor), now: time.Unix(1_800_000_000, 0),
		leases: map[*actor]Lease{}, jobs: map[*actor]chunk.Digest{}, acked: map[string]uint64{}, tmp: tmp,
		trace: func(string, ...any) {},
	}
	if *simTrace {
		w.trace = func(format string, args ...any) { fmt.Printf(format+"\n", args...) }
	}
	if rng.IntN(3) == 0 {
		w.faults = 0.02
	}
	w.cfg.Limits = Limits{Ratio: []float64{0.5, 0.9, 0.01}[rng.IntN(3)], Wait: time.Hour}
	if rng.IntN(4) == 0 {
		w.cfg.Limits.Retain = 2 * time.Hour
	}
	if rng.IntN(3) == 0 {
		w.cfg.Limits.Grace = time.Minute
	}
	if off != nil {
		off(&w.cfg)
	}
	defer func() {
		if p := recover(); p != nil {
			panic(fmt.Sprintf("seed %d: %v", seed, p))
		}
	}()
	ctx := context.Background()
	if w.judge, err = catalog.Open(ctx, catalog.Config{Journal: w.bucket}); err != nil {
		return 0, err
	}
	p, err := w.boot(indexmem.New())
	if err != nil {
		return 0, err
	}
	w.people(p)
	for n := 0; w.err == nil; n++ {
		w.befall()
		if !w.step() {
			break
		}
		if n%32 == 0 || n > 20_000 {
			w.note(w.verify(ctx))
		}
		if n > 20_000 {
			w.note(errors.New("it does not come to an end"))
		}
	}
	for _, p := range w.procs {
		p.stalled = 0
		w.crash(p)
	}
	w.note(w.verify(ctx))
	w.note(w.quiet(ctx))
	return w.events, w.err
}

func (w *world) note(err error) {
	if w.err == nil {
		w.err = err
	}
}

// people starts the actors of a process.
func (w *world) people(p *proc) {
	tag := func() string { return string(rune('a' + w.rng.IntN(3))) }
	for range 2 {
		w.start(p, "convert", func(ctx context.Context, a *actor) {
			for range 2 {
				im, tag := w.rng.IntN(len(simImages)), tag()
				switch w.rng.IntN(4) { // what was acknowledged is in w
				case 0:
					_ = p.job(ctx, a, im, tag)
				case 1:
					_ = p.job(ctx, a, im, "")
				default:
					_ = p.convert(ctx, im, tag)
				}
			}
		})
	}
	w.start(p, "mount", func(ctx context.Context, a *actor) {
		for range 2 {
			w.note(p.mount(ctx, a, tag()))
			_ = a.yield(false)
		}
	})
	w.start(p, "delete", func(ctx context.Context, a *actor) {
		for range 4 {
			_ = a.yield(false)
			switch w.rng.IntN(6) {
			case 0:
				_ = p.pin(ctx, w.rng.IntN(len(simImages)))
			case 1:
				_ = p.catalog.Unpin(ctx, simSource(w.rng.IntN(len(simImages))))
			default:
				_ = p.catalog.DeleteName(ctx, "r", tag())
			}
		}
	})
	w.start(p, "gc", func(ctx context.Context, a *actor) {
		for range 3 {
			_, err := p.gc.Run(ctx, Options{DryRun: w.rng.IntN(8) == 0})
			if errors.Is(err, ErrUnsure) {
				w.note(err)
			}
			_ = a.yield(false)
		}
	})
}

// befall does now and then what happens to processes and clocks.
func (w *world) befall() {
	w.since += time.Duration(w.rng.IntN(2000)) * time.Millisecond
	if w.rng.IntN(100) > 0 || len(w.procs) > 3 {
		return
	}
	last := w.procs[len(w.procs)-1]
	switch w.rng.IntN(4) {
	case 0: // killed, and started again on the same folder
		index := last.index
		w.crash(last)
		w.again(index)
	case 1: // stopped, and another takes over; it goes on later and does not know
		last.stalled = w.rng.IntN(300)
		w.trace("process %d is stopped", last.n)
		w.again(indexmem.New())
	case 2: // stopped, with the machine's clock
		last.stalled = w.rng.IntN(20)
		w.since += 6 * time.Hour
		w.now = w.now.Add(6 * time.Hour)
	default:
		w.now = w.now.Add(time.Duration(w.rng.IntN(25)-12) * time.Hour / 2)
	}
}

func (w *world) again(index *indexmem.Index) {
	p, err := w.boot(index)
	if err != nil {
		w.note(fmt.Errorf("start again: %w", err))
		return
	}
	w.people(p)
}

// quiet checks that, when all is at rest, a collection keeps what has a root and, when
// nothing has, leaves nothing.
func (w *world) quiet(ctx context.Context) error {
	w.faults, w.cfg.Limits = 0, Limits{}
	p, err := w.boot(indexmem.New())
	if err != nil {
		return err
	}
	if _, err := p.gc.Run(ctx, Options{}); err != nil {
		return err
	}
	if err := w.verify(ctx); err != nil {
		return fmt.Errorf("after a collection at rest: %w", err)
	}
	for _, n := range p.catalog.Names() {
		if err := p.catalog.DeleteName(ctx, n.Repo, n.Tag); err != nil {
			return err
		}
	}
	for _, source := range p.catalog.Pins() {
		if err := p.catalog.Unpin(ctx, source); err != nil {
			return err
		}
	}
	if _, err := p.gc.Run(ctx, Options{}); err != nil {
		return err
	}
	for o, err := range w.bucket.List(ctx, "") {
		if err != nil {
			return err
		}
		if !strings.HasPrefix(o.Key, "log/") {
			return fmt.Errorf("garbage stays: %s", o.Key)
		}
	}
	return nil
}

// search simulates count seeds and returns the first that fails.
func search(t *testing.T, first uint64, count int, off func(*Config)) (seed uint64, events int64, failure error) {
	t.Helper()
	tmp := tempDir(t)
	var next, total atomic.Int64
	var bad atomic.Pointer[error]
	var badSeed atomic.Uint64
	var g errgroup.Group
	for range runtime.GOMAXPROCS(0) {
		g.Go(func() error {
			for bad.Load() == nil {
				i := next.Add(1) - 1
				if i >= int64(count) {
					return nil
				}
				n, err := simulate(first+uint64(i), tmp, off)
				total.Add(int64(n))
				if err != nil && bad.CompareAndSwap(nil, &err) {
					badSeed.Store(first + uint64(i))
				}
			}
			return nil
		})
	}
	_ = g.Wait() // its functions return nil
	if err := bad.Load(); err != nil {
		return badSeed.Load(), total.Load(), *err
	}
	return 0, total.Load(), nil
}

// tempDir is a folder in memory where there is one: each pack is a file for a moment.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "quarry-sim-*")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestSimulation(t *testing.T) {
	seed, events, err := search(t, *simSeed, *simCount, nil)
	if err != nil {
		t.Fatalf("seed %d: %v\nagain: go test ./store/gc -run 'TestSimulation$' -sim.seed=%d -sim.count=1", seed, err, seed)
	}
	t.Logf("%d interleavings from seed %d, %d steps", *simCount, *simSeed, events)
}

// The simulation is worth something when it finds what a protection is there for.
func TestSimulationFindsAMissingProtection(t *testing.T) {
	for name, off := range map[string]func(*Config){
		"second mark":                   func(c *Config) { c.noSecondMark = true },
		"wait for those who were there": func(c *Config) { c.noWait = true },
	} {
		t.Run(name, func(t *testing.T) {
			seed, _, err := search(t, *simSeed, simDefault, off)
			if err == nil {
				t.Fatalf("without it %d interleavings keep every promise", simDefault)
			}
			t.Logf("seed %d: %v", seed, err)
		})
	}
}
