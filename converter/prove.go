package converter

import (
	"context"
	"errors"
	"fmt"
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
	fresh := sync.OnceValue(c.takeFresh)
	res, err := proof.Run(ctx, proof.Config{
		Bootstrap: boot, Tree: treeDigest, Chunks: stored{c.cfg.Store},
		Read: func(d chunk.Digest) bool {
			return fresh().used(d) || c.doubted
		},
	})
	var bad *proof.ContentError
	if errors.As(err, &bad) {
		err = c.condemn(ctx, bad)
	}
	if err == nil {
		err = c.readHidden(ctx, fresh())
	}
	if err != nil {
		return nil, err
	}
	c.cfg.Log.InfoContext(ctx, "image proved", "source", c.image.Source, "chunks", res.Chunks, "bytes", res.Bytes)
	return res.Image, nil
}

// freshChunks are the distinct chunks that a conversion has stored, in the order
// of the packs.
type freshChunks struct {
	digests []chunk.Digest
	numbers *chunk.Numbers
	inTree  []bool
}

// takeFresh returns the chunks that this conversion has stored, and forgets them.
func (c *conversion) takeFresh() *freshChunks {
	f := &freshChunks{}
	if len(c.fresh) == 1 {
		f.digests = c.fresh[0]
	} else {
		f.digests = slices.Concat(c.fresh...)
	}
	c.fresh = nil
	f.numbers = chunk.NewNumbers(len(f.digests), func(n uint32) *chunk.Digest { return &f.digests[n] })
	n := 0
	for _, d := range f.digests { // layers read at the same time can have stored the same
		if _, twice := f.numbers.Find(&d); twice {
			continue
		}
		f.digests[n] = d
		f.numbers.Add(&f.digests[n])
		n++
	}
	f.digests, f.inTree = f.digests[:n], make([]bool, n)
	return f
}

// used marks the chunk as one that a file of the image has, and reports whether
// it is fresh.
func (f *freshChunks) used(d chunk.Digest) bool {
	n, ok := f.numbers.Find(&d)
	if ok {
		f.inTree[n] = true
	}
	return ok
}

// hidden yields the chunks that no file of the image has.
func (f *freshChunks) hidden(yield func(chunk.Digest) bool) {
	for i, d := range f.digests {
		if !f.inTree[i] && !yield(d) {
			return
		}
	}
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
func (c *conversion) readHidden(ctx context.Context, fresh *freshChunks) error {
	for batch := range slices.Chunk(slices.Collect(fresh.hidden), hiddenBatch) {
		err := c.cfg.Store.GetBatch(ctx, batch, func(_ chunk.Digest, _ []byte, err error) error { return err })
		if err != nil {
			return err
		}
	}
	return nil
}
