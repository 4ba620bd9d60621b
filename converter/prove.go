package converter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"quarry/converter/proof"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/pack"
	"quarry/store/packed"
)

// prove reads the image back through the device that a worker mounts: its tree
// from the encoded bootstrap, and the content of every chunk that this
// conversion has stored. Chunks that were there before have been proved by the
// conversion that stored them, unless the last one of this name did not end
// well: then all are read.
func (c *conversion) prove(ctx context.Context, boot []byte, treeDigest chunk.Digest) (*rafs.Image, error) {
	// Made when the bootstrap is decoded, which takes the most memory.
	hidden := sync.OnceValue(c.takeFresh)
	res, err := proof.Run(ctx, proof.Config{
		Bootstrap: boot, Tree: treeDigest, Chunks: stored{c.cfg.Store},
		Read: func(d chunk.Digest) bool {
			_, isFresh := hidden()[d]
			delete(hidden(), d)
			return isFresh || c.doubted
		},
	})
	var bad *proof.ContentError
	if errors.As(err, &bad) {
		err = c.condemn(ctx, bad)
	}
	if err == nil {
		err = c.readHidden(ctx, hidden())
	}
	if err != nil {
		return nil, err
	}
	c.cfg.Log.InfoContext(ctx, "image proved", "source", c.image.Source, "chunks", res.Chunks, "bytes", res.Bytes)
	return res.Image, nil
}

// takeFresh returns the chunks that this conversion has stored, and forgets them.
func (c *conversion) takeFresh() map[chunk.Digest]struct{} {
	set := map[chunk.Digest]struct{}{}
	for _, ds := range c.fresh {
		for _, d := range ds {
			set[d] = struct{}{}
		}
	}
	c.fresh = nil
	return set
}

// condemn has the store verify its copy of a chunk that the device gave wrongly,
// which takes a damaged one out of use, so that the next conversion stores it
// anew. The store's word on it is the better reason, when it has one.
func (c *conversion) condemn(ctx context.Context, bad *proof.ContentError) error {
	_, err := c.cfg.Store.Get(ctx, bad.Chunk, nil)
	if errors.As(err, new(*store.CorruptError)) {
		bad.Err = err
	}
	return bad
}

// stored gives chunks as a store node and its client do together: the stored
// bytes checked and decompressed. Their digest is left to the proof, which
// compares it with what comes out of the device: once at the end is worth more
// than twice on the way.
type stored struct{ s *packed.Store }

var _ store.BatchGetter = stored{}

// GetBatch implements store.BatchGetter but for the digest.
func (g stored) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	var plain []byte
	return g.s.StoredBatch(ctx, ds, func(d chunk.Digest, st packed.Stored, err error) error {
		if err != nil {
			return fn(d, nil, err)
		}
		p, err := pack.Decode(plain, st.Codec, st.Bytes, st.Len)
		if err != nil {
			return fn(d, nil, fmt.Errorf("decompress: %w", err))
		}
		plain = p
		return fn(d, p, nil)
	})
}

// hiddenBatch is how many chunks are read at once that no file of the image has.
const hiddenBatch = 64

// readHidden reads the new chunks of files that upper layers hide: no device
// holds them, but the next image with their layer counts on them.
func (c *conversion) readHidden(ctx context.Context, hidden map[chunk.Digest]struct{}) error {
	ds := slices.SortedFunc(maps.Keys(hidden), func(a, b chunk.Digest) int { return bytes.Compare(a[:], b[:]) })
	for batch := range slices.Chunk(ds, hiddenBatch) {
		err := c.cfg.Store.GetBatch(ctx, batch, func(_ chunk.Digest, _ []byte, err error) error { return err })
		if err != nil {
			return err
		}
	}
	return nil
}
