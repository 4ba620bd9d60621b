package converter

import (
	"context"
	"fmt"

	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/converter/proof"
	"quarry/converter/tree"
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
	c, recs, err := readSource(ctx, Config{ChunkSize: chunkSize}, source, oci.Config{Platform: p, Credentials: creds})
	if err != nil {
		return nil, err
	}
	return c.merge(recs)
}

// Remade is an image that was made of its source again, and stored nowhere.
type Remade struct {
	Statement image.Statement
	Bootstrap []byte
}

// Remake makes the image that Convert makes of a source, as SourceTree does, for
// whoever signs what another host has converted and believes none of it. Of cfg it
// uses ChunkSize, Limits, TmpDir and Progress; from says how the source is opened.
// Errors: *InputError, oci.ErrUnavailable, ctx's.
func Remake(ctx context.Context, cfg Config, source string, from oci.Config) (*Remade, error) {
	from.Limits, from.TmpDir = cfg.Limits.Layer, cfg.TmpDir
	c, recs, err := readSource(ctx, cfg, source, from)
	if err != nil {
		return nil, err
	}
	boot, treeDigest, err := c.bootstrap(recs)
	if err != nil {
		return nil, err
	}
	makeRoom(int64(len(boot)))
	im, err := rafs.Decode(boot)
	if err != nil {
		return nil, fmt.Errorf("read the bootstrap back: %w", err)
	}
	if got := tree.Digest(im.Tree); got != treeDigest {
		return nil, fmt.Errorf("%w: its tree digest is %s, want %s", proof.ErrTree, got, treeDigest)
	}
	return &Remade{c.statement(boot, treeDigest, im), boot}, nil
}

// readSource reads and verifies the layers of a source without a store.
func readSource(ctx context.Context, cfg Config, source string, from oci.Config) (*conversion, []*image.LayerRecord, error) {
	im, err := oci.Open(ctx, source, from)
	if err != nil {
		return nil, nil, inputError(ctx, err)
	}
	defer im.Close()
	c := &conversion{cfg: cfg, image: im}
	recs := make([]*image.LayerRecord, len(im.Layers))
	for i, l := range im.Layers {
		if recs[i], err = c.hashLayer(ctx, i); err != nil {
			return nil, nil, inputError(ctx, fmt.Errorf("layer %d of %d, %s: %w", i+1, len(im.Layers), l.Digest, err))
		}
		if err := c.compare(i, recs[i]); err != nil {
			return nil, nil, err
		}
	}
	return c, recs, nil
}

func (c *conversion) hashLayer(ctx context.Context, i int) (*image.LayerRecord, error) {
	r, err := c.image.LayerReader(ctx, i)
	if err != nil {
		return nil, err
	}
	defer r.Close() // it was only read
	l := c.image.Layers[i]
	event := Event{Layer: i + 1, Layers: len(c.image.Layers), Digest: l.Digest, Size: l.Size}
	return layer.Read(ctx, r, layer.Descriptor{Digest: l.Digest, Size: l.Size}, hasher{}, layer.Config{
		ChunkSize: c.cfg.ChunkSize, Limits: c.cfg.Limits.Layer, Charge: c.charge(i, 1),
		Progress: func(n int64) { event.Read = n; c.progress(event) },
	})
}

// hasher is a store.Putter that keeps nothing.
type hasher struct{}

var _ store.Putter = hasher{}

// Put implements store.Putter.
func (hasher) Put(_ context.Context, p []byte) (chunk.Digest, error) { return chunk.Sum(p), nil }
