package folder

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"quarry/store/chunk"
	"quarry/store/image"
)

// ErrUnknown says that the folder has no image of a name.
var ErrUnknown = errors.New("not an image that was used on this worker")

// Known returns the id of an image that the folder holds and ref was the last
// time it was used here, with no store asked: what ref is now is for the store to
// say, and whether the image is intact for Load. Errors: ErrUnknown.
func (d Dir) Known(ref image.Ref, p image.Platform) (chunk.Digest, error) {
	list, err := d.readLatest()
	if err != nil {
		return chunk.Digest{}, err
	}
	i := slices.IndexFunc(list, func(e latestImage) bool { return e.Ref == ref.String() && e.Platform == p.String() })
	if i >= 0 && d.Has(list[i].Image) {
		return list[i].Image, nil
	}
	if ref.Digest != nil {
		return d.knownSource(*ref.Digest, p)
	}
	return chunk.Digest{}, fmt.Errorf("image %s: %w", ref, ErrUnknown)
}

// Names returns the references that were each image the last time they were used
// here.
func (d Dir) Names() (map[chunk.Digest][]string, error) {
	list, err := d.readLatest()
	names := map[chunk.Digest][]string{}
	for _, e := range list {
		names[e.Image] = append(names[e.Image], e.Ref)
	}
	return names, err
}

// Has reports whether the folder holds an image, intact or not.
func (d Dir) Has(id chunk.Digest) bool {
	_, err := os.Stat(filepath.Join(d.imageDir(id), "statement"))
	return err == nil
}

// knownSource looks for the image of a source digest.
func (d Dir) knownSource(source chunk.Digest, p image.Platform) (chunk.Digest, error) {
	entries, err := os.ReadDir(filepath.Join(d.path, "images"))
	if err != nil {
		return chunk.Digest{}, err
	}
	for _, e := range entries {
		id, err := chunk.ParseHex(e.Name())
		if err != nil {
			continue
		}
		payload, err := ReadBounded(filepath.Join(d.imageDir(id), "statement"), image.MaxStatement)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it is being saved
		}
		if err != nil {
			return chunk.Digest{}, err
		}
		st, err := image.DecodeStatement(payload)
		if err == nil && st.Source == source && st.Platform == p && image.ID(payload) == id {
			return id, nil
		}
	}
	return chunk.Digest{}, fmt.Errorf("source %s: %w", source, ErrUnknown)
}
