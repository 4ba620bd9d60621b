package packed

import (
	"context"
	"fmt"

	"quarry/store"
	"quarry/store/catalog"
	"quarry/store/chunk"
)

// maxDamaged bounds the damaged copies that a store that is only read keeps in mind,
// at 72 bytes each.
const maxDamaged = 1 << 16

// Follow takes in what the writer of the store has appended to the journal: packs
// that it added or retired, copies that it condemned. Only for a store that is
// ReadOnly. It calls left, which may be nil, with how many entries are known to be ahead, and
// returns false when there may be more than those. The errors are those of
// catalog.CatchUp; what was applied before an error stays.
func (s *Store) Follow(ctx context.Context, left func(int)) (whole bool, err error) {
	if !s.cfg.ReadOnly {
		return false, fmt.Errorf("follow the journal: this store writes it")
	}
	s.commits.Lock()
	defer s.commits.Unlock()
	if s.behind {
		if err := s.reconcileLocked(ctx); err != nil {
			return false, err
		}
		s.behind = false
	}
	return s.catalog.CatchUp(ctx, func(e catalog.Entry, n int) error {
		if left != nil {
			left(n)
		}
		err := s.follow(ctx, e)
		s.behind = s.behind || err != nil // the catalog has the entry, the index not
		return err
	})
}

// follow makes the index follow on one entry. The caller holds commits.
func (s *Store) follow(ctx context.Context, e catalog.Entry) error {
	switch e := e.(type) {
	case catalog.Pack:
		s.forgetDamaged(func(cc catalog.CondemnedChunk) bool { return cc.Pack == e.ID })
		if !s.index.PackApplied(e.ID) {
			return s.applyListed(ctx, e.ID)
		}
		return s.applyAgain(ctx, e.ID)
	case catalog.PackRetired:
		s.forgetDamaged(func(cc catalog.CondemnedChunk) bool { return cc.Pack == e.ID })
		s.late.remove(e.ID)
		s.broken.remove(e.ID)
		_, err := s.index.DropPack(ctx, e.ID)
		return err
	case catalog.CondemnedChunk:
		s.forgetDamaged(func(cc catalog.CondemnedChunk) bool { return cc == e })
		return s.dropCopies(ctx, []catalog.CondemnedChunk{e})
	}
	return nil
}

// applyAgain puts the chunks of a pack into the index that is there already, but may
// lack some that were condemned once. The caller holds commits.
func (s *Store) applyAgain(ctx context.Context, id chunk.Digest) error {
	if !s.index.PackApplied(id) {
		return nil // it is late, and taken in as a whole
	}
	entries, _, err := s.entries(ctx, id)
	if err != nil && !isDamage(err) {
		return err
	}
	return s.addLocked(ctx, id, entries)
}

// noteDamaged keeps a damaged copy in mind, and reports whether it is new. The writer,
// who finds it by a read or a check of its own, condemns it.
func (s *Store) noteDamaged(cc catalog.CondemnedChunk) bool {
	s.damagedMu.Lock()
	defer s.damagedMu.Unlock()
	if _, known := s.damagedHere[cc]; known || len(s.damagedHere) >= maxDamaged {
		return false
	}
	s.damagedHere[cc] = struct{}{}
	s.metrics.damagedHere.Set(float64(len(s.damagedHere)))
	return true
}

func (s *Store) forgetDamaged(match func(catalog.CondemnedChunk) bool) {
	s.damagedMu.Lock()
	defer s.damagedMu.Unlock()
	for cc := range s.damagedHere {
		if match(cc) {
			delete(s.damagedHere, cc)
		}
	}
	s.metrics.damagedHere.Set(float64(len(s.damagedHere)))
}

// writable is the error of what would change the store.
func (s *Store) writable(what string) error {
	if s.cfg.ReadOnly {
		return fmt.Errorf("%s: %w", what, store.ErrReadOnly)
	}
	return nil
}
