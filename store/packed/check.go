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
// does what keeps the damage from being used: a damaged copy is condemned, the
// index corrected, a pack whose chunks are all good written again. A copy that is
// condemned and good again, because its pack was replaced, is so no longer. A
// missing pack stays in the journal, as it may come back, until a full check finds
// no damage and no chunk that is in missing packs alone. The error is about the check
// itself, not about what it found.
//
// A pack with condemned copies is known to be damaged. Its other chunks are
// verified, but the rest of it is not reported again.
func (s *Store) Check(ctx context.Context, cfg CheckConfig, report func(Problem)) error {
	if err := s.writable("check the store"); err != nil {
		return err
	}
	s.upkeep.Lock()
	defer s.upkeep.Unlock()
	c := &checker{
		s: s, cfg: cfg,
		known: map[chunk.Digest]int{}, agree: map[chunk.Digest]int{}, gone: map[chunk.Digest]error{},
	}
	c.report = func(p Problem) {
		c.damaged = c.damaged || p.Kind == PackDamaged || p.Kind == ChunkDamaged
		report(p)
	}
	for _, cc := range s.catalog.Condemned() {
		c.known[cc.Pack]++
	}
	packs := s.catalog.Packs()
	if err := c.findGone(ctx, packs); err != nil {
		return err
	}
	for _, p := range packs {
		if err := c.checkPack(ctx, p); err != nil {
			return fmt.Errorf("check pack %s: %w", p.ID, err)
		}
	}
	if err := c.checkIndex(ctx, packs); err != nil {
		return fmt.Errorf("check chunk index: %w", err)
	}
	return nil
}

type checker struct {
	s      *Store
	cfg    CheckConfig
	report func(Problem)
	known  map[chunk.Digest]int   // condemned copies by pack, before the check
	agree  map[chunk.Digest]int   // index entries by pack that were found right
	gone   map[chunk.Digest]error // packs without an object
	// damaged says that bytes of a pack were found wrong.
	damaged bool
}

// findGone finds the packs without an object: chunks that the index has in those are
// looked for in all the others.
func (c *checker) findGone(ctx context.Context, packs []catalog.Pack) error {
	for _, p := range packs {
		_, err := c.s.bucket.Stat(ctx, pack.Key(p.ID))
		switch {
		case noObject(err):
			c.gone[p.ID] = fmt.Errorf("pack %s: %w", p.ID, err)
		case err != nil:
			return fmt.Errorf("check pack %s: %w", p.ID, err)
		}
	}
	return nil
}

func (c *checker) checkPack(ctx context.Context, p catalog.Pack) error {
	if c.gone[p.ID] != nil {
		return nil
	}
	if err := c.s.applyIfLate(ctx, p.ID); err != nil {
		return err
	}
	entries, size, damage := c.s.entries(ctx, p.ID)
	if noObject(damage) {
		c.gone[p.ID] = damage
		return nil
	}
	if damage != nil && !isDamage(damage) {
		return damage
	}
	if c.known[p.ID] > 0 && !c.cfg.Quick {
		left, err := c.s.lift(ctx, p, entries)
		if err != nil {
			return err
		}
		c.known[p.ID] = left
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
	if c.s.late.has(p.ID) {
		return nil // the index has nothing of it until it is whole
	}
	return c.compare(ctx, p.ID, good)
}

// noObject says of an error that nothing, or something that is no object, has the
// place of a pack.
func noObject(err error) bool {
	return errors.Is(err, bucket.ErrNotFound) || errors.Is(err, bucket.ErrDamaged)
}

// missing reports the packs without an object, of which the index has so many
// chunks each. What they held is known only by what the index has of them: when it
// has nothing of any, and all else is sound, every chunk is in a pack that is
// there, and they are retired.
func (c *checker) missing(ctx context.Context, packs []catalog.Pack, count map[chunk.Digest]int) error {
	only := 0
	for id := range c.gone {
		only += count[id]
	}
	sound := only == 0 && !c.cfg.Quick && !c.damaged && len(c.s.catalog.Condemned()) == 0
	for _, p := range packs {
		if c.gone[p.ID] == nil {
			continue
		}
		if sound {
			retired, err := c.s.retireEmpty(ctx, p.ID)
			if err != nil {
				return err
			}
			if retired {
				continue
			}
		}
		what := "no chunk of it is used now"
		if n := count[p.ID]; n > 0 {
			what = fmt.Sprintf("%d chunks cannot be read until it is back, or their images are converted again", n)
		}
		c.report(Problem{Kind: PackMissing, Pack: p.ID, Err: fmt.Errorf("%w; %s", c.gone[p.ID], what), Action: None})
	}
	return nil
}

// retireEmpty retires a pack without an object that the index knows no chunk of,
// and reports whether it did.
func (s *Store) retireEmpty(ctx context.Context, id chunk.Digest) (bool, error) {
	s.commits.Lock()
	defer s.commits.Unlock()
	if _, err := s.bucket.Stat(ctx, pack.Key(id)); !noObject(err) || !s.index.PackApplied(id) {
		return false, nil // a Write has stored it by now, or nobody knows what it held
	}
	s.log.InfoContext(ctx, "missing pack retired, its chunks are in other packs", "pack", id)
	if err := s.catalog.RetirePack(ctx, id); err != nil {
		return false, err
	}
	_, err := s.index.DropPacks(ctx, []chunk.Digest{id})
	return true, err
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
		condemned, err := c.s.condemnDamaged(ctx, e.Digest, chunkindex.At(id, e), true)
		if err != nil {
			return nil, err
		}
		if !condemned {
			continue // mended, missing, or condemned by a read, in the meantime
		}
		c.report(Problem{Kind: ChunkDamaged, Pack: id, Chunk: e.Digest, Off: e.Off, Err: reason, Action: Condemned})
	}
	return good, nil
}

// compare finds chunks of a pack that the index lacks, or has elsewhere in the same
// pack or in one that is missing. Where the index prefers another pack that is
// there, that pack's turn tells.
func (c *checker) compare(ctx context.Context, id chunk.Digest, good []pack.Entry) error {
	locs, found, err := c.s.lookupNow(ctx, digestsOf(good))
	if err != nil {
		return err
	}
	seen := map[chunk.Digest]bool{}
	var mend []pack.Entry
	for i, e := range good {
		switch want := chunkindex.At(id, e); {
		case seen[e.Digest] || found[i] && locs[i].Pack != id && c.gone[locs[i].Pack] == nil:
			continue
		case !found[i]:
			c.reindexed(IndexMissing, e.Digest, want, errors.New("chunk is stored but not in the index"))
			mend = append(mend, e)
		case locs[i].Pack != id:
			c.reindexed(IndexWrong, e.Digest, locs[i], fmt.Errorf("its pack is missing, and pack %s has the chunk", id))
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

// checkIndex finds the index entries that no pack accounts for, and tells of the
// missing packs. It counts entries first, so that it need not hold those of all
// packs at once.
func (c *checker) checkIndex(ctx context.Context, packs []catalog.Pack) error {
	count := map[chunk.Digest]int{}
	for r, err := range c.s.index.All(ctx) {
		if err != nil {
			return err
		}
		count[r.Pack]++
	}
	if err := c.missing(ctx, packs, count); err != nil {
		return err
	}
	for _, id := range slices.SortedFunc(maps.Keys(count), compareDigests) {
		if agreed, checked := c.agree[id]; checked && count[id] <= agreed || c.gone[id] != nil {
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
	switch {
	case noObject(damage) && c.s.catalog.HasPack(id):
		return nil // missing since the check began
	case noObject(damage):
		damage = nil // no pack of this store
	case damage != nil && !isDamage(damage):
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
		done := false
		if damage != nil {
			p.Kind, p.Err, p.Action = ChunkDamaged, damage, Condemned
			done, err = c.s.condemnDamaged(ctx, r.Digest, r.Location, true)
		} else {
			done, err = c.s.index.DeleteIf(ctx, r.Digest, r.Location)
		}
		if err != nil {
			return err
		}
		if done { // else it is whole by now, or somebody has moved or condemned it
			c.report(p)
		}
	}
	return nil
}
