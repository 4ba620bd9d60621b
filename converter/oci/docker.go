package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"quarry/converter/layer"
	"quarry/store/chunk"
	"quarry/store/image"
)

// dockerArchive is an archive of docker save. It holds no manifest that a digest
// could name, so one is made of the config and the plain layers: Docker schema
// 2, without spaces, each layer with its diffID as digest and its plain length
// as size. skopeo makes the same bytes of the same archive.
type dockerArchive struct {
	*archive
	sel    selector
	limits layer.Limits

	measured map[int64]plainLayer // layers by the offset of their member
	chosen   madeImage
}

// madeImage is an image of the archive with the manifest that was made for it.
type madeImage struct {
	descriptor descriptor
	docs       map[chunk.Digest][]byte // manifest and config
	layers     map[chunk.Digest]plainLayer
}

var _ blobs = (*dockerArchive)(nil)

// plainLayer is a layer of the archive.
type plainLayer struct {
	member     member
	size       int64 // of the plain bytes
	compressed bool
}

// saved is one image of manifest.json.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func openDockerArchive(ctx context.Context, rest string, cfg Config) (blobs, error) {
	a, sel, err := openArchive(ctx, rest, cfg)
	if err != nil {
		return nil, err
	}
	return &dockerArchive{archive: a, sel: sel, limits: cfg.Limits, measured: map[int64]plainLayer{}}, nil
}

func (a *dockerArchive) top(ctx context.Context) (descriptor, error) {
	images, err := a.saved()
	if err != nil {
		return descriptor{}, err
	}
	if a.sel.digest != nil {
		return a.chooseDigest(ctx, images, *a.sel.digest)
	}
	found := images
	if a.sel.tag != "" {
		found = slices.DeleteFunc(slices.Clone(images), func(s saved) bool { return !s.named(a.sel.tag) })
	}
	switch {
	case len(found) == 1:
		a.chosen, err = a.manifest(ctx, found[0])
		return a.chosen.descriptor, err
	case a.sel.tag != "":
		return descriptor{}, fmt.Errorf("%d images are called %q: there are %s", len(found), a.sel.tag, a.names(ctx, images))
	}
	return descriptor{}, fmt.Errorf("there are %d images: name one of %s", len(found), a.names(ctx, images))
}

// saved reads manifest.json.
func (a *dockerArchive) saved() ([]saved, error) {
	r, size, err := a.file("manifest.json")
	switch {
	case errors.Is(err, ErrNoBlob) && a.has("oci-layout"):
		return nil, fmt.Errorf("%s has no manifest.json, but an OCI layout: open it as an oci-archive: source", a.name)
	case errors.Is(err, ErrNoBlob) && a.has("repositories"):
		return nil, fmt.Errorf("%s has no manifest.json: it is of a docker before 1.10; load it and save it again with a current one", a.name)
	case err != nil:
		return nil, fmt.Errorf("%s is not an archive of docker save: manifest.json: %w", a.name, err)
	}
	raw, err := readLimited(r, size, MaxManifest)
	if err != nil {
		return nil, fmt.Errorf("manifest.json: %w", err)
	}
	var images []saved
	if err := json.Unmarshal(raw, &images); err != nil {
		return nil, fmt.Errorf("manifest.json of %s is not a list of images: %w", a.name, err)
	}
	if len(images) == 0 {
		return nil, fmt.Errorf("manifest.json of %s names no image", a.name)
	}
	if len(images) > maxManifests {
		return nil, fmt.Errorf("manifest.json of %s has more than %d images", a.name, maxManifests)
	}
	return images, nil
}

// named reports whether an image has a name, however much of it is left out:
// docker.io/library/debian:latest is debian.
func (s saved) named(want string) bool {
	full := func(s string) string {
		if ref, err := name.NewTag(s); err == nil {
			return ref.Name()
		}
		return s
	}
	return slices.ContainsFunc(s.RepoTags, func(have string) bool { return full(have) == full(want) })
}

// names lists RepoTags, and the source digests of what has none.
func (a *dockerArchive) names(ctx context.Context, images []saved) string {
	var names []string
	for _, s := range images {
		names = append(names, s.RepoTags...)
		if len(s.RepoTags) > 0 {
			continue
		}
		if m, err := a.manifest(ctx, s); err == nil {
			names = append(names, "@"+m.descriptor.Digest.String())
		}
	}
	return listNames(names)
}

func (a *dockerArchive) chooseDigest(ctx context.Context, images []saved, want chunk.Digest) (descriptor, error) {
	var errs []error
	for _, s := range images {
		m, err := a.manifest(ctx, s)
		if err == nil && m.descriptor.Digest == hash(want) {
			a.chosen = m
			return m.descriptor, nil
		}
		errs = append(errs, err)
	}
	return descriptor{}, errors.Join(append([]error{fmt.Errorf("no image %s: there are %s", want, a.names(ctx, images))}, errs...)...)
}

// dockerDescriptor and dockerManifest have the fields, and their order, of what
// docker and skopeo write.
type dockerDescriptor struct {
	MediaType types.MediaType `json:"mediaType"`
	Size      int64           `json:"size"`
	Digest    string          `json:"digest"`
}

type dockerManifest struct {
	SchemaVersion int                `json:"schemaVersion"`
	MediaType     types.MediaType    `json:"mediaType"`
	Config        dockerDescriptor   `json:"config"`
	Layers        []dockerDescriptor `json:"layers"`
}

// manifest makes the manifest of an image.
func (a *dockerArchive) manifest(ctx context.Context, s saved) (madeImage, error) {
	var made madeImage
	r, size, err := a.file(clean(s.Config))
	if err != nil {
		return made, fmt.Errorf("config %q: %w", s.Config, err)
	}
	config, err := readLimited(r, size, image.MaxConfig)
	if err != nil {
		return made, fmt.Errorf("config %q: %w", s.Config, err)
	}
	var parsed imageConfig
	if err := json.Unmarshal(config, &parsed); err != nil {
		return made, fmt.Errorf("config %q is not a JSON image config: %w", s.Config, err)
	}
	diffIDs := parsed.RootFS.DiffIDs
	if len(diffIDs) != len(s.Layers) {
		return made, fmt.Errorf("manifest.json has %d layers, but config %q has %d diff_ids", len(s.Layers), s.Config, len(diffIDs))
	}
	if len(s.Layers) > MaxLayers {
		return made, fmt.Errorf("image has %d layers, at most %d are supported", len(s.Layers), MaxLayers)
	}
	m := dockerManifest{
		SchemaVersion: 2, MediaType: types.DockerManifestSchema2, Layers: []dockerDescriptor{},
		Config: dockerDescriptor{types.DockerConfigJSON, int64(len(config)), chunk.Sum(config).String()},
	}
	made.layers = map[chunk.Digest]plainLayer{}
	for i, name := range s.Layers {
		l, err := a.layer(ctx, made.layers, clean(name), diffIDs[i])
		if err != nil {
			return made, fmt.Errorf("layer %d of %d, %q: %w", i+1, len(s.Layers), name, err)
		}
		m.Layers = append(m.Layers, dockerDescriptor{types.DockerLayer, l.size, diffIDs[i]})
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return made, err
	}
	d := chunk.Sum(raw)
	made.docs = map[chunk.Digest][]byte{d: raw, chunk.Sum(config): config}
	made.descriptor = descriptor{MediaType: m.MediaType, Digest: hash(d), Size: int64(len(raw))}
	return made, nil
}

// layer finds and measures one layer, unless known has its diffID: that member
// may be missing. Its bytes are verified when it is converted; the diffID is
// until then the config's claim.
func (a *dockerArchive) layer(ctx context.Context, known map[chunk.Digest]plainLayer, name, claim string) (plainLayer, error) {
	diffID, err := chunk.Parse(claim)
	if err != nil {
		return plainLayer{}, fmt.Errorf("diff_id: %w", err)
	}
	if l, ok := known[diffID]; ok {
		return l, nil
	}
	m, err := a.find(name)
	if err != nil {
		return plainLayer{}, err
	}
	l, err := a.measure(ctx, m)
	if err == nil {
		known[diffID] = l
	}
	return l, err
}

// measure finds out how long a layer is without compression, once for a member,
// whatever number of layers it is claimed to be.
func (a *dockerArchive) measure(ctx context.Context, m member) (plainLayer, error) {
	if l, ok := a.measured[m.off]; ok {
		return l, nil
	}
	l := plainLayer{member: m, size: m.size}
	head := make([]byte, min(m.size, 512))
	if _, err := a.plain.ReadAt(head, m.off); err != nil {
		return l, err
	}
	if l.compressed = layer.Compressed(head); l.compressed {
		r, err := layer.Decompress(a.content(m), m.size, a.limits)
		if err != nil {
			return l, err
		}
		defer r.Close()
		if l.size, err = io.Copy(io.Discard, withContext(ctx, r)); err != nil {
			return l, err
		}
	}
	a.measured[m.off] = l
	return l, nil
}

func (a *dockerArchive) open(_ context.Context, _ kind, d chunk.Digest) (io.ReadCloser, int64, error) {
	if p, ok := a.chosen.docs[d]; ok {
		return io.NopCloser(bytes.NewReader(p)), int64(len(p)), nil
	}
	l, ok := a.chosen.layers[d]
	if !ok {
		return nil, 0, ErrNoBlob
	}
	r := a.content(l.member)
	if !l.compressed {
		return io.NopCloser(r), l.size, nil
	}
	plain, err := layer.Decompress(r, l.member.size, a.limits)
	return plain, l.size, err
}
