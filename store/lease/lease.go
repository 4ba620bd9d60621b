// Package lease keeps which images are mounted, by workers anywhere: gc deletes nothing
// that a mount may still read. Each node keeps what it was told in one object of the
// bucket, so that leases outlive its restart and every node, read-only ones too, can take
// them.
package lease

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"quarry/internal/strictjson"
	"quarry/store/bucket"
	"quarry/store/chunk"
)

const (
	// Prefix starts the keys of the objects, one a node.
	Prefix = "leases/"
	// MaxLeases bounds the leases of one node, and MaxID the id of one in bytes.
	MaxLeases = 4096
	MaxID     = 64
	// MaxTTL is the longest that a lease lasts without being renewed.
	MaxTTL = time.Hour
	// Slack is how much longer than they last leases count: a network may be away for
	// some minutes while sandboxes run on.
	Slack = 15 * time.Minute
	// Quiet is how long the object of another node may stay as it is until it is taken
	// for one of a node that is gone: it changes at every beat as long as it has leases.
	Quiet = MaxTTL + Slack

	beat      = 20 * time.Second
	tick      = time.Second
	maxStep   = 2 * time.Second // of the time in which leases run out, per tick
	version   = 1
	maxObject = 2 << 20 // 4096 leases of some 300 bytes
	maxNodes  = 1024
)

// ErrFull says that a node has MaxLeases leases.
var ErrFull = errors.New("too many leases")

// Lease says that something reads an image.
type Lease struct {
	ID         string       `json:"id"`
	Image      chunk.Digest `json:"image"`     // image id; zero when it is not known
	Bootstrap  chunk.Digest `json:"bootstrap"` // zero when it is not known
	TTLSeconds int64        `json:"ttl_seconds"`
}

func (l Lease) ttl() time.Duration { return time.Duration(l.TTLSeconds) * time.Second }

func (l Lease) validate() error {
	if l.ID == "" || len(l.ID) > MaxID {
		return fmt.Errorf("lease id of %d bytes, want 1 to %d", len(l.ID), MaxID)
	}
	if l.TTLSeconds < 1 || l.TTLSeconds > int64(MaxTTL/time.Second) {
		return fmt.Errorf("lease %s lasts %d s, want 1 to %d", l.ID, l.TTLSeconds, int64(MaxTTL/time.Second))
	}
	return nil
}

// object is what a node keeps.
type object struct {
	Version int     `json:"version"`
	Node    string  `json:"node"`
	Beat    uint64  `json:"beat"` // differs from the one before
	Leases  []Lease `json:"leases"`
}

// Config says whose leases a Table keeps.
type Config struct {
	Bucket bucket.Bucket
	Node   string       // id of the node, the last part of the key; the same after a restart
	Log    *slog.Logger // nil = discard
	Now    func() time.Time
}

// Table is the leases of one node, and its view of those of others. Safe for concurrent
// use. Its time goes on while Run runs, and then no faster than that: a process that was
// stopped for hours finds its leases as it left them, because nobody could renew them.
type Table struct {
	cfg Config
	key string

	mu     sync.Mutex // guards what follows
	now    time.Duration
	last   time.Time
	leases map[string]entry
	beat   uint64
	dirty  bool   // the object lacks a change that nobody is writing
	stored uint64 // beat that the object has

	writing sync.Mutex // held while the object is written

	looking sync.Mutex // guards others, and is held while they are listed
	others  map[string]seen
}

type entry struct {
	Lease
	until time.Duration // in the table's time
	since uint64        // beat at which it became what it is
}

// seen is when the object of another node was found changed.
type seen struct {
	sum chunk.Digest
	at  time.Duration
}

// Open returns the leases of a node, all of them as if they had just been renewed.
func Open(ctx context.Context, cfg Config) (*Table, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	t := &Table{cfg: cfg, key: Prefix + cfg.Node, last: cfg.Now(), leases: map[string]entry{}, others: map[string]seen{}}
	o, _, err := t.read(ctx, t.key)
	if err != nil && !errors.Is(err, bucket.ErrNotFound) {
		return nil, fmt.Errorf("open leases: %w", err)
	}
	t.beat, t.stored = o.Beat, o.Beat
	for _, l := range o.Leases {
		t.leases[l.ID] = entry{l, l.ttl(), o.Beat}
	}
	return t, nil
}

// read returns a node's object. What is damaged is an error with what to do.
func (t *Table) read(ctx context.Context, key string) (object, chunk.Digest, error) {
	raw, err := bucket.ReadReplaced(ctx, t.cfg.Bucket, key, maxObject)
	if err != nil {
		return object{}, chunk.Digest{}, err
	}
	o, err := strictjson.Decode[object](raw, maxObject)
	if err == nil && (o.Version != version || Prefix+o.Node != key || len(o.Leases) > MaxLeases) {
		err = fmt.Errorf("version %d of node %q with %d leases", o.Version, o.Node, len(o.Leases))
	}
	for _, l := range o.Leases {
		err = cmp.Or(err, l.validate())
	}
	if err != nil {
		return object{}, chunk.Digest{}, fmt.Errorf("%s is no table of leases: %w; when no sandbox of that node runs any more, delete the object", key, err)
	}
	return o, chunk.Sum(raw), nil
}

// Renew begins a lease, or extends it. When it has returned nil, it outlives this process,
// also when another call, which is not done yet, began it.
func (t *Table) Renew(ctx context.Context, l Lease) error {
	if err := l.validate(); err != nil {
		return err
	}
	t.mu.Lock()
	before, known := t.leases[l.ID]
	if !known && len(t.leases) >= MaxLeases {
		t.mu.Unlock()
		return fmt.Errorf("%w: this node has %d", ErrFull, MaxLeases)
	}
	if before.Lease != l {
		t.beat++
		t.dirty = true
		before.since = t.beat
	}
	t.leases[l.ID] = entry{l, t.now + l.ttl(), before.since}
	done := t.stored >= before.since
	t.mu.Unlock()
	if done {
		return nil
	}
	return t.write(ctx, before.since)
}

// End ends a lease; one that is not there has ended already.
func (t *Table) End(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.leases[id]; ok {
		delete(t.leases, id)
		t.beat++
		t.dirty = true // written at the next beat: a lease too many harms nobody
	}
}

// write makes the object as new as beat want, 0 for the newest. Of many that wait, one
// writes for all.
func (t *Table) write(ctx context.Context, want uint64) error {
	t.writing.Lock()
	defer t.writing.Unlock()
	t.mu.Lock()
	if t.stored >= want && want > 0 {
		t.mu.Unlock()
		return nil
	}
	o := object{Version: version, Node: t.cfg.Node, Beat: t.beat, Leases: []Lease{}}
	for _, e := range t.leases {
		o.Leases = append(o.Leases, e.Lease)
	}
	t.dirty = false
	t.mu.Unlock()
	slices.SortFunc(o.Leases, func(a, b Lease) int { return strings.Compare(a.ID, b.ID) })
	raw, err := json.Marshal(o)
	if err == nil {
		err = t.cfg.Bucket.Put(ctx, t.key, bytes.NewReader(raw), int64(len(raw)))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		t.dirty = true
		return fmt.Errorf("store leases: %w", err)
	}
	t.stored = o.Beat
	return nil
}

// Run lets leases run out and tells the bucket that they have not, until ctx ends.
func (t *Table) Run(ctx context.Context) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	var beaten time.Duration
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now, due := t.Tick()
		if due = due || now-beaten >= beat && t.begin(); !due {
			continue
		}
		beaten = now
		if err := t.write(ctx, 0); err != nil && ctx.Err() == nil {
			t.cfg.Log.WarnContext(ctx, "leases not stored", "error", err)
		}
	}
}

// begin counts a beat when there are leases, which is what others see of this node.
func (t *Table) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.leases) > 0 {
		t.beat++
	}
	return len(t.leases) > 0
}

// Tick lets the table's time go on and forgets what has run out for long. It reports
// whether the object lacks a change.
func (t *Table) Tick() (now time.Duration, due bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clock := t.cfg.Now()
	t.now += min(max(0, clock.Sub(t.last)), maxStep)
	t.last = clock
	for id, e := range t.leases {
		if t.now >= e.until+Slack {
			delete(t.leases, id)
			t.beat++
			t.dirty = true
		}
	}
	return t.now, t.dirty
}

// Live returns the leases of this node that gc must count, sorted by id.
func (t *Table) Live() []Lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Lease, 0, len(t.leases))
	for _, e := range t.leases {
		out = append(out, e.Lease)
	}
	slices.SortFunc(out, func(a, b Lease) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// All returns the leases of all nodes that gc must count. The object of a node that has
// given no sign for Quiet, as far as this process has seen, is deleted with forget.
func (t *Table) All(ctx context.Context, forget bool) ([]Lease, error) {
	t.looking.Lock()
	defer t.looking.Unlock()
	all := t.Live()
	nodes := 0
	for o, err := range t.cfg.Bucket.List(ctx, Prefix) {
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", Prefix, err)
		}
		if o.Key == t.key {
			continue
		}
		if nodes++; nodes > maxNodes {
			return nil, fmt.Errorf("more than %d nodes have leases", maxNodes)
		}
		leases, err := t.other(ctx, o.Key, forget)
		if err != nil {
			return nil, err
		}
		all = append(all, leases...)
	}
	return all, nil
}

func (t *Table) other(ctx context.Context, key string, forget bool) ([]Lease, error) {
	o, sum, err := t.read(ctx, key)
	if errors.Is(err, bucket.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	now := t.now
	t.mu.Unlock()
	s, ok := t.others[key]
	if !ok || s.sum != sum {
		t.others[key] = seen{sum, now}
		return o.Leases, nil
	}
	if now-s.at < Quiet {
		return o.Leases, nil
	}
	if !forget {
		return nil, nil
	}
	delete(t.others, key)
	t.cfg.Log.InfoContext(ctx, "leases of a node that is gone deleted", "node", o.Node, "leases", len(o.Leases))
	return nil, t.cfg.Bucket.Delete(ctx, key)
}
