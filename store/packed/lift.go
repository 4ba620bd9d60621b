package packed

import (
	"context"

	"quarry/chunkindex"
	"quarry/store/catalog"
	"quarry/store/pack"
)

// lift ends the condemnation of the copies in a pack that are good: somebody put
// the right bytes back, or the bucket gave wrong ones for a time. entries are the
// pack's. It returns how many copies stay condemned.
func (s *Store) lift(ctx context.Context, p catalog.Pack, entries []pack.Entry) (left int, err error) {
	s.commits.Lock()
	defer s.commits.Unlock()
	return s.liftLocked(ctx, p, entries)
}

// liftLocked is lift for a holder of commits. The journal can only lift all of a
// pack, so those that stay are condemned again: after a crash in between, the next
// read of each does that.
func (s *Store) liftLocked(ctx context.Context, p catalog.Pack, entries []pack.Entry) (left int, err error) {
	condemned := s.catalog.CondemnedIn(p.ID)
	stay := make(map[catalog.CondemnedChunk]bool, len(condemned))
	for _, cc := range condemned {
		stay[cc] = true
	}
	var good []pack.Entry
	for _, e := range entries {
		cc := catalog.CondemnedChunk{Digest: e.Digest, Pack: p.ID, Off: e.Off}
		if !stay[cc] {
			continue
		}
		stored := make([]byte, e.Stored)
		if err := s.bucket.ReadAt(ctx, pack.Key(p.ID), stored, e.Off); err != nil {
			if isDamage(err) {
				continue
			}
			return 0, err
		}
		if _, err := verifyStored(nil, e.Digest, chunkindex.At(p.ID, e), stored); err == nil {
			delete(stay, cc)
			good = append(good, e)
		}
	}
	if len(good) == 0 {
		return len(stay), nil
	}
	if err := s.catalog.AddPack(ctx, p.ID, p.Size); err != nil {
		return 0, err
	}
	for _, cc := range condemned {
		if !stay[cc] {
			continue
		}
		if err := s.catalog.Condemn(ctx, cc); err != nil {
			return 0, err
		}
	}
	s.log.InfoContext(ctx, "condemned chunks are good again", "pack", p.ID, "chunks", len(good), "left", len(stay))
	if s.late.has(p.ID) {
		return len(stay), nil // taken in with the rest of the pack
	}
	return len(stay), s.addLocked(ctx, p.ID, good)
}
