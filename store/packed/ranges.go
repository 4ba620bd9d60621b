package packed

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/chunkindex"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// rangeReader reads the ranges of one batch: one after another while the bucket
// answers at once, several at a time when it does not.
type rangeReader struct {
	s  *Store
	fn eachFunc
	g  *errgroup.Group

	mu     sync.Mutex // guards the three below
	ranges [][]wanted // nobody reads yet
	helped bool       // helpers have been asked for
	ended  bool       // no goroutine may be added any more
}

func (s *Store) readRanges(ctx context.Context, rs [][]wanted, fn eachFunc) error {
	g, ctx := errgroup.WithContext(ctx)
	r := &rangeReader{s: s, fn: fn, g: g, ranges: rs}
	g.Go(func() error { return r.work(ctx) })
	return g.Wait()
}

// work reads ranges until none is left.
func (r *rangeReader) work(ctx context.Context) error {
	defer r.end()
	for {
		ws := r.next()
		if ws == nil {
			return nil
		}
		if err := r.read(ctx, ws); err != nil {
			return err
		}
	}
}

// next takes a range; nil when none is left.
func (r *rangeReader) next() (ws []wanted) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ranges) == 0 {
		return nil
	}
	ws, r.ranges = r.ranges[0], r.ranges[1:]
	return ws
}

// end lets no helper begin any more: all ranges are taken, or one has failed.
func (r *rangeReader) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
}

// help has the other ranges read too, as far as helpers are free. It may come when
// all is over.
func (r *rangeReader) help(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.helped || r.ended {
		return
	}
	r.helped = true
	for range min(readers-1, len(r.ranges)) {
		if !r.s.helpers.TryAcquire(1) {
			return
		}
		r.g.Go(func() error {
			defer r.s.helpers.Release(1)
			return r.work(ctx)
		})
	}
}

// readRange fills p with bytes of a pack, from the range cache where there is one, and
// says whether the bucket was asked. What it fills p with is to be checked.
func (s *Store) readRange(ctx context.Context, id chunk.Digest, p []byte, off int64) (asked bool, err error) {
	if s.cfg.Ranges == nil {
		return true, s.bucket.ReadAt(ctx, pack.Key(id), p, off)
	}
	size, known := s.catalog.PackSize(id)
	if !known {
		return true, s.bucket.ReadAt(ctx, pack.Key(id), p, off)
	}
	return s.cfg.Ranges.ReadAt(ctx, bucket.Object{Key: pack.Key(id), Size: size}, p, off)
}

// anew reads a chunk again that was wrong, and has the range cache forget what it has
// wrong: that costs a read of the bucket for a block, and nothing else. Errors: wrong,
// when the bucket has no better, and then the copy is condemned; the bucket's when it
// cannot be read, which says nothing of the copy.
func (s *Store) anew(ctx context.Context, loc chunkindex.Location, wrong *store.CorruptError) (stored, plain []byte, err error) {
	if s.cfg.Ranges == nil {
		return nil, nil, s.damaged(ctx, wrong, loc)
	}
	stored = make([]byte, loc.Stored)
	for range 3 { // other readers may fill the cache meanwhile
		// The chunk before it may have had the same block read anew.
		asked, err := s.readRange(ctx, loc.Pack, stored, loc.Off)
		if err != nil {
			return nil, nil, s.unread(ctx, wrong.Want, loc, err)
		}
		if plain, err = verifyStored(plain, wrong.Want, loc, stored); err == nil {
			return stored, plain, nil
		}
		s.cfg.Ranges.Drop(bucket.Object{Key: pack.Key(loc.Pack)}, loc.Off, int64(loc.Stored))
		if asked {
			break // the bucket has it wrong, or it came so
		}
	}
	return nil, nil, s.damaged(ctx, wrong, loc)
}

// read reads one range and hands its chunks on.
func (r *rangeReader) read(ctx context.Context, ws []wanted) error {
	k := rangeKey{pack: ws[0].loc.Pack, off: ws[0].loc.Off}
	for _, w := range ws {
		k.size = max(k.size, end(w.loc)-k.off)
	}
	tier := "shared"
	fill := func(p []byte) error {
		asked, err := r.s.readRange(ctx, k.pack, p, k.off)
		if tier = "bucket"; !asked {
			tier = "disk"
		}
		return err
	}
	slow := time.AfterFunc(helpAfter, func() { r.help(ctx) })
	defer slow.Stop()
	return r.s.flights.with(ctx, k, fill, func(p []byte, err error) error {
		slow.Stop()
		r.s.metrics.used(tier, k.size)
		if isDamage(err) && !errors.Is(err, bucket.ErrNotFound) && len(ws) > 1 {
			// The pack is cut off somewhere in the range: the chunks before are good.
			for _, w := range ws {
				if err := r.read(ctx, []wanted{w}); err != nil {
					return err
				}
			}
			return nil
		}
		for i, w := range ws {
			if ctx.Err() != nil {
				return ctx.Err() // no answer of this chunk
			}
			if now, moved := r.s.movedTo(ctx, w.digest, w.loc, err); moved {
				if err := r.read(ctx, []wanted{{digest: w.digest, loc: now}}); err != nil {
					return err
				}
				continue
			}
			w.more = i < len(ws)-1
			stored, err := r.s.ofRange(ctx, w, p[w.loc.Off-k.off:][:w.loc.Stored], err)
			if err := r.fn(ctx, w, stored, err); err != nil {
				return err
			}
		}
		return nil
	})
}
