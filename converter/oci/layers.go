package oci

import (
	"context"

	"quarry/store/chunk"
	"quarry/store/image"
)

// LayersOf returns the digests of the layers of a pushed image, for one platform;
// the zero value is as in Platforms.
func LayersOf(ctx context.Context, c Content, source chunk.Digest, p image.Platform) ([]chunk.Digest, error) {
	im, err := OpenContent(ctx, c, source, Config{Platform: p})
	if err != nil {
		return nil, err
	}
	defer im.Close() // it was only read
	var ds []chunk.Digest
	for _, l := range im.Layers {
		ds = append(ds, l.Digest)
	}
	return ds, nil
}
