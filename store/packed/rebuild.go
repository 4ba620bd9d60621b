package packed

import (
	"context"
	"fmt"

	"quarry/store/chunk"
)

// RebuildStats says what the index has after a Rebuild.
type RebuildStats struct {
	Packs, Chunks int64
}

// Rebuild makes the index anew from the journal and the packs: from their
// footers, or from the records where a footer is damaged. Copies that are condemned
// are read, and those that are good again are taken in. Look-ups and other
// rebuilds wait for it. Packs that are damaged or missing are told to report,
// which may be nil, and do not end it: one that comes back is taken in when its
// chunks are asked for. When it is stopped, the next Open finishes it.
func (s *Store) Rebuild(ctx context.Context, report func(Problem)) (RebuildStats, error) {
	s.upkeep.Lock()
	defer s.upkeep.Unlock()
	s.commits.Lock()
	defer s.commits.Unlock()
	if !s.cfg.ReadOnly {
		if err := s.liftAllLocked(ctx); err != nil {
			return RebuildStats{}, fmt.Errorf("rebuild chunk index: %w", err)
		}
	}
	s.rebuilding.Lock()
	defer s.rebuilding.Unlock()
	st, err := s.rebuildLocked(ctx, report)
	if err != nil {
		return RebuildStats{}, fmt.Errorf("rebuild chunk index: %w", err)
	}
	return st, nil
}

// liftAllLocked is liftLocked for every pack with condemned copies.
func (s *Store) liftAllLocked(ctx context.Context) error {
	condemned := map[chunk.Digest]bool{}
	for _, cc := range s.catalog.Condemned() {
		condemned[cc.Pack] = true
	}
	for _, p := range s.catalog.Packs() {
		if !condemned[p.ID] {
			continue
		}
		entries, _, err := s.entries(ctx, p.ID)
		if err != nil && !isDamage(err) {
			return err
		}
		if _, err := s.liftLocked(ctx, p, entries); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) rebuildLocked(ctx context.Context, report func(Problem)) (st RebuildStats, err error) {
	if err := s.index.Reset(ctx); err != nil {
		return st, err
	}
	for _, p := range s.catalog.Packs() {
		err := s.applyPack(ctx, p.ID)
		if err != nil && !isDamage(err) {
			return st, err
		}
		if err != nil && report != nil {
			report(Problem{Kind: PackDamaged, Pack: p.ID, Err: err, Action: None})
		}
	}
	st.Packs = int64(len(s.index.AppliedPacks()))
	for _, err := range s.index.All(ctx) {
		if err != nil {
			return st, err
		}
		st.Chunks++
	}
	return st, nil
}
