package api

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/trace"
)

const (
	// maxTraced bounds the images whose records are kept, those that ran last: with
	// trace.MaxRuns of 2 KiB each, as the start of pip makes them, they are 32 MiB
	// in the bucket, and 540 MiB when all are as long as they may be.
	maxTraced = 2048
	// maxTraceKeys bounds the listing of records at the first use: twice what is
	// kept.
	maxTraceKeys = 2 * maxTraced * trace.MaxRuns
	// traceListTime bounds that listing: S3 gives 1000 keys a request, so there are 33
	// requests at most, and each may take a second.
	traceListTime = 30 * time.Second
	// traceEvery is how often an image that has all its records gets a newer one:
	// hundreds of runs that start in one second know the same.
	traceEvery = time.Minute
	// traceRate is how many records a second are looked at, traceBurst how many at
	// once. Each may cost the decoding of a bootstrap, and 2 of those run at once.
	traceRate  = 16
	traceBurst = 64
	// recordedOf is of how many starts one is to be recorded when an image has a list. A
	// run that is recorded must ask for each page itself, which makes it slower.
	recordedOf = 8
	// maxAided bounds the images without a list whose starts are counted, at some 3 MB.
	maxAided = 1 << 16
)

// traces keeps the records of runs in the bucket, and knows from their keys alone
// which images have some. One process writes them, the owner of the data folder.
type traces struct {
	bucket bucket.Bucket
	log    *slog.Logger
	now    func() time.Time

	loading singleflight.Group
	adding  sync.Mutex // held while a record is written and old ones are deleted

	mu     sync.Mutex // guards the rest
	loaded bool
	images map[chunk.Digest]*traced // by image id
	aided  map[chunk.Digest]bool    // images without a list whose last start was not to be recorded
	count  uint64                   // of records added since the start
	tokens float64                  // of traceRate
	filled time.Time
}

// traced is one image with records.
type traced struct {
	keys    []trace.Key // oldest first
	version uint64      // another one when the records are other ones
	list    []uint32    // that they agree on, when merged
	merged  bool
	starts  uint64 // since there are records enough for a list
}

// listed reports whether there are records enough for a list.
func (t *traced) listed() bool { return t != nil && len(t.keys) >= trace.MinRuns }

func (t *traced) last() time.Time { return t.keys[len(t.keys)-1].Time }

func newTraces(b bucket.Bucket, log *slog.Logger, now func() time.Time) *traces {
	return &traces{bucket: b, log: log, now: now, images: map[chunk.Digest]*traced{}, aided: map[chunk.Digest]bool{}, tokens: traceBurst, filled: now()}
}

// admit takes one of the records that may come now, or fails with ErrBusy.
func (t *traces) admit() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	t.tokens = min(traceBurst, t.tokens+now.Sub(t.filled).Seconds()*traceRate)
	t.filled = now
	if t.tokens < 1 {
		return fmt.Errorf("%w: more than %d trace records a second", ErrBusy, traceRate)
	}
	t.tokens--
	return nil
}

// load learns from the bucket which records there are, once for all who need it. A
// bucket that hangs holds up nobody longer than their ctx.
func (t *traces) load(ctx context.Context) error {
	if t.isLoaded() {
		return nil
	}
	done := t.loading.DoChan("", func() (any, error) { // ends with traceListTime
		if t.isLoaded() {
			return nil, nil
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), traceListTime)
		defer cancel()
		found, err := t.find(ctx)
		if err != nil {
			return nil, err
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		t.images, t.loaded = found, true
		return nil, nil
	})
	select {
	case r := <-done:
		return r.Err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *traces) isLoaded() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.loaded
}

// find lists the records in the bucket.
func (t *traces) find(ctx context.Context) (map[chunk.Digest]*traced, error) {
	found, n := map[chunk.Digest]*traced{}, 0
	for obj, err := range t.bucket.List(ctx, trace.Prefix) {
		if err != nil {
			return nil, fmt.Errorf("list trace records: %w", err)
		}
		if n++; n > maxTraceKeys {
			t.log.WarnContext(ctx, "more trace records than are kept, the rest is not used", "limit", maxTraceKeys)
			break
		}
		k, ok := trace.ParseKey(obj.Key)
		if !ok {
			t.log.WarnContext(ctx, "object left out: its key is none of a trace record", "key", obj.Key)
			continue
		}
		im := found[k.Image]
		if im == nil {
			im = &traced{}
			found[k.Image] = im
		}
		im.keys = append(im.keys, k)
	}
	for _, im := range found {
		slices.SortFunc(im.keys, func(a, b trace.Key) int { return cmp.Compare(a.String(), b.String()) })
	}
	return found, nil
}

// add keeps a record that was found to be right. An image that has all its records,
// the last a short time ago, keeps those.
func (t *traces) add(ctx context.Context, r trace.Record, encoded []byte) error {
	if err := t.load(ctx); err != nil {
		return err
	}
	t.adding.Lock()
	defer t.adding.Unlock()
	now := t.now()
	t.mu.Lock()
	im := t.images[r.Image]
	full := im != nil && len(im.keys) >= trace.MaxRuns && now.Sub(im.last()) < traceEvery
	t.mu.Unlock()
	if full {
		return nil
	}
	k := trace.KeyOf(r, encoded, now)
	if err := t.bucket.Put(ctx, k.String(), bytes.NewReader(encoded), int64(len(encoded))); err != nil {
		return fmt.Errorf("keep trace record: %w", err)
	}
	// The record is there before those that it replaces are deleted. A crash in
	// between leaves some too many, which the next record takes away.
	for _, old := range t.enter(k) {
		if err := t.bucket.Delete(ctx, old.String()); err != nil {
			return fmt.Errorf("delete old trace record: %w", err)
		}
	}
	return nil
}

// enter makes a record known, and returns those that go for it: the oldest of its
// image, and all of the image that ran longest ago.
func (t *traces) enter(k trace.Key) (old []trace.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	im := t.images[k.Image]
	if im == nil {
		im = &traced{}
		t.images[k.Image] = im
	}
	t.count++
	im.version, im.merged, im.list = t.count, false, nil
	im.keys = append(im.keys, k)
	if n := len(im.keys) - trace.MaxRuns; n > 0 {
		old, im.keys = slices.Clone(im.keys[:n]), slices.Clone(im.keys[n:])
	}
	for len(t.images) > maxTraced {
		id := slices.MinFunc(slices.Collect(maps.Keys(t.images)), func(a, b chunk.Digest) int {
			return t.images[a].last().Compare(t.images[b].last())
		})
		old = append(old, t.images[id].keys...)
		delete(t.images, id)
	}
	return old
}

// list returns the list of an image, empty when it has none, and its version. The
// caller must not change it.
func (t *traces) list(ctx context.Context, id chunk.Digest) (list []uint32, version uint64, err error) {
	if err := t.load(ctx); err != nil {
		return nil, 0, err
	}
	t.mu.Lock()
	im := t.images[id]
	if im == nil || im.merged || len(im.keys) < trace.MinRuns {
		defer t.mu.Unlock()
		if im == nil {
			return nil, 0, nil
		}
		return im.list, im.version, nil
	}
	keys, version := slices.Clone(im.keys[max(0, len(im.keys)-trace.MaxRuns):]), im.version
	t.mu.Unlock()
	var runs [][]uint32
	for _, k := range keys {
		r, err := t.read(ctx, k)
		if err != nil && !bucket.IsDamage(err) && !errors.Is(err, trace.ErrMalformed) && !errors.Is(err, trace.ErrVersion) {
			return nil, 0, err
		}
		if err != nil {
			t.log.WarnContext(ctx, "trace record left out", "key", k.String(), "error", err)
			continue
		}
		runs = append(runs, r.Numbers)
	}
	list = trace.Merge(runs)
	t.mu.Lock()
	defer t.mu.Unlock()
	if im.version == version {
		im.list, im.merged = list, true
	}
	return list, version, nil
}

func (t *traces) read(ctx context.Context, k trace.Key) (trace.Record, error) {
	b, err := bucket.ReadObject(ctx, t.bucket, k.String(), trace.MaxRecord)
	if err != nil {
		return trace.Record{}, err
	}
	r, err := trace.Decode(b)
	if err == nil && (r.Image != k.Image || r.Source != k.Source || r.Platform != k.Platform) {
		err = fmt.Errorf("it is a record of image %s: %w", r.Image, trace.ErrMalformed)
	}
	return r, err
}

// others returns at most n images beside id that have records enough for a list:
// first those of the given sources, then all, each the ones that ran last first.
func (t *traces) others(ctx context.Context, id chunk.Digest, near map[chunk.Digest]bool, n int) ([]trace.Key, error) {
	if err := t.load(ctx); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []trace.Key
	for other, im := range t.images {
		if other != id && im.listed() {
			all = append(all, im.keys[len(im.keys)-1])
		}
	}
	slices.SortFunc(all, func(a, b trace.Key) int {
		if near[a.Source] != near[b.Source] {
			if near[a.Source] {
				return -1
			}
			return 1
		}
		return cmp.Or(b.Time.Compare(a.Time), bytes.Compare(a.Image[:], b.Image[:]))
	})
	return all[:min(n, len(all))], nil
}

// enough counts a start of an image, and reports whether its run need not be
// recorded: there are records for a list, and another start brings the next one. Of an
// image that has no list, and gets that of another if one is like it, every second run
// is recorded, and not the first. What is not known yet is not enough.
func (t *traces) enough(id chunk.Digest) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if im := t.images[id]; im.listed() {
		delete(t.aided, id)
		im.starts++
		return im.starts%recordedOf != 0
	}
	if t.aided[id] || !t.anyListed() {
		delete(t.aided, id)
		return false
	}
	if len(t.aided) >= maxAided {
		clear(t.aided)
	}
	t.aided[id] = true
	return true
}

// anyListed reports whether an image has a list; t.mu is held.
func (t *traces) anyListed() bool {
	for _, im := range t.images {
		if im.listed() {
			return true
		}
	}
	return false
}

// added returns how many records have been added, which tells whether what follows
// from all of them may be another.
func (t *traces) added() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count
}
