package page

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

const (
	// scanAge is how old what is known of the bucket may be before it is listed
	// again, and scanShare how many times as long as a listing takes that is at least:
	// a slow bucket is not kept busy by somebody who looks.
	scanAge   = time.Second
	scanShare = 20
	// scanWait is how long a request waits for a listing: one of a folder takes less.
	scanWait = 250 * time.Millisecond
	// maxListed bounds the objects looked at below images/: 20 000 images with four
	// signatures each.
	maxListed = 100_000
	// maxFailures bounds the failure records read.
	maxFailures = 500
	// scanReads is how many objects are read at once.
	scanReads = 8
	// statementAge is how old a statement may be before it is read again: another
	// version of the converter replaces it under the same key.
	statementAge = 10 * time.Minute
)

// stated is an image that has a statement.
type stated struct {
	platform  image.Platform
	bootstrap chunk.Digest
	signed    bool
	problem   string // why the statement is of no use
}

// snapshot is what the bucket said when it was listed. It is not changed.
type snapshot struct {
	images   map[chunk.Digest][]stated // by source, sorted by platform
	failures map[string]image.Failure  // by REPO:TAG
	notes    []string                  // what is left out, and why
}

// states keeps the newest snapshot.
type states struct {
	mu    sync.Mutex // guards the rest
	snap  *snapshot  // nil: none yet
	taken time.Time
	took  time.Duration

	statements map[string]readStatement // by key; used by the scan alone
}

type readStatement struct {
	stated
	at time.Time
}

// snapshot returns what is known of the bucket, nil when nothing is yet. It has the
// bucket listed when that was long ago, and waits a moment for it.
func (p *Page) snapshot(ctx context.Context) *snapshot {
	s := &p.states
	s.mu.Lock()
	fresh := s.snap != nil && p.cfg.Now().Sub(s.taken) < max(scanAge, scanShare*s.took)
	s.mu.Unlock()
	if !fresh {
		ctx, cancel := context.WithTimeout(ctx, scanWait)
		defer cancel()
		select {
		case <-p.turns.start("scan", p.scan):
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snap
}

// scan makes a new snapshot. One that fails leaves the last one, with a note.
func (p *Page) scan(ctx context.Context) {
	start := p.cfg.Now()
	snap := &snapshot{images: map[chunk.Digest][]stated{}, failures: map[string]image.Failure{}}
	err := p.scanImages(ctx, snap)
	if err == nil {
		err = p.scanFailures(ctx, snap)
	}
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		p.forget(snap)
	}
	s := &p.states
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		p.log.WarnContext(ctx, "the page cannot list the bucket", "error", err)
		old := s.snap
		if old == nil {
			old = snap
		}
		snap = &snapshot{images: old.images, failures: old.failures, notes: []string{"The bucket cannot be listed now, states may be old: the log says why."}}
	}
	s.snap, s.taken, s.took = snap, p.cfg.Now(), p.cfg.Now().Sub(start)
}

func (p *Page) scanImages(ctx context.Context, snap *snapshot) error {
	signed := map[string]bool{} // keys of statements
	var keys []string
	n := 0
	for obj, err := range p.cfg.Bucket.List(ctx, image.ImagesPrefix) {
		if err != nil {
			return fmt.Errorf("list images: %w", err)
		}
		if n++; n > maxListed {
			snap.notes = append(snap.notes, fmt.Sprintf("The bucket has more than %d objects of images; states of the rest are not known here.", maxListed))
			break
		}
		if image, _, ok := strings.Cut(obj.Key, "/sigs/"); ok {
			signed[image+"/statement"] = true
		} else if strings.HasSuffix(obj.Key, "/statement") {
			keys = append(keys, obj.Key)
		}
	}
	read, err := p.readStatements(ctx, keys)
	if err != nil {
		return err
	}
	for i, key := range keys {
		source, platform, ok := image.ParseStatementKey(key)
		if !ok {
			continue
		}
		st := read[i]
		st.platform, st.signed = platform, signed[key]
		snap.images[source] = append(snap.images[source], st)
	}
	for _, list := range snap.images {
		slices.SortFunc(list, func(a, b stated) int { return strings.Compare(a.platform.String(), b.platform.String()) })
	}
	return nil
}

// readStatements reads those that were not read lately.
func (p *Page) readStatements(ctx context.Context, keys []string) ([]stated, error) {
	now := p.cfg.Now()
	kept := map[string]readStatement{}
	out := make([]stated, len(keys))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(scanReads)
	for i, key := range keys {
		if st, ok := p.states.statements[key]; ok && now.Sub(st.at) < statementAge {
			out[i] = st.stated
			continue
		}
		g.Go(func() (err error) {
			out[i], err = p.readStatement(ctx, key)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for i, key := range keys {
		at := now
		if st, ok := p.states.statements[key]; ok && now.Sub(st.at) < statementAge {
			at = st.at
		}
		if out[i].problem == "" {
			kept[key] = readStatement{out[i], at}
		}
	}
	p.states.statements = kept
	return out, nil
}

func (p *Page) readStatement(ctx context.Context, key string) (stated, error) {
	b, err := bucket.ReadObject(ctx, p.cfg.Bucket, key, image.MaxStatement)
	var st image.Statement
	switch {
	case err == nil:
		st, err = image.DecodeStatement(b)
	case !bucket.IsDamage(err):
		return stated{}, err // asking again may help
	}
	if err != nil {
		return stated{problem: "its image statement is damaged: convert the image again"}, nil
	}
	return stated{bootstrap: st.Bootstrap}, nil
}

func (p *Page) scanFailures(ctx context.Context, snap *snapshot) error {
	var keys []string
	for obj, err := range p.cfg.Bucket.List(ctx, image.FailuresPrefix) {
		if err != nil {
			return fmt.Errorf("list failures: %w", err)
		}
		if len(keys) == maxFailures {
			snap.notes = append(snap.notes, fmt.Sprintf("There are more than %d records of failures; the rest are not shown.", maxFailures))
			break
		}
		keys = append(keys, obj.Key)
	}
	records := make([]*image.Failure, len(keys))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(scanReads)
	for i, key := range keys {
		g.Go(func() error {
			b, err := bucket.ReadObject(ctx, p.cfg.Bucket, key, image.MaxFailure)
			if bucket.IsDamage(err) {
				return nil // gone meanwhile, or for check to tell of
			}
			if err != nil {
				return err
			}
			if f, err := image.DecodeFailure(b); err == nil && image.FailureKey(f.Repo, f.Tag) == key {
				records[i] = &f
			}
			return nil
		})
	}
	err := g.Wait()
	for _, f := range records {
		if f != nil {
			snap.failures[f.Repo+":"+f.Tag] = *f
		}
	}
	return err
}
