package oci

import (
	"context"
	"errors"
	"fmt"
	"io"

	"quarry/store/chunk"
)

// ErrNoBlob says that a source does not have what was asked for.
var ErrNoBlob = errors.New("blob is missing from the source")

// kind tells documents from what they name: a registry keeps them apart.
type kind string

const (
	kindManifest kind = "manifests" // as in a registry's paths
	kindBlob     kind = "blobs"
)

// blobs is where the documents and layers of a source are read.
type blobs interface {
	// top describes the image or image index that the source's reference names.
	top(ctx context.Context) (descriptor, error)
	// open returns the bytes of a digest, unverified, and their number, or -1
	// when the source does not tell. Errors: ErrNoBlob. ctx ends the reading too.
	open(ctx context.Context, k kind, d chunk.Digest) (io.ReadCloser, int64, error)
	io.Closer
}

// readVerified reads the document that d describes and compares size and digest.
func readVerified(ctx context.Context, b blobs, k kind, d descriptor, limit int64) ([]byte, error) {
	want, err := digestOf(d)
	if err != nil {
		return nil, err
	}
	r, size, err := b.open(ctx, k, want)
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w", want, err)
	}
	p, err := readLimited(r, size, limit)
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w", want, err)
	}
	if int64(len(p)) != d.Size {
		return nil, fmt.Errorf("blob %s has %d bytes, its descriptor says %d", want, len(p), d.Size)
	}
	if got := chunk.Sum(p); got != want {
		return nil, fmt.Errorf("blob %s is damaged: its content has digest %s", want, got)
	}
	return p, nil
}

// readLimited reads r whole and closes it. What says that it has more than limit
// bytes is refused unread; size is -1 when it says nothing.
func readLimited(r io.ReadCloser, size, limit int64) ([]byte, error) {
	defer r.Close()
	if size > limit {
		return nil, &permanentError{fmt.Errorf("%d bytes, at most %d are read", size, limit)}
	}
	if size >= 0 {
		p := make([]byte, size)
		_, err := io.ReadFull(r, p)
		return p, err
	}
	p, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(p)) > limit {
		err = &permanentError{fmt.Errorf("more than the %d bytes that are read", limit)}
	}
	return p, err
}
