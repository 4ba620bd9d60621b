package page

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"quarry/rafs"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

const (
	// maxCompared bounds the images that are compared with one another.
	maxCompared = 20_000
	// maxCounted bounds the distinct chunks that are counted at once: with 16 bytes
	// for each, and a table that is half empty after it grew, some 80 MiB while a
	// comparison runs.
	maxCounted = 2 << 20
	// maxKept bounds the chunks of the lists that are kept between comparisons, 64 MiB
	// of 16 bytes each. Images beyond it have their bootstraps read again each time.
	maxKept = 4 << 20
	// maxScopes bounds the sets of repositories for which the outcome is kept.
	maxScopes = 16
	// compareAge is how old a comparison may be before another one begins because
	// images came or went, and compareShare how many times as long as it took.
	compareAge   = time.Second
	compareShare = 10
	// maxPause is the longest rest between two images. It is as long as the work was,
	// so that this takes at most half of one processor.
	maxPause = 100 * time.Millisecond
	// failedPause is how long a bootstrap that cannot be read is left alone.
	failedPause = time.Minute
	// lookUpStep is the number of chunks asked of the index at once.
	lookUpStep = 4096
)

// measure is what one image has by itself.
type measure struct {
	files   int64 // bytes of its files
	stored  int64 // bytes of its distinct chunks as they are stored
	problem string
}

// part is one distinct chunk of an image. Eight bytes of its digest name it here:
// two of 2 Mi chunks have the same by chance once in 10 million stores, and who makes
// such a pair falsifies a figure on a page.
type part struct {
	name   uint64
	stored uint32
}

// comparison is what the images of one scope share. It is not changed.
type comparison struct {
	of       chunk.Digest           // of the images compared
	alone    map[chunk.Digest]int64 // by bootstrap: stored bytes that no other image of the scope has
	families []family
	problem  string // why there is none
	ended    time.Time
	took     time.Duration
}

// family is images that share most of what they have.
type family struct {
	members []chunk.Digest // bootstraps, in the order of their names
	stored  int64          // of all, each counted by itself
	saved   int64          // of that, what is stored once for several
}

// sharing keeps what was measured and compared.
type sharing struct {
	mu       sync.Mutex               // guards the rest
	measures map[chunk.Digest]measure // by bootstrap
	lists    map[chunk.Digest][]part
	kept     int // parts in lists
	scopes   map[chunk.Digest]*scope
}

type scope struct {
	last *comparison // nil: none yet
	used time.Time
}

func newSharing() sharing {
	return sharing{measures: map[chunk.Digest]measure{}, lists: map[chunk.Digest][]part{}, scopes: map[chunk.Digest]*scope{}}
}

// comparison returns what the images share, nil when that is not known yet, and
// whether it is of just these images. id names who may see them: the comparison before
// is shown until there is a newer one. images are bootstraps, each once.
func (p *Page) comparison(id chunk.Digest, images []chunk.Digest) (*comparison, bool) {
	s := &p.share
	of := sumOf(images)
	now := p.cfg.Now()
	s.mu.Lock()
	sc := s.scopes[id]
	if sc == nil {
		sc = &scope{}
		s.scopes[id] = sc
	}
	sc.used = now
	s.dropScopes()
	last := sc.last
	s.mu.Unlock()
	if last != nil && last.of == of {
		return last, true
	}
	if last == nil || now.Sub(last.ended) > max(compareAge, compareShare*last.took) {
		p.turns.start("compare", func(ctx context.Context) { p.compare(ctx, sc, images, of) })
	}
	return last, false
}

// dropScopes drops those that nobody has asked for for the longest. mu is held.
func (s *sharing) dropScopes() {
	for len(s.scopes) > maxScopes {
		var oldest chunk.Digest
		for id, sc := range s.scopes {
			if first, ok := s.scopes[oldest]; !ok || sc.used.Before(first.used) {
				oldest = id
			}
		}
		delete(s.scopes, oldest)
	}
}

func sumOf(ds []chunk.Digest) chunk.Digest {
	b := make([]byte, 0, len(ds)*len(chunk.Digest{}))
	for _, d := range ds {
		b = append(b, d[:]...)
	}
	return chunk.Sum(b)
}

// measureOf returns what is known of an image; false: nothing yet.
func (p *Page) measureOf(bootstrap chunk.Digest) (measure, bool) {
	p.share.mu.Lock()
	defer p.share.mu.Unlock()
	m, ok := p.share.measures[bootstrap]
	return m, ok
}

// forget drops what was measured of images that are in no snapshot any more.
func (p *Page) forget(snap *snapshot) {
	there := map[chunk.Digest]bool{}
	for _, list := range snap.images {
		for _, st := range list {
			there[st.bootstrap] = true
		}
	}
	s := &p.share
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.measures, func(d chunk.Digest, _ measure) bool { return !there[d] })
	for d, list := range s.lists {
		if !there[d] {
			s.kept -= len(list)
			delete(s.lists, d)
		}
	}
}

// compare finds out what the images share, in one pass over their lists of chunks.
func (p *Page) compare(ctx context.Context, sc *scope, images []chunk.Digest, of chunk.Digest) {
	start := p.cfg.Now()
	c := newCount(maxCounted)
	problem, failed := "", false
	if len(images) > maxCompared {
		problem = fmt.Sprintf("there are %d images, and at most %d are compared", len(images), maxCompared)
	}
	for _, d := range images {
		begun := time.Now()
		list, err := p.list(ctx, d)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			p.log.WarnContext(ctx, "the page cannot measure an image", "bootstrap", d, "error", err)
			failed = true
		}
		if problem == "" && !c.add(d, list) {
			problem = fmt.Sprintf("they have more than %d distinct chunks, and no more are compared", maxCounted)
			c = newCount(maxCounted)
		}
		if took := min(time.Since(begun), maxPause); took > time.Millisecond {
			select {
			case <-ctx.Done():
				return
			case <-time.After(took):
			}
		}
	}
	done := c.comparison()
	done.of, done.problem, done.ended, done.took = of, problem, p.cfg.Now(), p.cfg.Now().Sub(start)
	if failed { // what cannot be read may be mended
		done.of, done.ended = chunk.Digest{}, done.ended.Add(failedPause)
	}
	p.share.mu.Lock()
	defer p.share.mu.Unlock()
	sc.last = done
}

// list returns the distinct chunks of an image and notes its measure.
func (p *Page) list(ctx context.Context, bootstrap chunk.Digest) ([]part, error) {
	s := &p.share
	s.mu.Lock()
	list, ok := s.lists[bootstrap]
	s.mu.Unlock()
	if ok {
		return list, nil
	}
	list, m, err := p.read(ctx, bootstrap)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		m = measure{problem: "its bootstrap cannot be read: run quarry check"}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.measures[bootstrap] = m
	if err == nil && s.kept+len(list) <= maxKept {
		s.lists[bootstrap] = list
		s.kept += len(list)
	}
	return list, err
}

func (p *Page) read(ctx context.Context, bootstrap chunk.Digest) ([]part, measure, error) {
	b, err := bucket.ReadObject(ctx, p.cfg.Bucket, image.BootstrapKey(bootstrap), rafs.MaxBootstrap)
	if err == nil && chunk.Sum(b) != bootstrap {
		err = errors.New("it has another digest")
	}
	var img *rafs.Image
	if err == nil {
		img, err = rafs.Decode(b)
	}
	if err != nil {
		return nil, measure{}, fmt.Errorf("bootstrap %s: %w", bootstrap, err)
	}
	m := measure{files: img.FileBytes()}
	if img.Blob == nil {
		return nil, m, nil
	}
	list := make([]part, 0, len(img.Blob.Chunks))
	for step := range slices.Chunk(img.Blob.Chunks, lookUpStep) {
		ds := make([]chunk.Digest, len(step))
		for i, c := range step {
			ds[i] = c.Digest
		}
		stored, err := p.cfg.Stored(ctx, ds)
		if err != nil {
			return nil, m, err
		}
		for i, d := range ds {
			n := max(0, stored[i]) // one that is not there takes nothing
			list = append(list, part{binary.LittleEndian.Uint64(d[:8]), uint32(n)})
			m.stored += n
		}
	}
	return list, m, nil
}
