// Package jobs is the persistent queue of conversions: what a push has stored and
// is still to become an image. A record of each job lies in the bucket, so that
// neither a crash nor the loss of a data folder loses one; progress is in memory
// alone.
package jobs

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/store/bucket"
	"quarry/store/chunk"
)

const (
	// DefaultMaxActive bounds the jobs that are queued or running: 10 000 records
	// take some 10 MiB of memory.
	DefaultMaxActive = 10000
	// DefaultKeep is how many ended jobs are kept, and DefaultKeepFor how long.
	DefaultKeep    = 1000
	DefaultKeepFor = 30 * 24 * time.Hour
	// maxWatchers bounds who listens to jobs at once.
	maxWatchers = 256
	// maxInterrupted is how often a job may be running when the program ends
	// before it counts as the one that ends it.
	maxInterrupted = 5
	// loadReads is how many records are read at once when a queue is opened.
	loadReads = 16
	// saveTime bounds the writing of a record when nobody waits for it any more.
	saveTime = 10 * time.Second
)

var (
	// ErrFull says that the queue has as many jobs as it may.
	ErrFull = errors.New("the queue of conversions is full")
	// ErrUnknown says that there is no such job, or no more.
	ErrUnknown = errors.New("job not found")
	// ErrWatchers says that as many listen to jobs as may.
	ErrWatchers = errors.New("too many listen to jobs")
)

// Config says what a Queue does and how much of it.
type Config struct {
	Bucket bucket.Bucket
	// Convert does a job. It may be done anew after any error, and after a crash.
	Convert func(ctx context.Context, r Record, progress func(Progress)) (Result, error)
	// Confirm fails when another writer owns the bucket by now: its records are not to be
	// deleted. Nil: there is none.
	Confirm func(context.Context) error
	// Final returns why another attempt cannot end better, or nil when it may.
	Final func(error) *Reason

	Workers   int           // conversions at once; 0 = 1
	MaxActive int           // jobs queued or running; 0 = DefaultMaxActive
	Keep      int           // ended jobs that are kept; 0 = DefaultKeep
	KeepFor   time.Duration // how long; 0 = DefaultKeepFor
	Backoff   time.Duration // before the second attempt, doubling up to a hundredfold, with jitter; 0 = 2 s
	Now       func() time.Time
	Log       *slog.Logger // nil = discard
	Metrics   *Metrics     // nil: not counted
}

// Progress is one step of a conversion.
type Progress struct {
	Step  string // constant, such as "layer"
	Item  string // what it works on
	Done  int64  // units of Total
	Total int64  // 0 when not known
	Unit  string // "bytes" or what is counted
}

// Status is a job as it is now.
type Status struct {
	Record
	Progress *Progress // of what is running
	RetryAt  time.Time // not before, of what is queued; zero: as soon as it is its turn
}

// job is a Record in the queue.
type job struct {
	id string

	// mu of the queue guards these.
	rec      Record
	progress *Progress
	told     time.Time // when watchers were told of progress
	retryAt  time.Time
	fails    int // attempts in a row that may end better
	rev      uint64
	waits    map[string]bool // repositories in whose line it stands

	writing sync.Mutex // held while the record is written or deleted
	saved   uint64     // the rev that is durable; writing guards it
}

// Queue is the queue of one store. Safe for concurrent use. Only one process may
// have that of a bucket open: the one that writes to it.
type Queue struct {
	cfg Config

	mu       sync.Mutex // guards the rest
	jobs     map[string]*job
	lines    lines
	active   int // queued or running
	running  int
	wake     chan struct{} // closed and replaced when there may be something to do
	watchers map[*Watch]struct{}
}

// Open loads the records of a bucket. What was queued or running is queued again.
func Open(ctx context.Context, cfg Config) (*Queue, error) {
	cfg.Workers, cfg.MaxActive = cmp.Or(cfg.Workers, 1), cmp.Or(cfg.MaxActive, DefaultMaxActive)
	cfg.Keep, cfg.KeepFor = cmp.Or(cfg.Keep, DefaultKeep), cmp.Or(cfg.KeepFor, DefaultKeepFor)
	cfg.Backoff = cmp.Or(cfg.Backoff, 2*time.Second)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.Metrics = cmp.Or(cfg.Metrics, NewMetrics())
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	q := &Queue{cfg: cfg, jobs: map[string]*job{}, wake: make(chan struct{}), watchers: map[*Watch]struct{}{}}
	recs, err := load(ctx, cfg.Bucket, cfg.Log)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(recs, func(a, b Record) int { return a.Created.Compare(b.Created) })
	for _, r := range recs {
		q.restore(ctx, r)
	}
	q.figures()
	q.trim(ctx)
	return q, nil
}

// load reads all records. One that is none is logged and left for quarry check;
// the next push of its source writes it anew.
func load(ctx context.Context, b bucket.Bucket, log *slog.Logger) ([]Record, error) {
	var keys []string
	for o, err := range b.List(ctx, Prefix) {
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", Prefix, err)
		}
		keys = append(keys, o.Key)
	}
	recs := make([]*Record, len(keys))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(loadReads)
	for i, key := range keys {
		g.Go(func() error {
			r, err := read(gctx, b, key)
			switch {
			case err == nil:
				recs[i] = &r
			case bucket.IsDamage(err), errors.Is(err, ErrMalformed), errors.Is(err, ErrVersion):
				log.WarnContext(ctx, "job record is of no use", "key", key, "error", err)
			default:
				return err
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, fmt.Errorf("load the queue of conversions: %w", err)
	}
	var out []Record
	for _, r := range recs {
		if r != nil {
			out = append(out, *r)
		}
	}
	return out, nil
}

func read(ctx context.Context, b bucket.Bucket, key string) (Record, error) {
	raw, err := bucket.ReadReplaced(ctx, b, key, MaxRecord)
	if err != nil {
		return Record{}, err
	}
	r, err := Decode(raw)
	if err == nil && Key(r.ID()) != key {
		err = fmt.Errorf("%w: it is the record of job %s", ErrMalformed, r.ID())
	}
	return r, err
}

// restore takes a record up again.
func (q *Queue) restore(ctx context.Context, r Record) {
	j := &job{id: r.ID(), rec: r, waits: map[string]bool{}}
	q.jobs[j.id] = j
	if r.State == Running {
		j.rec.State, j.rec.Doubted = Queued, true
		j.rec.Interrupted++
		j.rev++
		if j.rec.Interrupted >= maxInterrupted {
			q.end(j, Failed, nil, &Reason{
				Message: fmt.Sprintf("quarry ended %d times while it converted this: its log or the system's says why; push it again to try again", j.rec.Interrupted),
				Blame:   BlameStore,
			})
			q.logSaved(ctx, j)
			return
		}
	}
	if j.rec.State.Active() {
		q.active++
		q.line(j)
	}
}

// end notes the end of a job. mu is held, or nobody else has the queue yet.
func (q *Queue) end(j *job, s State, res *Result, why *Reason) {
	now := q.cfg.Now().UTC()
	j.rec.State, j.rec.Ended, j.rec.Result, j.rec.Reason = s, &now, res, why
	j.rec.Doubted = s == Failed
	j.progress, j.retryAt = nil, time.Time{}
	j.rev++
}

// Push queues the conversion of a source for a platform, "" for the one it is for,
// and returns when that is durable. A job that is queued or running already is the
// same job; one that has ended is done again. Errors: ErrFull, the bucket's.
func (q *Queue) Push(ctx context.Context, source chunk.Digest, platform string, name Name) (Status, error) {
	if err := validName(name); err != nil {
		return Status{}, err
	}
	id := ID(source, platform)
	q.mu.Lock()
	j := q.jobs[id]
	if (j == nil || !j.rec.State.Active()) && q.active >= q.cfg.MaxActive {
		q.mu.Unlock()
		return Status{}, fmt.Errorf("%w: %d jobs are queued or running", ErrFull, q.cfg.MaxActive)
	}
	if j == nil {
		j = &job{id: id, rec: Record{Source: source, Platform: platform, State: Done}, waits: map[string]bool{}}
		q.jobs[id] = j
	}
	if !j.rec.State.Active() {
		j.rec = Record{
			Source: source, Platform: platform, Names: j.rec.Names, State: Queued,
			Created: q.cfg.Now().UTC(), Doubted: j.rec.Doubted,
		}
		j.fails = 0
		j.rev++
		q.active++
	}
	if n := len(j.rec.Names); n == 0 || j.rec.Names[n-1] != name {
		j.rec.addName(name)
		j.rev++
	}
	if j.rec.State == Queued {
		q.line(j)
	}
	q.changed(j)
	st := j.status()
	q.mu.Unlock()
	return st, q.save(ctx, j)
}

// save makes the record durable as it is now, unless it is already.
func (q *Queue) save(ctx context.Context, j *job) error {
	j.writing.Lock()
	defer j.writing.Unlock()
	q.mu.Lock()
	rec, rev := j.rec, j.rev
	q.mu.Unlock()
	if j.saved >= rev {
		return nil
	}
	b, err := Encode(rec)
	if err != nil {
		return err
	}
	if err := q.cfg.Bucket.Put(ctx, Key(j.id), bytes.NewReader(b), int64(len(b))); err != nil {
		return fmt.Errorf("write job record %s: %w", Key(j.id), err)
	}
	j.saved = rev
	return nil
}

// logSaved is save where nobody waits for it: what is not written is done again
// after a restart.
func (q *Queue) logSaved(ctx context.Context, j *job) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTime)
	defer cancel()
	if err := q.save(ctx, j); err != nil {
		q.cfg.Log.WarnContext(ctx, "job record not written", "job", j.id, "error", err)
	}
}

// trim deletes the records of ended jobs that are too many or too old.
func (q *Queue) trim(ctx context.Context) {
	q.mu.Lock()
	var ended []*job
	for _, j := range q.jobs {
		if j.rec.Ended != nil {
			ended = append(ended, j)
		}
	}
	slices.SortFunc(ended, func(a, b *job) int { return b.rec.Ended.Compare(*a.rec.Ended) })
	var old []*job
	for i, j := range ended {
		if i >= q.cfg.Keep || q.cfg.Now().Sub(*j.rec.Ended) > q.cfg.KeepFor {
			old = append(old, j)
		}
	}
	q.mu.Unlock()
	for _, j := range old {
		if err := q.forget(ctx, j); err != nil {
			q.cfg.Log.WarnContext(ctx, "old job record not deleted", "job", j.id, "error", err)
			return // the next trim comes to it
		}
	}
}

// forget deletes an ended job, unless it is queued again by now: its new record is
// written after the old one is gone, because writing is held.
func (q *Queue) forget(ctx context.Context, j *job) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTime)
	defer cancel()
	j.writing.Lock()
	defer j.writing.Unlock()
	ended := func() bool { return q.jobs[j.id] == j && !j.rec.State.Active() }
	q.mu.Lock()
	ok := ended()
	q.mu.Unlock()
	if !ok {
		return nil
	}
	// A writer that took over may have queued it again.
	if q.cfg.Confirm != nil {
		if err := q.cfg.Confirm(ctx); err != nil {
			return err
		}
	}
	if err := q.cfg.Bucket.Delete(ctx, Key(j.id)); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if ended() {
		delete(q.jobs, j.id)
	} else {
		j.saved = 0 // what a push has written meanwhile is gone too
	}
	return nil
}

func (j *job) status() Status {
	st := Status{Record: j.rec, RetryAt: j.retryAt}
	if j.progress != nil {
		p := *j.progress
		st.Progress = &p
	}
	return st
}

// Job returns the job of that id. Errors: ErrUnknown.
func (q *Queue) Job(id string) (Status, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if j := q.jobs[id]; j != nil {
		return j.status(), nil
	}
	return Status{}, fmt.Errorf("%w: %s", ErrUnknown, id)
}

// Of returns the jobs of a source, of all platforms.
func (q *Queue) Of(source chunk.Digest) []Status {
	if source.IsZero() { // would be a filter that takes all
		return nil
	}
	l, _ := q.List(Filter{Source: source, Limit: q.cfg.MaxActive + q.cfg.Keep})
	return l
}

// Active returns how many jobs are queued, and how many running.
func (q *Queue) Active() (queued, running int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.active - q.running, q.running
}

// Sources returns the sources of all jobs that are queued or running: what they
// need must stay.
func (q *Queue) Sources() []chunk.Digest {
	q.mu.Lock()
	defer q.mu.Unlock()
	var all []chunk.Digest
	for _, j := range q.jobs {
		if j.rec.State.Active() {
			all = append(all, j.rec.Source)
		}
	}
	slices.SortFunc(all, func(a, b chunk.Digest) int { return strings.Compare(a.Hex(), b.Hex()) })
	return slices.Compact(all)
}
