package packed

import (
	"context"
	"fmt"
)

// Rebuild makes the index anew from the journal and the packs: from their
// footers, or from the records where a footer is damaged. Look-ups wait for it.
// Packs that are damaged or missing are told to report, which may be nil, and
// do not end it. When it is stopped, the next Open finishes it.
func (s *Store) Rebuild(ctx context.Context, report func(Problem)) error {
	s.upkeep.Lock()
	defer s.upkeep.Unlock()
	s.commits.Lock()
	defer s.commits.Unlock()
	s.rebuilding.Lock()
	defer s.rebuilding.Unlock()
	if err := s.index.Reset(ctx); err != nil {
		return err
	}
	for _, p := range s.catalog.Packs() {
		err := s.applyPack(ctx, p.ID)
		if err != nil && !isDamage(err) {
			return fmt.Errorf("rebuild chunk index: %w", err)
		}
		if err != nil && report != nil {
			report(Problem{Kind: PackDamaged, Pack: p.ID, Err: err, Action: None})
		}
	}
	return nil
}
