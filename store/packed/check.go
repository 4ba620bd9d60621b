package packed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"quarry/chunkindex"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// CheckConfig says how thorough a check is.
type CheckConfig struct {
	// Quick reads footers and the index only: it finds missing and cut-off packs
	// and wrong index entries, no damaged chunk.
	Quick bool
}

// Check compares journal, packs and index with one another and, unless quick,
// reads every pack and verifies every chunk. It tells report each problem and
// does what keeps the damage from being used: a damaged copy is condemned, a
// missing pack retired, the index corrected, a pack whose chunks are all good
// written again. The error is about the check itself, not about what it found.
//
// A pack with condemned copies is known to be damaged. Its other chunks are
// verified, but the rest of it is not reported again.
func (s *Store) Check(ctx context.Context, cfg CheckConfig, report func(Problem)) error {
	s.upkeep.Lock()
	defer s.upkeep.Unlock()
	c := &checker{s: s, cfg: cfg, report: report, known: map[chunk.Digest]int{}, agree: map[chunk.Digest]int{}}
	for _, cc := range s.catalog.Condemned() {
		c.known[cc.Pack]++
	}
	for _, p := range s.catalog.Packs() {
		if err := c.checkPack(ctx, p); err != nil {
			return fmt.Errorf("check pack %s: %w", p.ID, err)
		}
	}
	if err := c.checkIndex(ctx); err != nil {
		return fmt.Errorf("check chunk index: %w", err)
	}
	return nil
}

type checker struct {
	s      *Store
	cfg    CheckConfig
	report func(Problem)
	known  map[chunk.Digest]int // condemned copies by pack, before the check
	agree  map[chunk.Digest]int // index entries by pack that were found right
}

func (c *checker) checkPack(ctx context.Context, p catalog.Pack) error {
	entries, size, damage := c.s.entries(ctx, p.ID)
	switch {
	case errors.Is(damage, bucket.ErrNotFound):
		return c.retire(ctx, p, PackMissing, damage)
	case errors.Is(damage, bucket.ErrDamaged): // no object, but a link, say
		return c.retire(ctx, p, PackDamaged, damage)
	}
	if damage != nil && !isDamage(damage) {
		return damage
	}
	if damage == nil && size != p.Size {
		damage = fmt.Errorf("pack has %d bytes, the journal says %d", size, p.Size)
	}
	good := c.usable(p.ID, entries)
	var v verdict
	if !c.cfg.Quick {
		var err error
		v, err = c.s.verifyPack(ctx, p.ID, size, entries)
		if err != nil {
			return err
		}
		if good, err = c.condemn(ctx, p.ID, good, v.bad); err != nil {
			return err
		}
		damage = errors.Join(damage, v.structure)
		if damage == nil && v.id != p.ID && len(v.bad) == 0 {
			damage = fmt.Errorf("pack has digest %s", v.id)
		}
	}
	if damage != nil && (c.known[p.ID] == 0 || v.id == p.ID) {
		action := None
		if !c.cfg.Quick && (v.id == p.ID || len(good) == len(entries)) && c.s.repair(ctx, p.ID, v.id, size, entries) == nil {
			action = Repaired
		}
		c.report(Problem{Kind: PackDamaged, Pack: p.ID, Err: damage, Action: action})
	}
	return c.compare(ctx, p.ID, good)
}

// retire takes a pack without an object out of the store.
func (c *checker) retire(ctx context.Context, p catalog.Pack, kind ProblemKind, damage error) error {
	c.s.commits.Lock()
	defer c.s.commits.Unlock()
	if err := c.s.catalog.RetirePack(ctx, p.ID); err != nil {
		return err
	}
	n, err := c.s.index.DropPack(ctx, p.ID)
	if err != nil {
		return err
	}
	c.report(Problem{Kind: kind, Pack: p.ID, Err: fmt.Errorf("%w; %d chunks are lost with it", damage, n), Action: Retired})
	return nil
}

// usable leaves condemned copies out.
func (c *checker) usable(id chunk.Digest, entries []pack.Entry) []pack.Entry {
	var out []pack.Entry
	for _, e := range entries {
		if !c.s.catalog.IsCondemned(e.Digest, id, e.Off) {
			out = append(out, e)
		}
	}
	return out
}

// condemn condemns and reports bad copies among the usable ones and returns the
// others.
func (c *checker) condemn(ctx context.Context, id chunk.Digest, usable []pack.Entry, bad map[int64]error) ([]pack.Entry, error) {
	var good []pack.Entry
	for _, e := range usable {
		reason, isBad := bad[e.Off]
		if !isBad {
			good = append(good, e)
			continue
		}
		condemned, err := c.s.condemnDamaged(ctx, e.Digest, chunkindex.At(id, e))
		if err != nil {
			return nil, err
		}
		if !condemned {
			continue // mended, or condemned by a read, in the meantime
		}
		c.report(Problem{Kind: ChunkDamaged, Pack: id, Chunk: e.Digest, Off: e.Off, Err: reason, Action: Condemned})
	}
	return good, nil
}

// compare finds chunks of a pack that the index lacks or has elsewhere in the
// same pack. Where the index prefers another pack, that pack's turn tells.
func (c *checker) compare(ctx context.Context, id chunk.Digest, good []pack.Entry) error {
	ds := make([]chunk.Digest, len(good))
	for i, e := range good {
		ds[i] = e.Digest
	}
	locs, found, err := c.s.lookup(ctx, ds)
	if err != nil {
		return err
	}
	seen := map[chunk.Digest]bool{}
	var mend []pack.Entry
	for i, e := range good {
		switch want := chunkindex.At(id, e); {
		case seen[e.Digest] || found[i] && locs[i].Pack != id:
			continue
		case !found[i]:
			c.reindexed(IndexMissing, e.Digest, want, errors.New("chunk is stored but not in the index"))
			mend = append(mend, e)
		case locs[i] != want:
			c.reindexed(IndexWrong, e.Digest, locs[i], fmt.Errorf("chunk is at %d", e.Off))
			mend = append(mend, e)
		}
		seen[e.Digest] = true
	}
	c.agree[id] = len(seen)
	if len(mend) == 0 {
		return nil
	}
	c.s.commits.Lock()
	defer c.s.commits.Unlock()
	return c.s.insertLocked(ctx, id, mend)
}

func (c *checker) reindexed(kind ProblemKind, d chunk.Digest, loc chunkindex.Location, err error) {
	c.report(Problem{Kind: kind, Pack: loc.Pack, Chunk: d, Off: loc.Off, Err: err, Action: Reindexed})
}

// checkIndex finds the index entries that no pack accounts for. It counts them
// first, so that it need not hold the entries of all packs at once.
func (c *checker) checkIndex(ctx context.Context) error {
	count := map[chunk.Digest]int{}
	for r, err := range c.s.index.All(ctx) {
		if err != nil {
			return err
		}
		count[r.Pack]++
	}
	for _, id := range slices.SortedFunc(maps.Keys(count), compareDigests) {
		if agreed, checked := c.agree[id]; checked && count[id] <= agreed {
			continue
		}
		if err := c.strays(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// strays removes the index entries for chunks that a pack does not have. When
// the pack is damaged they are chunks that were lost with a part of it.
func (c *checker) strays(ctx context.Context, id chunk.Digest) error {
	entries, _, damage := c.s.entries(ctx, id)
	if damage != nil && !isDamage(damage) {
		return damage
	}
	has := make(map[chunkindex.Record]bool, len(entries))
	for _, e := range entries {
		has[chunkindex.Record{Digest: e.Digest, Location: chunkindex.At(id, e)}] = true
	}
	for r, err := range c.s.index.All(ctx) {
		if err != nil {
			return err
		}
		if r.Pack != id || has[r] {
			continue
		}
		p := Problem{Kind: IndexWrong, Pack: id, Chunk: r.Digest, Off: r.Off, Err: errors.New("the pack does not have the chunk"), Action: Reindexed}
		if damage != nil {
			p.Kind, p.Err, p.Action = ChunkDamaged, damage, Condemned
			_, err = c.s.condemnDamaged(ctx, r.Digest, r.Location)
		} else {
			_, err = c.s.index.DeleteIf(ctx, r.Digest, r.Location)
		}
		if err != nil {
			return err
		}
		c.report(p)
	}
	return nil
}
