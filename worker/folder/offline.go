package folder

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
)

// ErrOffline says that an image cannot be had without a store.
var ErrOffline = errors.New("it cannot be had without the store")

// envelopePath is where the image statement is with its signatures, as the store last
// gave them: what makes it an image that somebody trusted has signed, and not only one
// that was here once.
func (d Dir) envelopePath(id chunk.Digest) string { return filepath.Join(d.imageDir(id), "signed") }

// writeEnvelope keeps the envelope of an image that is here.
func (d Dir) writeEnvelope(id chunk.Digest, env []byte) error {
	if have, err := ReadBounded(d.envelopePath(id), signer.MaxEnvelope); err == nil && bytes.Equal(have, env) {
		return nil
	}
	return writeWhole(d.envelopePath(id), env)
}

// Offline returns an image that was fetched before, with no store asked. A digest means
// the same for ever, so the image is the right one when a key that is trusted now has
// signed it. What a tag is only a store can say: for a tag the error says what it was.
// Errors: ErrOffline, and those of image.Verify.
func (s *Images) Offline(ref image.Ref, p image.Platform) (*Image, error) {
	id, err := s.Dir.Known(ref, p)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOffline, err)
	}
	im, err := s.load(id)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrOffline, err)
	}
	if ref.Digest == nil {
		return nil, fmt.Errorf("%w: which image %s is now, only a store can say; here it was %s@%s: ask for that to have it without one",
			ErrOffline, ref, ref.Repo, im.Statement.Source)
	}
	env, err := ReadBounded(s.Dir.envelopePath(id), signer.MaxEnvelope)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: its signatures were not kept by the quarry that fetched it", ErrOffline)
	}
	if err != nil {
		return nil, err
	}
	v, err := image.Verify(env, nil, image.Want{Ref: ref, Platform: p, Trust: s.Trust, Now: time.Now()})
	if err != nil {
		return nil, err
	}
	if v.ID != id {
		return nil, fmt.Errorf("%w: the signatures that were kept are of image %s, not of %s", ErrOffline, v.ID, id)
	}
	return im, nil
}
