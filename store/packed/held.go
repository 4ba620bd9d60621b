package packed

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// looks says of packs whether they are in the bucket, for the time of one Write
// or one Has: it asks once for each. The index alone does not say that a chunk
// can be read, because a missing pack stays in it: the pack may come back.
type looks struct {
	s *Store
	// emptied: what is in packs that gc empties counts too.
	emptied bool
	// exact: there are packs that are not whole, so that each chunk is asked for
	// its own pack, which takes longer.
	exact atomic.Bool

	mu    sync.Mutex // guards sizes; held while the bucket is asked
	sizes map[chunk.Digest]int64
}

// newLooks begins with what earlier reads and looks have found missing.
func (s *Store) newLooks(ctx context.Context) (*looks, error) {
	l := &looks{s: s, sizes: map[chunk.Digest]int64{}}
	if err := s.applyLate(ctx); err != nil {
		return nil, err
	}
	for _, id := range s.broken.list() {
		whole, err := l.whole(ctx, id)
		if err != nil {
			return nil, err
		}
		if whole || !s.catalog.HasPack(id) {
			s.broken.remove(id)
		}
	}
	return l, nil
}

// size returns the size of a pack's object, 0 when there is none.
func (l *looks) size(ctx context.Context, id chunk.Digest) (int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n, known := l.sizes[id]; known {
		return n, nil
	}
	o, err := l.s.bucket.Stat(ctx, pack.Key(id))
	if err != nil && !isDamage(err) {
		return 0, err
	}
	l.sizes[id] = o.Size
	return o.Size, nil
}

// stored says that a pack is now in the bucket.
func (l *looks) stored(id chunk.Digest, size int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sizes[id] = size
}

// whole reports whether a pack has the size that the journal says.
func (l *looks) whole(ctx context.Context, id chunk.Digest) (bool, error) {
	got, err := l.size(ctx, id)
	if err != nil {
		return false, err
	}
	if l.s.catalog.IsPackCondemned(id) {
		l.exact.Store(true)
		return true, nil
	}
	if want, known := l.s.catalog.PackSize(id); known && got == want {
		return true, nil
	}
	l.exact.Store(true)
	l.s.broken.add(id)
	return false, nil
}

// held reports for each digest whether the index has the chunk in a pack that is
// in the bucket, and reaches so far.
func (s *Store) held(ctx context.Context, l *looks, ds []chunk.Digest) ([]bool, error) {
	s.rebuilding.RLock()
	defer s.rebuilding.RUnlock()
	if !l.exact.Load() {
		found, in, err := s.index.HasBatch(ctx, ds)
		for i := 0; err == nil && i < len(in); i++ {
			_, err = l.whole(ctx, in[i])
		}
		if err != nil || !l.exact.Load() {
			return found, err
		}
	}
	locs, found, err := s.index.LookupBatch(ctx, ds)
	if err != nil {
		return nil, err
	}
	for i, loc := range locs {
		if !found[i] {
			continue
		}
		// What gc empties is stored no more, except for who only reads, and what it has
		// retired the index may still have for a moment.
		if !s.catalog.HasPack(loc.Pack) || !l.emptied && s.catalog.IsPackCondemned(loc.Pack) {
			found[i] = false
			continue
		}
		size, err := l.size(ctx, loc.Pack)
		if err != nil {
			return nil, err
		}
		found[i] = end(loc) <= size
	}
	return found, nil
}

// lost returns the copies that the entries of a new pack replace and whose packs
// end before them. They are condemned, so that a check knows why such a pack is
// not whole; if it ever is, the check lifts them.
func (s *Store) lost(ctx context.Context, l *looks, entries []pack.Entry) ([]catalog.CondemnedChunk, error) {
	if !l.exact.Load() {
		return nil, nil
	}
	var lost []catalog.CondemnedChunk
	for batch := range slices.Chunk(entries, lookupBatch) {
		locs, found, err := s.lookupNow(ctx, digestsOf(batch))
		if err != nil {
			return nil, err
		}
		for i, loc := range locs {
			if !found[i] {
				continue
			}
			size, err := l.size(ctx, loc.Pack)
			if err != nil {
				return nil, err
			}
			if 0 < size && size < end(loc) {
				lost = append(lost, catalog.CondemnedChunk{Digest: batch[i].Digest, Pack: loc.Pack, Off: loc.Off})
			}
		}
	}
	return lost, nil
}

func digestsOf(entries []pack.Entry) []chunk.Digest {
	ds := make([]chunk.Digest, len(entries))
	for i, e := range entries {
		ds[i] = e.Digest
	}
	return ds
}

// packSet is a set of packs. The zero value is empty.
type packSet struct {
	mu  sync.Mutex // guards ids
	ids map[chunk.Digest]struct{}
}

// add reports whether the pack was not there before.
func (p *packSet) add(id chunk.Digest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.ids[id]; known {
		return false
	}
	if p.ids == nil {
		p.ids = map[chunk.Digest]struct{}{}
	}
	p.ids[id] = struct{}{}
	return true
}

func (p *packSet) remove(id chunk.Digest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.ids, id)
}

func (p *packSet) has(id chunk.Digest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.ids[id]
	return ok
}

func (p *packSet) empty() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ids) == 0
}

func (p *packSet) list() []chunk.Digest {
	p.mu.Lock()
	defer p.mu.Unlock()
	ids := make([]chunk.Digest, 0, len(p.ids))
	for id := range p.ids {
		ids = append(ids, id)
	}
	return ids
}
