package oci

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"quarry/store/chunk"
	"quarry/store/image"
)

// Listed returns the platforms of the images that an image index lists, and the digest of
// the index; none for a source that is one image. With want they are those of want that it
// lists, as Platforms returns them. Errors: those of Open.
func Listed(ctx context.Context, src string, cfg Config, want []image.Platform) (source chunk.Digest, list []image.Platform, err error) {
	if err := CheckSource(src); err != nil {
		return chunk.Digest{}, nil, err
	}
	scheme, rest, _ := strings.Cut(src, ":")
	b, err := schemes[scheme](ctx, rest, cfg.withDefaults())
	if err == nil {
		source, list, err = listed(ctx, b, cfg.Platform, want)
		err = errors.Join(err, b.Close())
	}
	if err != nil {
		return chunk.Digest{}, nil, fmt.Errorf("source %s: %w", src, err)
	}
	return source, list, nil
}

func listed(ctx context.Context, b blobs, here image.Platform, want []image.Platform) (source chunk.Digest, list []image.Platform, err error) {
	top, err := b.top(ctx)
	if err != nil {
		return source, nil, err
	}
	p := &picker{blobs: b, want: here}
	doc, source, err := p.read(ctx, top)
	if err != nil || !doc.isIndex() {
		return source, nil, err
	}
	if len(want) > 0 {
		list, err = indexPlatforms(ctx, b, source, doc, want)
		return source, slices.DeleteFunc(list, func(p image.Platform) bool { return p == image.Platform{} }), err
	}
	if err := p.walk(ctx, doc, 1); err != nil {
		return source, nil, err
	}
	for _, c := range p.found {
		if !slices.Contains(list, c.platform) {
			list = append(list, c.platform)
		}
	}
	return source, list, nil
}
