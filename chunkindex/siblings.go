package chunkindex

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cockroachdb/pebble/v2"

	"quarry/store/chunk"
	"quarry/store/pack"
)

const (
	// siblingPacks is how many packs' digests are kept in memory: those of two
	// writers that each read across the end of a pack, 40 bytes a chunk. Packs
	// have some 10 000, at most 65 536.
	siblingPacks = 4
	// siblingHits is how many chunks of one batch a pack must have before its
	// digests are read, which takes as long as looking up some 60 chunks.
	siblingHits = 32
	// movedPacks is of how many packs the other digests stay siblings when a pack
	// takes some from them. Two conversions that store the same chunks take from
	// one or two; a pack that takes from more was made by a program that removes
	// the others.
	movedPacks = 8
)

// siblings are the digests of the packs in which chunks were found last. Content
// comes again in the order in which it came first, so that the next chunks are
// mostly in the same pack; in the database they are far from each other.
//
// A pack's digests are what InsertBatch put for it, less what it put for later
// packs: they say that the index has a chunk at that pack, as long as nothing was
// removed from the index since. What is removed is in packs that nobody lists. So
// every removal empties siblings, and ends for good that packs are read which were
// there before it; see Index.whole.
type siblings struct {
	mu    sync.RWMutex // guards what follows; after Index.mu
	packs []*siblingPack
	next  int // to be replaced
}

type siblingPack struct {
	number  uint32
	numbers *chunk.Numbers // whose look-ups change nothing
}

// find sets found for the digests that it has, and returns the packs that have
// them.
func (s *siblings) find(ds []chunk.Digest, found []bool) (in []uint32) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var used [siblingPacks]bool
	last := 0 // where the chunk before was
	for i := range ds {
		for k := range s.packs {
			at := (last + k) % len(s.packs)
			if _, found[i] = s.packs[at].numbers.Find(&ds[i]); found[i] {
				last, used[at] = at, true
				break
			}
		}
	}
	for at, p := range s.packs {
		if used[at] {
			in = append(in, p.number)
		}
	}
	return in
}

func (s *siblings) has(number uint32) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, p := range s.packs {
		if p.number == number {
			return true
		}
	}
	return false
}

func (s *siblings) add(number uint32, digests []chunk.Digest) {
	p := &siblingPack{number, chunk.NewNumbers(len(digests), func(n uint32) *chunk.Digest { return &digests[n] })}
	for i := range digests {
		if _, twice := p.numbers.Find(&digests[i]); twice {
			return // no pack of ours
		}
		p.numbers.Add(&digests[i])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, have := range s.packs {
		if have.number == number {
			return // read by two at the same time
		}
	}
	if len(s.packs) < siblingPacks {
		s.packs = append(s.packs, p)
		return
	}
	s.packs[s.next] = p
	s.next = (s.next + 1) % siblingPacks
}

func (s *siblings) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.packs, s.next = nil, 0
}

// HasBatch reports for each digest whether LookupBatch would find it, in a tenth
// of the time for the chunks of a pack that are asked for one after the other. in
// are the packs of the Locations that LookupBatch would return.
func (x *Index) HasBatch(ctx context.Context, ds []chunk.Digest) (found []bool, in []chunk.Digest, err error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if err := x.usable(ctx); err != nil {
		return nil, nil, err
	}
	found = make([]bool, len(ds))
	for _, n := range x.siblings.find(ds, found) {
		in = append(in, x.packs.digests[n])
	}
	var rest []chunk.Digest
	var places []int
	for i, ok := range found {
		if !ok {
			rest, places = append(rest, ds[i]), append(places, i)
		}
	}
	if len(rest) == 0 {
		return found, in, nil
	}
	locs, ok, err := x.lookupBatch(rest)
	if err != nil {
		return nil, nil, err
	}
	hits := map[chunk.Digest]int{}
	most := chunk.Digest{}
	for k, i := range places {
		if found[i] = ok[k]; !ok[k] {
			continue
		}
		id := locs[k].Pack
		if hits[id]++; hits[id] > hits[most] {
			most = id
		}
	}
	in = slices.AppendSeq(in, maps.Keys(hits))
	if hits[most] < siblingHits {
		return found, in, nil
	}
	return found, in, x.readSiblings(most)
}

// readSiblings reads the digests of a pack, unless they are there or not whole.
// The caller holds mu for reading, so nothing is removed meanwhile.
func (x *Index) readSiblings(id chunk.Digest) error {
	n := x.packs.numbers[id]
	if n < x.whole || x.siblings.has(n) {
		return nil
	}
	digests, err := x.digestsOf(id)
	if err == nil && len(digests) > 0 {
		x.siblings.add(n, digests)
	}
	return err
}

// digestsOf reads the digests of a pack, of which there may be none.
func (x *Index) digestsOf(id chunk.Digest) ([]chunk.Digest, error) {
	v, closer, err := x.db.Get(digestsKey(x.packs.numbers[id]))
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("digests of pack %s: %w", id, err)
	}
	digests := make([]chunk.Digest, len(v)/len(chunk.Digest{}))
	for i := range digests {
		copy(digests[i][:], v[i*len(chunk.Digest{}):])
	}
	return digests, closer.Close()
}

// moveSiblings is part of a batch that inserts the entries of a pack: it takes
// them from the digests of the packs where they were, and reports whether there
// are any.
func (x *Index) moveSiblings(b *pebble.Batch, id chunk.Digest, entries []pack.Entry) (bool, error) {
	ds := make([]chunk.Digest, len(entries))
	for i := range entries {
		ds[i] = entries[i].Digest
	}
	locs, found, err := x.lookupBatch(ds)
	if err != nil {
		return false, err
	}
	moved := map[chunk.Digest]map[chunk.Digest]bool{} // by pack
	for i, loc := range locs {
		if !found[i] || loc.Pack == id || x.packs.numbers[loc.Pack] < x.whole {
			continue
		}
		if moved[loc.Pack] == nil {
			moved[loc.Pack] = map[chunk.Digest]bool{}
		}
		moved[loc.Pack][ds[i]] = true
	}
	for from, gone := range moved {
		var rest []byte // none: a pack that nobody asks
		if len(moved) <= movedPacks {
			digests, err := x.digestsOf(from)
			if err != nil {
				return false, err
			}
			for _, d := range digests {
				if !gone[d] {
					rest = append(rest, d[:]...)
				}
			}
		}
		if err := b.Set(digestsKey(x.packs.numbers[from]), rest, nil); err != nil {
			return false, err
		}
	}
	return len(moved) > 0, nil
}

// putDigests records what is inserted for a pack.
func putDigests(b *pebble.Batch, n uint32, entries []pack.Entry) error {
	v := make([]byte, 0, len(entries)*len(chunk.Digest{}))
	for i := range entries {
		v = append(v, entries[i].Digest[:]...)
	}
	return b.Set(digestsKey(n), v, nil)
}

// endWhole is part of every batch that removes chunks.
func (x *Index) endWhole(b *pebble.Batch) error {
	return b.Set([]byte(wholeKey), be.AppendUint32(nil, x.packs.next), nil)
}

// removed follows a batch with endWhole.
func (x *Index) removed() {
	x.whole = x.packs.next
	x.siblings.clear()
	x.recent.clear()
}

// loadWhole reads which packs are whole. Of an index of the first version, which
// does not say it, none is.
func (x *Index) loadWhole(version string) error {
	if version == firstVersion {
		b := x.db.NewBatch()
		err := errors.Join(b.Set([]byte(versionKey), []byte(currentVersion), nil), x.endWhole(b))
		if err != nil {
			return errors.Join(err, b.Close())
		}
		x.whole = x.packs.next
		return b.Commit(pebble.Sync)
	}
	v, closer, err := x.db.Get([]byte(wholeKey))
	if errors.Is(err, pebble.ErrNotFound) {
		return nil // nothing was ever removed
	}
	if err != nil {
		return err
	}
	if len(v) != 4 {
		return errors.Join(fmt.Errorf("index line of whole packs has %d bytes", len(v)), closer.Close())
	}
	x.whole = be.Uint32(v)
	return closer.Close()
}
