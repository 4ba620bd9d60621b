package oci

import (
	"context"

	"quarry/store/chunk"
	"quarry/store/image"
)

// LayersOf returns the digests of the config and the layers of a pushed image, for one
// platform; the zero value is as in Platforms.
func LayersOf(ctx context.Context, c Content, source chunk.Digest, p image.Platform) (config chunk.Digest, layers []chunk.Digest, err error) {
	im, err := OpenContent(ctx, c, source, Config{Platform: p})
	if err != nil {
		return chunk.Digest{}, nil, err
	}
	defer im.Close() // it was only read
	for _, l := range im.Layers {
		layers = append(layers, l.Digest)
	}
	return im.ConfigDigest, layers, nil
}
