package registry

import (
	"context"
	"errors"
	"fmt"

	"github.com/opencontainers/go-digest"

	"quarry/store/bucket"
)

// CheckWhole finds out whether a manifest that StatManifest has found is there with
// all that it names, and its children too: who is told so pushes none of it. No blob is
// read, and no more than MaxReferences are looked for. An error that AsUnknown knows
// says that something is missing or damaged.
func (s *Store) CheckWhole(ctx context.Context, repo string, m Manifest) error {
	left := MaxReferences
	for queue := []digest.Digest{m.Digest}; len(queue) > 0; queue = queue[1:] {
		m, err := s.StatManifest(ctx, repo, queue[0])
		if err != nil {
			return err
		}
		body, err := s.ReadManifest(ctx, m)
		if err != nil {
			return err
		}
		doc, err := ParseManifest(m.MediaType, body)
		if err != nil {
			return err
		}
		if s.cfg.LayersGo && len(doc.Blobs) > 0 {
			doc.Blobs = doc.Blobs[:1] // the config stays
		}
		if left -= len(doc.Blobs) + len(doc.Manifests); left < 0 {
			return nil
		}
		if err := s.checkReferences(ctx, repo, doc); err != nil {
			return err
		}
		for _, d := range doc.Manifests {
			if isImage(d.MediaType) || isIndex(d.MediaType) {
				queue = append(queue, d.Digest)
			}
		}
	}
	return nil
}

// AsUnknown makes ErrManifestUnknown of an error that says that a manifest, or something
// that it names, is missing or damaged: a push of it puts that right.
func AsUnknown(err error) error {
	if bucket.IsDamage(err) {
		return fmt.Errorf("%w: %v", ErrManifestUnknown, err)
	}
	for _, e := range []error{ErrDamaged, ErrManifestBlobUnknown, ErrSizeInvalid, ErrManifestInvalid} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w: %v", ErrManifestUnknown, err)
		}
	}
	return err
}
