// Package mem keeps a chunk index in memory, for simulations that open thousands of
// stores. Every change is there at once or not at all, as a synced commit is.
package mem

import (
	"bytes"
	"context"
	"iter"
	"maps"
	"slices"
	"sync"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
)

// Index is a packed.Index in memory.
type Index struct {
	mu     sync.Mutex // guards what follows
	chunks map[chunk.Digest]chunkindex.Location
	packs  map[chunk.Digest]bool
}

var _ packed.Index = (*Index)(nil)

// New returns an empty index.
func New() *Index {
	return &Index{chunks: map[chunk.Digest]chunkindex.Location{}, packs: map[chunk.Digest]bool{}}
}

// Clone returns a copy, which is what a crash leaves.
func (x *Index) Clone() *Index {
	x.mu.Lock()
	defer x.mu.Unlock()
	return &Index{chunks: maps.Clone(x.chunks), packs: maps.Clone(x.packs)}
}

// LookupBatch implements packed.Index.
func (x *Index) LookupBatch(ctx context.Context, ds []chunk.Digest) ([]chunkindex.Location, []bool, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	locs, found := make([]chunkindex.Location, len(ds)), make([]bool, len(ds))
	for i, d := range ds {
		locs[i], found[i] = x.chunks[d]
	}
	return locs, found, ctx.Err()
}

// HasBatch implements packed.Index.
func (x *Index) HasBatch(ctx context.Context, ds []chunk.Digest) (found []bool, in []chunk.Digest, err error) {
	locs, found, err := x.LookupBatch(ctx, ds)
	for i, loc := range locs {
		if found[i] && !slices.Contains(in, loc.Pack) {
			in = append(in, loc.Pack)
		}
	}
	return found, in, err
}

// InsertBatch implements packed.Index.
func (x *Index) InsertBatch(ctx context.Context, id chunk.Digest, entries []pack.Entry) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	x.packs[id] = true
	for _, e := range entries {
		x.chunks[e.Digest] = chunkindex.At(id, e)
	}
	return nil
}

// DeleteIf implements packed.Index.
func (x *Index) DeleteIf(ctx context.Context, d chunk.Digest, loc chunkindex.Location) (bool, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if got, ok := x.chunks[d]; !ok || got != loc || ctx.Err() != nil {
		return false, ctx.Err()
	}
	delete(x.chunks, d)
	return true, nil
}

// DropPack implements packed.Index.
func (x *Index) DropPack(ctx context.Context, id chunk.Digest) (int, error) {
	return x.DropPacks(ctx, []chunk.Digest{id})
}

// DropPacks implements packed.Index.
func (x *Index) DropPacks(ctx context.Context, ids []chunk.Digest) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	before := len(x.chunks)
	maps.DeleteFunc(x.chunks, func(_ chunk.Digest, loc chunkindex.Location) bool { return slices.Contains(ids, loc.Pack) })
	for _, id := range ids {
		delete(x.packs, id)
	}
	return before - len(x.chunks), nil
}

// PackApplied implements packed.Index.
func (x *Index) PackApplied(id chunk.Digest) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.packs[id]
}

// AppliedPacks implements packed.Index.
func (x *Index) AppliedPacks() []chunk.Digest {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.SortedFunc(maps.Keys(x.packs), compare)
}

// All implements packed.Index.
func (x *Index) All(ctx context.Context) iter.Seq2[chunkindex.Record, error] {
	return func(yield func(chunkindex.Record, error) bool) {
		chunks := x.Clone().chunks
		for _, d := range slices.SortedFunc(maps.Keys(chunks), compare) {
			if err := ctx.Err(); err != nil {
				yield(chunkindex.Record{}, err)
				return
			}
			if !yield(chunkindex.Record{Digest: d, Location: chunks[d]}, nil) {
				return
			}
		}
	}
}

// Reset implements packed.Index.
func (x *Index) Reset(ctx context.Context) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	clear(x.chunks)
	clear(x.packs)
	return ctx.Err()
}

// Room implements packed.Index.
func (x *Index) Room() error { return nil }

func compare(a, b chunk.Digest) int { return bytes.Compare(a[:], b[:]) }
