package converter

import (
	"context"
	"fmt"

	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

// SourceTree returns the tree that Convert would make of a source, without a
// store: every layer is read and verified, and its content hashed and dropped. A
// registry is shown the credentials that this user has for it.
// Errors: *InputError, oci.ErrUnavailable, ctx's.
func SourceTree(ctx context.Context, source string, p image.Platform, chunkSize uint32) (*rafs.Tree, error) {
	creds, err := oci.UserCredentials(ctx, source)
	if err != nil {
		return nil, inputError(ctx, err)
	}
	im, err := oci.Open(ctx, source, oci.Config{Platform: p, Credentials: creds})
	if err != nil {
		return nil, inputError(ctx, err)
	}
	defer im.Close()
	c := &conversion{cfg: Config{ChunkSize: chunkSize}, image: im}
	recs := make([]*image.LayerRecord, len(im.Layers))
	for i, l := range im.Layers {
		if recs[i], err = hashLayer(ctx, im, i, chunkSize, c.charge(i, 1)); err != nil {
			return nil, inputError(ctx, fmt.Errorf("layer %d of %d, %s: %w", i+1, len(im.Layers), l.Digest, err))
		}
		if err := c.compare(i, recs[i]); err != nil {
			return nil, err
		}
	}
	return c.merge(recs)
}

func hashLayer(ctx context.Context, im *oci.Image, i int, chunkSize uint32, charge func(int64) error) (*image.LayerRecord, error) {
	r, err := im.LayerReader(ctx, i)
	if err != nil {
		return nil, err
	}
	defer r.Close() // it was only read
	l := im.Layers[i]
	return layer.Read(ctx, r, layer.Descriptor{Digest: l.Digest, Size: l.Size}, hasher{}, layer.Config{ChunkSize: chunkSize, Charge: charge})
}

// hasher is a store.Putter that keeps nothing.
type hasher struct{}

var _ store.Putter = hasher{}

// Put implements store.Putter.
func (hasher) Put(_ context.Context, p []byte) (chunk.Digest, error) { return chunk.Sum(p), nil }
