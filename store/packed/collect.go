package packed

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"quarry/chunkindex"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// What follows is what gc does with packs; store/gc says in which order, and when.

// Use says how much of a pack is live.
type Use struct {
	Pack      chunk.Digest
	Size      int64
	Chunks    int64 // that the index has in the pack
	Live      int64 // of them, those that are live
	LiveBytes int64 // what those take in the pack: record and line of the footer
	// ChunkBytes is what all chunks take that the pack was made of.
	ChunkBytes int64
	Condemned  bool
	// Sound: the object is there in full length and the index has taken the pack in.
	// Of another it is not known what it holds, so that gc leaves it alone.
	Sound bool
}

// Survey is what a bucket has of packs.
type Survey struct {
	Uses []Use // of the packs of the catalog, in its order
	// Orphans are objects that are no pack of the catalog: a crash left them, or gc
	// retired them.
	Orphans []bucket.Object
}

// Survey counts in every pack the chunks that live reports.
func (s *Store) Survey(ctx context.Context, live func(*chunk.Digest) bool) (Survey, error) {
	var sv Survey
	at := map[chunk.Digest]int{}
	for _, p := range s.catalog.Packs() {
		at[p.ID] = len(sv.Uses)
		sv.Uses = append(sv.Uses, Use{Pack: p.ID, Size: p.Size, ChunkBytes: p.Size - pack.Overhead, Condemned: s.catalog.IsPackCondemned(p.ID)})
	}
	for o, err := range s.bucket.List(ctx, pack.KeyPrefix) {
		if err != nil {
			return sv, fmt.Errorf("list packs: %w", err)
		}
		id, err := chunk.ParseHex(o.Key[len(pack.KeyPrefix):])
		if err != nil {
			continue // nothing of ours
		}
		if i, ok := at[id]; !ok {
			sv.Orphans = append(sv.Orphans, o)
		} else if o.Size == sv.Uses[i].Size {
			sv.Uses[i].Sound = s.index.PackApplied(id) && !s.late.has(id)
		}
	}
	for r, err := range s.index.All(ctx) {
		if err != nil {
			return sv, err
		}
		i, ok := at[r.Pack]
		if !ok {
			continue
		}
		sv.Uses[i].Chunks++
		if live(&r.Digest) {
			sv.Uses[i].Live++
			sv.Uses[i].LiveBytes += pack.RecordHeaderSize + int64(r.Stored) + pack.EntrySize
		}
	}
	return sv, nil
}

// CondemnPacks begins to empty packs: from now on no chunk in them counts as stored.
func (s *Store) CondemnPacks(ctx context.Context, ids []chunk.Digest) error {
	for _, id := range ids {
		s.drained.remove(id) // of an earlier collection, since when it was stored anew
		if err := s.catalog.CondemnPack(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// CopyStats says what one Copy wrote.
type CopyStats struct {
	Chunks, Bytes, Packs int64
}

// Copy stores the live chunks of condemned packs in new packs, as they are, and points
// the index there. Chunks that are elsewhere by now are left out. A copy that is
// damaged is condemned and told to bad, with its pack, and so is a pack that cannot be
// listed: Retire leaves those alone.
func (s *Store) Copy(ctx context.Context, ids []chunk.Digest, live func(*chunk.Digest) bool, bad func(pack chunk.Digest, err error)) (CopyStats, error) {
	l, err := s.newLooks(ctx)
	if err != nil {
		return CopyStats{}, err
	}
	c := &copier{s: s, looks: l, from: map[chunk.Digest]chunkindex.Location{}}
	defer c.close()
	for _, id := range ids {
		if !s.catalog.IsPackCondemned(id) {
			continue
		}
		err := c.pack(ctx, id, live)
		if isDamage(err) || errors.As(err, new(*damagedCopy)) {
			bad(id, err)
		} else if err != nil {
			return c.stats, fmt.Errorf("copy pack %s: %w", id, err)
		}
	}
	if c.open != nil {
		err = c.seal(ctx)
	}
	return c.stats, err
}

// Drain says of packs that all was copied out of them that anybody may need: from now on
// a read of what they have left is an alarm.
func (s *Store) Drain(ids []chunk.Digest) {
	for _, id := range ids {
		s.drained.add(id)
	}
}

// copier fills packs with chunks of others.
type copier struct {
	s     *Store
	looks *looks
	open  *openPack
	from  map[chunk.Digest]chunkindex.Location // of the chunks in open
	stats CopyStats
}

func (c *copier) close() {
	if c.open != nil {
		c.open.file.Close()
	}
}

// wanted returns the entries of a pack that are live and of which the index has no
// other copy. The caller has listed the pack.
func (s *Store) wanted(ctx context.Context, id chunk.Digest, entries []pack.Entry, live func(*chunk.Digest) bool) ([]pack.Entry, error) {
	var out []pack.Entry
	for batch := range slices.Chunk(entries, lookupBatch) {
		locs, found, err := s.lookupNow(ctx, digestsOf(batch))
		if err != nil {
			return nil, err
		}
		for i := range batch {
			e := batch[i]
			here := found[i] && locs[i] == chunkindex.At(id, e)
			nowhere := !found[i] && !s.catalog.IsCondemned(e.Digest, id, e.Off)
			if (here || nowhere) && live(&e.Digest) {
				out = append(out, e)
			}
		}
	}
	return out, nil
}

func (c *copier) pack(ctx context.Context, id chunk.Digest, live func(*chunk.Digest) bool) error {
	entries, _, err := c.s.entries(ctx, id)
	if err != nil {
		return err
	}
	entries, err = c.s.wanted(ctx, id, entries, live)
	if err != nil {
		return err
	}
	ws := make([]wanted, len(entries))
	for i, e := range entries {
		ws[i] = wanted{digest: e.Digest, loc: chunkindex.At(id, e)}
	}
	var bad error
	for _, r := range merged(ws) {
		off := r[0].loc.Off
		buf := make([]byte, end(r[len(r)-1].loc)-off)
		if err := c.s.bucket.ReadAt(ctx, pack.Key(id), buf, off); err != nil {
			return err
		}
		for _, w := range r {
			err := c.add(ctx, w, buf[w.loc.Off-off:][:w.loc.Stored])
			if errors.As(err, new(*damagedCopy)) {
				bad = err
			} else if err != nil {
				return err
			}
		}
	}
	return bad
}

// damagedCopy says that a chunk was not copied because its copy is damaged.
type damagedCopy struct{ err error }

func (e *damagedCopy) Error() string { return e.err.Error() }
func (e *damagedCopy) Unwrap() error { return e.err }

func (c *copier) add(ctx context.Context, w wanted, stored []byte) error {
	if _, err := verifyStored(nil, w.digest, w.loc, stored); err != nil {
		_, condemnErr := c.s.condemnDamaged(ctx, w.digest, w.loc, false)
		if condemnErr != nil {
			return condemnErr
		}
		return &damagedCopy{fmt.Errorf("chunk %s at %d: %w", w.digest, w.loc.Off, err)}
	}
	if _, twice := c.from[w.digest]; twice {
		return nil
	}
	if c.open == nil {
		if err := c.s.index.Room(); err != nil {
			return err
		}
		f, err := tempFile(c.s.cfg.TmpDir)
		if err != nil {
			return fmt.Errorf("begin pack in %s: %w", c.s.cfg.TmpDir, explain(err))
		}
		c.open = &openPack{pack.NewWriter(f), f}
	}
	if _, err := c.open.Add(w.digest, w.loc.Codec, w.loc.Len, stored); err != nil {
		return fmt.Errorf("write pack in %s: %w", c.s.cfg.TmpDir, explain(err))
	}
	c.from[w.digest] = w.loc
	c.stats.Chunks++
	c.stats.Bytes += int64(len(stored))
	if c.open.Size() < c.s.cfg.PackSize && c.open.Count() < pack.MaxCount-saltRoom {
		return nil
	}
	return c.seal(ctx)
}

// seal stores the open pack, in the order of every pack: object, journal, index.
func (c *copier) seal(ctx context.Context) error {
	id, size, err := c.open.Close()
	if err != nil {
		return fmt.Errorf("write pack in %s: %w", c.s.cfg.TmpDir, explain(err))
	}
	p, err := c.s.keep(ctx, c.looks, &sealed{c.open.file, id, size, c.open.Entries()}, func(p *sealed) error {
		return c.s.commitCopies(ctx, p, c.from)
	})
	if err != nil {
		return err
	}
	c.open, c.from = nil, map[chunk.Digest]chunkindex.Location{}
	c.stats.Packs++
	return p.file.Close()
}

// commitCopies is commit for copies: chunks that are no longer where they were copied
// from stay where they are.
func (s *Store) commitCopies(ctx context.Context, p *sealed, from map[chunk.Digest]chunkindex.Location) error {
	s.commits.Lock()
	defer s.commits.Unlock()
	if err := s.catalog.AddPack(ctx, p.id, p.size); err != nil {
		return err
	}
	var still []pack.Entry
	for batch := range slices.Chunk(p.entries, lookupBatch) {
		locs, found, err := s.lookupNow(ctx, digestsOf(batch))
		if err != nil {
			return err
		}
		for i, e := range batch {
			if was, copied := from[e.Digest]; !found[i] || copied && locs[i] == was {
				still = append(still, e)
			}
		}
	}
	return s.insertLocked(ctx, p.id, still)
}

// Retire takes those of the packs out of the catalog that are still condemned and in
// which no live chunk is: each is listed once more for that. It returns them. Their
// objects stay, and the index has their chunks until Forget.
func (s *Store) Retire(ctx context.Context, ids []chunk.Digest, live func(*chunk.Digest) bool) (retired []chunk.Digest, err error) {
	for _, id := range ids {
		entries, _, err := s.entries(ctx, id)
		if isDamage(err) {
			continue
		}
		if err != nil {
			return retired, err
		}
		done, err := s.retire(ctx, id, entries, live)
		if err != nil {
			return retired, fmt.Errorf("retire pack %s: %w", id, err)
		}
		if done {
			retired = append(retired, id)
		}
	}
	return retired, nil
}

func (s *Store) retire(ctx context.Context, id chunk.Digest, entries []pack.Entry, live func(*chunk.Digest) bool) (bool, error) {
	s.commits.Lock()
	defer s.commits.Unlock()
	if !s.catalog.IsPackCondemned(id) {
		return false, nil // stored anew
	}
	left, err := s.wanted(ctx, id, entries, live)
	if err != nil || len(left) > 0 {
		return false, err
	}
	return true, s.catalog.RetirePack(ctx, id)
}

// Forget removes from the index the packs that are not in the catalog.
func (s *Store) Forget(ctx context.Context) error {
	s.commits.Lock()
	defer s.commits.Unlock()
	return s.forgetLocked(ctx)
}

func (s *Store) forgetLocked(ctx context.Context) error {
	var gone []chunk.Digest
	for _, id := range s.index.AppliedPacks() {
		if !s.catalog.HasPack(id) {
			gone = append(gone, id)
			s.drained.remove(id)
			s.alarmed.remove(id)
		}
	}
	for some := range slices.Chunk(gone, forgetBatch) {
		if _, err := s.index.DropPacks(ctx, some); err != nil {
			return err
		}
	}
	return nil
}

// forgetBatch bounds the packs dropped at once: with 10 000 chunks in each the
// digests take 20 MiB.
const forgetBatch = 64

// DeletePack deletes the object of a pack that is not in the catalog, and reports
// whether it did. The journal says so before, for good: from then on a pack with the
// same bytes gets another id, because nobody can know when this deletion happens.
func (s *Store) DeletePack(ctx context.Context, id chunk.Digest) (bool, error) {
	deleted, err := s.burn(ctx, id)
	if err != nil || !deleted {
		return false, err
	}
	return true, s.bucket.Delete(ctx, pack.Key(id))
}

func (s *Store) burn(ctx context.Context, id chunk.Digest) (bool, error) {
	s.commits.Lock()
	defer s.commits.Unlock()
	if s.catalog.HasPack(id) {
		return false, nil // stored again since
	}
	return true, s.catalog.DeletePack(ctx, id)
}

// watch raises the alarm for a read of what gc has found to be needed by nobody: a
// reader without a lease, or a fault of gc. The right bytes are given all the same. A
// chunk that is elsewhere by now was copied after it had been looked up.
func (s *Store) watch(ctx context.Context, d, id chunk.Digest) {
	if s.drained.empty() || !s.drained.has(id) || !s.catalog.IsPackCondemned(id) {
		return
	}
	if locs, found, err := s.lookupNow(ctx, []chunk.Digest{d}); err != nil || !found[0] || locs[0].Pack != id {
		return
	}
	s.metrics.alarms.Inc()
	if s.alarmed.add(id) { // once a pack: whoever reads one chunk reads thousands
		s.log.ErrorContext(ctx, "alarm: a condemned chunk was read; its image has neither name nor lease", "chunk", d, "pack", id)
	}
}
