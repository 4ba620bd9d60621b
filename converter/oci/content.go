package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"quarry/store/chunk"
	"quarry/store/image"
)

// Content is where a store keeps the manifests and blobs that were pushed to it.
// Safe for concurrent use.
type Content interface {
	// Open returns the bytes of a manifest or blob, and their number. What is read
	// of an image is verified here whether the reader does so or not. Errors:
	// ErrNoBlob; any other, and those of reading, are the store's fault. ctx ends
	// the reading too.
	Open(ctx context.Context, d chunk.Digest) (io.ReadCloser, int64, error)
}

// ErrContent says that a Content could not be read, which is no fault of the
// image and may pass.
var ErrContent = errors.New("what was pushed cannot be read back")

// OpenContent opens an image that was pushed: source is the digest of its manifest
// or image index.
func OpenContent(ctx context.Context, c Content, source chunk.Digest, cfg Config) (*Image, error) {
	im, err := load(ctx, &pushed{c, source}, cfg.Platform)
	if err != nil {
		return nil, fmt.Errorf("source %s: %w", source, err)
	}
	return im, nil
}

// Platforms returns for which platforms a pushed source is to be converted. One
// manifest: the zero value, which means the one it is for. An image index: for
// each of want the image that suits it best. None: the source is an artifact, or an
// index that has no images. The zero value is also what a source gets that cannot
// be understood, or suits none of want: its conversion says why. Errors: ErrContent,
// ctx's.
func Platforms(ctx context.Context, c Content, source chunk.Digest, want []image.Platform) ([]image.Platform, error) {
	b := &pushed{c, source}
	var doc *document
	top, err := b.top(ctx)
	if err == nil {
		doc, _, err = (&picker{blobs: b}).read(ctx, top)
	}
	switch {
	case errors.Is(err, ErrContent), ctx.Err() != nil:
		return nil, fmt.Errorf("source %s: %w", source, err)
	case err != nil:
		return []image.Platform{{}}, nil
	case doc.isIndex():
		return indexPlatforms(ctx, b, source, doc, want)
	case !doc.Config.MediaType.IsConfig():
		return nil, nil
	}
	return []image.Platform{{}}, nil
}

func indexPlatforms(ctx context.Context, b blobs, source chunk.Digest, index *document, want []image.Platform) ([]image.Platform, error) {
	var list []image.Platform
	images := false
	for _, w := range want {
		p := &picker{blobs: b, want: w}
		err := p.walk(ctx, index, 1)
		if errors.Is(err, ErrContent) || ctx.Err() != nil {
			return nil, fmt.Errorf("source %s: %w", source, err)
		}
		images = images || len(p.found) > 0
		if err != nil {
			list = append(list, w) // such as a manifest that is missing: the conversion says so
			continue
		}
		if best, err := p.best(source); err == nil && !slices.Contains(list, best.platform) {
			list = append(list, best.platform)
		}
	}
	if len(list) == 0 && images {
		list = append(list, image.Platform{})
	}
	return list, nil
}

// pushed is a source in a Content.
type pushed struct {
	content Content
	source  chunk.Digest
}

var _ blobs = (*pushed)(nil)

func (p *pushed) top(ctx context.Context) (descriptor, error) {
	r, size, err := p.open(ctx, kindManifest, p.source)
	if err != nil {
		return descriptor{}, fmt.Errorf("manifest: %w", err)
	}
	return descriptor{Digest: hash(p.source), Size: size}, r.Close()
}

func (p *pushed) open(ctx context.Context, _ kind, d chunk.Digest) (io.ReadCloser, int64, error) {
	r, size, err := p.content.Open(ctx, d)
	if err != nil && !errors.Is(err, ErrNoBlob) {
		err = fmt.Errorf("%w: %w", ErrContent, err)
	}
	if err != nil {
		return nil, 0, err
	}
	return &contentReader{r}, size, nil
}

func (p *pushed) Close() error { return nil }

// contentReader marks the errors of reading.
type contentReader struct{ io.ReadCloser }

// Read implements io.Reader.
func (r *contentReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: %w", ErrContent, err)
	}
	return n, err
}
