package packed

import (
	"context"
	"iter"

	"quarry/chunkindex"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// Index is what a store needs of its chunk index; chunkindex.Index says what each
// method does. chunkindex/mem is the other implementation, for simulations.
type Index interface {
	LookupBatch(ctx context.Context, ds []chunk.Digest) ([]chunkindex.Location, []bool, error)
	HasBatch(ctx context.Context, ds []chunk.Digest) (found []bool, in []chunk.Digest, err error)
	InsertBatch(ctx context.Context, id chunk.Digest, entries []pack.Entry) error
	DeleteIf(ctx context.Context, d chunk.Digest, loc chunkindex.Location) (bool, error)
	DropPack(ctx context.Context, id chunk.Digest) (int, error)
	DropPacks(ctx context.Context, ids []chunk.Digest) (int, error)
	PackApplied(id chunk.Digest) bool
	AppliedPacks() []chunk.Digest
	All(ctx context.Context) iter.Seq2[chunkindex.Record, error]
	Reset(ctx context.Context) error
	Room() error
}

var _ Index = (*chunkindex.Index)(nil)
