// Package follow keeps a node that only reads in step with the writer of its store:
// it asks the journal again and again, and knows how far behind the node is.
package follow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/store/catalog"
)

const (
	// Every is how often the journal is asked, a quarter of it more or less, so that
	// many nodes do not ask at once.
	Every = 2 * time.Second
	// MaxLag is how long the journal may have been out of reach before the node calls
	// itself not ready.
	MaxLag = 30 * time.Second
	// pollTime bounds one part of a catch-up: 4096 entries and the footers of as many packs.
	pollTime = 5 * time.Minute
)

// Store is what follows: *packed.Store.
type Store interface {
	Follow(ctx context.Context, left func(int)) (whole bool, err error)
}

// Config is what a Follower needs.
type Config struct {
	Store  Store
	Every  time.Duration // 0 = Every
	MaxLag time.Duration // 0 = MaxLag
	Log    *slog.Logger  // nil = discard
	// Applied returns the number of the last entry that was applied, for Lag.
	Applied func() uint64
}

// Lag is how far behind a node is.
type Lag struct {
	Applied uint64  // the last journal entry that is in use here
	Entries int     // read and still to be applied; there may be more
	Seconds float64 // since the node last had all that the journal has
	Error   string  // of the last poll
}

// Follower follows one journal. Safe for concurrent use.
type Follower struct {
	cfg     Config
	polls   *prometheus.CounterVec
	gauges  []prometheus.Collector
	mu      sync.Mutex // guards the rest
	whole   time.Time  // when the last poll began that reached the journal's end
	entries int
	err     error // of the last poll
}

// New returns a follower of a store that has just been opened, and so has all that
// the journal had.
func New(cfg Config) *Follower {
	if cfg.Every == 0 {
		cfg.Every = Every
	}
	if cfg.MaxLag == 0 {
		cfg.MaxLag = MaxLag
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	f := &Follower{cfg: cfg, whole: time.Now()}
	f.polls = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "quarry_follow_polls_total", Help: "Questions to the journal, by result: ok, error.",
	}, []string{"result"})
	f.gauges = []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "quarry_follow_lag_seconds", Help: "Since this node last had all that the journal has.",
		}, func() float64 { return f.Lag().Seconds }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "quarry_follow_lag_entries", Help: "Journal entries that were read and are still to be applied.",
		}, func() float64 { return float64(f.Lag().Entries) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "quarry_follow_applied_entry", Help: "The last journal entry that this node has applied.",
		}, func() float64 { return float64(f.Lag().Applied) }),
	}
	return f
}

// Collectors returns what to register.
func (f *Follower) Collectors() []prometheus.Collector { return append(f.gauges, f.polls) }

// Run follows until ctx ends. No error ends it: the node serves what it knows, and an
// entry that it cannot read is never passed over, but asked for again, as somebody may
// put the right one back.
func (f *Follower) Run(ctx context.Context) {
	said := ""
	for ctx.Err() == nil {
		whole, err := f.poll(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && err.Error() != said:
			said = err.Error()
			level, message := slog.LevelWarn, "the journal cannot be read, serving what is known"
			if Stuck(err) {
				level, message = slog.LevelError, "the journal cannot be followed any further, serving what is known"
			}
			f.cfg.Log.Log(ctx, level, message, "error", err)
		case err == nil && said != "":
			said = ""
			f.cfg.Log.InfoContext(ctx, "the journal is followed again")
		}
		if err == nil && !whole {
			continue
		}
		pause := f.cfg.Every*3/4 + rand.N(f.cfg.Every/2+1)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// Stuck says of an error that asking again does not help by itself.
func Stuck(err error) bool {
	return errors.Is(err, catalog.ErrDamaged) || errors.Is(err, catalog.ErrNewer) || errors.Is(err, catalog.ErrDiverged)
}

func (f *Follower) poll(ctx context.Context) (whole bool, err error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, pollTime)
	defer cancel()
	whole, err = f.cfg.Store.Follow(ctx, f.left)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
	result := "error"
	if err == nil {
		result, f.entries = "ok", 0
		if whole {
			f.whole = begin
		}
	}
	f.polls.WithLabelValues(result).Inc()
	return whole, err
}

func (f *Follower) left(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.entries = n + 1
}

// Lag returns how far behind the node is now.
func (f *Follower) Lag() Lag {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := Lag{Entries: f.entries, Seconds: time.Since(f.whole).Seconds()}
	if f.cfg.Applied != nil {
		l.Applied = f.cfg.Applied()
	}
	if f.err != nil {
		l.Error = f.err.Error()
	}
	return l
}

// Ready returns why what the node serves may be too old: the journal cannot be
// followed any further, or could not for MaxLag.
func (f *Follower) Ready() error {
	l := f.Lag()
	f.mu.Lock()
	defer f.mu.Unlock()
	if Stuck(f.err) || l.Seconds > f.cfg.MaxLag.Seconds() {
		return fmt.Errorf("%d entries and %.0f s behind the journal: %w", l.Entries, l.Seconds, orLate(f.err))
	}
	return nil
}

var errLate = errors.New("it is being caught up with")

func orLate(err error) error {
	if err == nil {
		return errLate
	}
	return err
}
