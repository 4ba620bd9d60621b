package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"quarry/store/chunk"
	"quarry/store/image"
)

type descriptor = v1.Descriptor

func hash(d chunk.Digest) v1.Hash { return v1.Hash{Algorithm: "sha256", Hex: d.Hex()} }

// digestOf returns the digest of a descriptor; quarry knows sha256 only.
func digestOf(d descriptor) (chunk.Digest, error) { return chunk.Parse(d.Digest.String()) }

// load reads the documents from what the reference names down to the config.
func load(ctx context.Context, b blobs, want image.Platform) (*Image, error) {
	d, err := b.top(ctx)
	if err != nil {
		return nil, err
	}
	source, err := digestOf(d)
	if err != nil {
		return nil, err
	}
	p := &picker{blobs: b, want: want}
	found, err := p.pick(ctx, d)
	if err != nil {
		return nil, err
	}
	im := &Image{Source: source, blobs: b, Config: found.configRaw, ConfigDigest: found.config, Platform: found.platform}
	if im.Layers, err = layers(found); err != nil {
		return nil, fmt.Errorf("manifest %s: %w", found.digest, err)
	}
	return im, nil
}

// document is an image index or an image manifest: what it is shows in which
// list it has, and a document with both is refused because two readers could
// see two images in it.
type document struct {
	SchemaVersion int64           `json:"schemaVersion"`
	MediaType     types.MediaType `json:"mediaType"`
	Manifests     []descriptor    `json:"manifests"`
	Config        *descriptor     `json:"config"`
	Layers        []descriptor    `json:"layers"`
	FSLayers      json.RawMessage `json:"fsLayers"` // of Docker's schema 1
}

func (d *document) isIndex() bool { return d.Config == nil && d.Layers == nil && d.Manifests != nil }

// parseDocument reads a document that a descriptor calls mediaType; empty means
// that nothing says what it is.
func parseDocument(raw []byte, mediaType types.MediaType) (*document, error) {
	if mediaType.IsSchema1() {
		return nil, fmt.Errorf("media type %s is not supported: schema 1 says no diffIDs; push the image anew with a current tool", mediaType)
	}
	if mediaType != "" && !mediaType.IsIndex() && !mediaType.IsImage() {
		return nil, fmt.Errorf("media type %s is not an image manifest or image index", mediaType)
	}
	var d document
	if err := json.Unmarshal(raw, &d); err != nil {
		return nil, fmt.Errorf("not a JSON manifest: %w", err)
	}
	switch {
	case d.FSLayers != nil || d.SchemaVersion == 1:
		return nil, errors.New("manifest is Docker schema 1, which is not supported: push the image anew with a current tool")
	case d.SchemaVersion != 2:
		return nil, fmt.Errorf("schemaVersion is %d, want 2", d.SchemaVersion)
	case d.Manifests != nil && (d.Layers != nil || d.Config != nil):
		return nil, errors.New("document is ambiguous: it has both manifests and layers or a config")
	case d.MediaType != "" && mediaType != "" && d.MediaType != mediaType:
		return nil, fmt.Errorf("document calls itself %s, its descriptor %s", d.MediaType, mediaType)
	}
	if mediaType == "" {
		mediaType = d.MediaType
	}
	if mediaType.IsIndex() && (d.Layers != nil || d.Config != nil) || mediaType.IsImage() && d.Manifests != nil {
		return nil, fmt.Errorf("document of type %s has the wrong content for it", mediaType)
	}
	switch {
	case mediaType.IsIndex() && d.Manifests == nil:
		return nil, errors.New("image index has no manifests")
	case !d.isIndex() && d.Config == nil:
		return nil, errors.New("manifest has no config")
	}
	return &d, nil
}

// imageConfig is the part of an image config that conversion needs.
type imageConfig struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Variant      string `json:"variant"`
	RootFS       struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// candidate is a manifest that holds a real image.
type candidate struct {
	digest    chunk.Digest // of the manifest
	manifest  *document
	config    chunk.Digest
	configRaw []byte
	parsed    imageConfig
	platform  image.Platform
}

// readImage reads a manifest's config.
func readImage(ctx context.Context, b blobs, digest chunk.Digest, doc *document) (*candidate, error) {
	if !doc.Config.MediaType.IsConfig() {
		return nil, fmt.Errorf("manifest %s is an artifact, not an image: its config is of type %q", digest, doc.Config.MediaType)
	}
	configRaw, err := readVerified(ctx, b, kindBlob, *doc.Config, image.MaxConfig)
	if err != nil {
		return nil, fmt.Errorf("config of manifest %s: %w", digest, err)
	}
	c := &candidate{digest: digest, manifest: doc, configRaw: configRaw, config: chunk.Sum(configRaw)}
	if err := json.Unmarshal(configRaw, &c.parsed); err != nil {
		return nil, fmt.Errorf("config %s is not a JSON image config: %w", c.config, err)
	}
	c.platform = platform(c.parsed.OS, c.parsed.Architecture, c.parsed.Variant)
	return c, nil
}

// layers pairs the manifest's layers with the config's diffIDs.
func layers(c *candidate) ([]Layer, error) {
	descs, diffIDs := c.manifest.Layers, c.parsed.RootFS.DiffIDs
	if len(descs) > MaxLayers {
		return nil, fmt.Errorf("image has %d layers, at most %d are supported", len(descs), MaxLayers)
	}
	if len(descs) != len(diffIDs) {
		return nil, fmt.Errorf("manifest has %d layers, but config %s has %d diff_ids", len(descs), c.config, len(diffIDs))
	}
	if t := c.parsed.RootFS.Type; t != "layers" && t != "" {
		return nil, fmt.Errorf("config %s: rootfs type %q is not supported", c.config, t)
	}
	list := make([]Layer, len(descs))
	for i, d := range descs {
		if !isLayer(d.MediaType) {
			return nil, fmt.Errorf("layer %d, %s: media type %q is not supported", i+1, d.Digest, d.MediaType)
		}
		digest, err := digestOf(d)
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", i+1, err)
		}
		if d.Size < 0 {
			return nil, fmt.Errorf("layer %d, %s: size %d is negative", i+1, digest, d.Size)
		}
		diffID, err := chunk.Parse(diffIDs[i])
		if err != nil {
			return nil, fmt.Errorf("config %s: diff_id of layer %d: %w", c.config, i+1, err)
		}
		list[i] = Layer{Digest: digest, DiffID: diffID, Size: d.Size, MediaType: string(d.MediaType)}
	}
	return list, nil
}

// Layer media types that exist in the wild and that types lacks.
const (
	ociRestrictedZstd types.MediaType = "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd"
	dockerZstd        types.MediaType = "application/vnd.docker.image.rootfs.diff.tar.zstd"
	dockerForeignTar  types.MediaType = "application/vnd.docker.image.rootfs.foreign.diff.tar"
)

// isLayer reports whether a media type says "tar of a layer". How it is
// compressed is decided by its bytes.
func isLayer(m types.MediaType) bool {
	return m.IsLayer() || m == ociRestrictedZstd || m == dockerZstd || m == dockerForeignTar
}

func isDistributable(mediaType string) bool {
	m := types.MediaType(mediaType)
	return m.IsDistributable() && m != ociRestrictedZstd && m != dockerForeignTar
}
