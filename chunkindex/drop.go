package chunkindex

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"quarry/store/chunk"
)

// DropPack is DropPacks for one.
func (x *Index) DropPack(ctx context.Context, id chunk.Digest) (int, error) {
	return x.DropPacks(ctx, []chunk.Digest{id})
}

// DropPacks removes every chunk that is in one of the packs and the marks that they
// were applied, and returns how many chunks it were. It reads the whole index once,
// while others use it; the caller sees to it that nothing is inserted for these packs
// meanwhile.
func (x *Index) DropPacks(ctx context.Context, ids []chunk.Digest) (int, error) {
	drop := make(map[chunk.Digest]bool, len(ids))
	for _, id := range ids {
		if x.PackApplied(id) {
			drop[id] = true
		}
	}
	if len(drop) == 0 {
		x.mu.RLock()
		defer x.mu.RUnlock()
		return 0, x.usable(ctx)
	}
	var in []chunk.Digest
	for r, err := range x.All(ctx) {
		if err != nil {
			return 0, fmt.Errorf("drop %d packs: %w", len(ids), err)
		}
		if drop[r.Pack] {
			in = append(in, r.Digest)
		}
	}
	dropped := 0
	err := x.change(ctx, func(b *pebble.Batch) error {
		locs, found, err := x.lookupBatch(in)
		if err != nil {
			return err
		}
		for i, d := range in {
			if !found[i] || !drop[locs[i].Pack] {
				continue
			}
			dropped++
			if err := b.Delete(chunkKey(d), nil); err != nil {
				return err
			}
		}
		for id := range drop {
			n, known := x.packs.numbers[id]
			if !known {
				continue
			}
			if err := errors.Join(b.Delete(packKey(n), nil), b.Delete(digestsKey(n), nil)); err != nil {
				return err
			}
		}
		return x.endWhole(b)
	}, func() {
		x.removed()
		for id := range drop {
			if _, known := x.packs.numbers[id]; known {
				x.packs.remove(id)
			}
		}
	})
	if err != nil {
		return 0, fmt.Errorf("drop %d packs: %w", len(ids), err)
	}
	return dropped, nil
}
