// Package oci opens OCI images where they lie, in a layout folder or an archive
// of one. It is the only package that knows OCI's documents; what leaves it has
// been checked against the digest and size that named it.
package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"quarry/store/chunk"
	"quarry/store/image"
)

// Maxima of what is read into memory, checked before it is; a config's is
// image.MaxConfig.
const (
	MaxManifest = 4 << 20 // a manifest or an image index; the push limit of registries
	MaxLayers   = 1000    // 1000 descriptors are about 200 KiB of a manifest
)

// Image is one image of a source, for one platform. Close it after the last
// LayerReader.
type Image struct {
	Source       chunk.Digest // digest of what the reference names: an image index or a manifest
	Platform     image.Platform
	Config       []byte
	ConfigDigest chunk.Digest
	Layers       []Layer

	blobs blobs
}

// Layer describes one layer. DiffID is what the config claims, no more.
type Layer struct {
	Digest, DiffID chunk.Digest
	Size           int64 // of the compressed bytes
	MediaType      string
}

// schemes are the kinds of source, by the word before the first colon.
var schemes = map[string]func(ctx context.Context, rest string) (blobs, selector, error){
	"oci":         openFolder,
	"oci-archive": openArchive,
}

// Open opens the image that src names:
//
//	oci:DIR[:TAG|@DIGEST]   oci-archive:FILE[:TAG|@DIGEST]
//
// A zero platform means this machine's where the source offers a choice, and
// whatever there is where it does not.
func Open(ctx context.Context, src string, platform image.Platform) (*Image, error) {
	scheme, rest, ok := strings.Cut(src, ":")
	open := schemes[scheme]
	if !ok || open == nil || rest == "" {
		return nil, fmt.Errorf("source %q: want one of %s", src, strings.Join(sourceForms(), ", "))
	}
	b, sel, err := open(ctx, rest)
	if err != nil {
		return nil, fmt.Errorf("source %s: %w", src, err)
	}
	im, err := load(b, sel, platform)
	if err != nil {
		return nil, fmt.Errorf("source %s: %w", src, errors.Join(err, b.Close()))
	}
	return im, nil
}

func sourceForms() []string {
	return []string{"oci:DIR[:TAG|@DIGEST]", "oci-archive:FILE[:TAG|@DIGEST]"}
}

// LayerReader opens the compressed bytes of layer i. They are not verified:
// converter/layer does that while it reads them.
func (im *Image) LayerReader(i int) (io.ReadCloser, error) {
	l := im.Layers[i]
	r, size, err := im.blobs.open(blobName(l.Digest))
	if errors.Is(err, errNoBlob) && !isDistributable(l.MediaType) {
		return nil, fmt.Errorf("layer %s of type %s is missing: its urls are never fetched, add the blob to the source", l.Digest, l.MediaType)
	}
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
	}
	if size != l.Size {
		return nil, errors.Join(fmt.Errorf("layer %s: blob has %d bytes, its descriptor says %d", l.Digest, size, l.Size), r.Close())
	}
	return r, nil
}

// Close frees the source.
func (im *Image) Close() error { return im.blobs.Close() }

// selector says which of a layout's images is meant; zero means the only one.
type selector struct {
	tag    string
	digest *chunk.Digest
}

// parseSelector splits "PATH[:TAG|@DIGEST]". Paths and tags may both contain
// colons, so the shortest prefix that exists is the path.
func parseSelector(rest string, exists func(path string) bool) (path string, sel selector, err error) {
	if i := strings.LastIndex(rest, "@sha256:"); i >= 0 && !exists(rest) {
		d, err := chunk.Parse(rest[i+1:])
		return rest[:i], selector{digest: &d}, err
	}
	if exists(rest) {
		return rest, sel, nil
	}
	for i := range len(rest) {
		if rest[i] == ':' && exists(rest[:i]) {
			return rest[:i], selector{tag: rest[i+1:]}, nil
		}
	}
	path, tag, _ := strings.Cut(rest, ":")
	return path, selector{tag: tag}, nil
}

const (
	annotationTag       = "org.opencontainers.image.ref.name"
	annotationReference = "vnd.docker.reference.type" // buildx marks its attestations with it
)

// choose picks the descriptor of index.json that sel means.
func choose(entries []descriptor, b blobs, sel selector) (descriptor, error) {
	if sel.digest != nil {
		return chooseDigest(entries, b, *sel.digest)
	}
	var found []descriptor
	for _, d := range entries {
		if sel.tag == "" && !isAttestation(d) || sel.tag != "" && sel.tag == d.Annotations[annotationTag] {
			found = append(found, d)
		}
	}
	// One image under two tags is still the only one.
	found = slices.CompactFunc(found, func(a, b descriptor) bool { return a.Digest == b.Digest })
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1 && sel.tag != "":
		return descriptor{}, fmt.Errorf("tag %q is there %d times with different digests: name one by @DIGEST", sel.tag, len(found))
	case len(found) > 1:
		return descriptor{}, fmt.Errorf("there are %d images: name one of %s", len(found), listNames(entries))
	case sel.tag != "":
		return descriptor{}, fmt.Errorf("no tag %q: there are %s", sel.tag, listNames(entries))
	}
	return descriptor{}, errors.New("index.json names no image")
}

// chooseDigest finds an image by digest: named in index.json, or only stored.
func chooseDigest(entries []descriptor, b blobs, d chunk.Digest) (descriptor, error) {
	for _, e := range entries {
		if e.Digest.String() == d.String() {
			return e, nil
		}
	}
	r, size, err := b.open(blobName(d))
	if err != nil {
		return descriptor{}, fmt.Errorf("no image %s: there are %s", d, listNames(entries))
	}
	return descriptor{Digest: hash(d), Size: size}, r.Close()
}

// listNames lists tags, and digests of what has none, for a message.
func listNames(entries []descriptor) string {
	const most = 50
	var names []string
	for _, d := range entries {
		name := d.Annotations[annotationTag]
		if name == "" {
			name = "@" + d.Digest.String()
		}
		names = append(names, name)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	switch {
	case len(names) == 0:
		return "none"
	case len(names) > most:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}
