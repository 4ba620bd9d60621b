package registry

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// MaxManifest bounds a manifest in bytes, as the specification wants at least.
	MaxManifest = 4 << 20
	// MaxReferences bounds what one manifest names, each of which is looked for in
	// the bucket before the push is answered.
	MaxReferences = 4096
	// maxMediaType bounds a media type, RFC 6838's 127 bytes for each half.
	maxMediaType = 255
)

// The media types of manifests that are kept. Schema 1 of docker is not: its
// layers have no digests of what they decompress to, and its digest is not that of
// its bytes.
const (
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
)

// isImage and isIndex tell the two kinds of manifests.
func isImage(mediaType string) bool {
	return mediaType == v1.MediaTypeImageManifest || mediaType == dockerManifest
}

func isIndex(mediaType string) bool {
	return mediaType == v1.MediaTypeImageIndex || mediaType == dockerList
}

// nondistributable are the media types of layers that may be missing: their owner
// does not let registries have them.
var nondistributable = map[string]bool{
	"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip":    true,
	"application/vnd.oci.image.layer.nondistributable.v1.tar":      true,
	"application/vnd.oci.image.layer.nondistributable.v1.tar+gzip": true,
	"application/vnd.oci.image.layer.nondistributable.v1.tar+zstd": true,
}

// Document is what the registry reads of a manifest. The bytes of the manifest are
// kept as they are.
type Document struct {
	MediaType    string
	ArtifactType string // of the manifest, or of its config when it has none
	Annotations  map[string]string
	Subject      *v1.Descriptor
	Blobs        []v1.Descriptor // config and layers
	Manifests    []v1.Descriptor // children of an index
}

// fields are the members of a manifest that mean something to the registry.
type fields struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	ArtifactType  string            `json:"artifactType"`
	Annotations   map[string]string `json:"annotations"`
	Subject       *v1.Descriptor    `json:"subject"`
	Config        *v1.Descriptor    `json:"config"`
	Layers        *[]v1.Descriptor  `json:"layers"`
	Manifests     *[]v1.Descriptor  `json:"manifests"`
}

// known are the names of these members.
var known = []string{"schemaVersion", "mediaType", "artifactType", "annotations", "subject", "config", "layers", "manifests"}

// ParseManifest reads a manifest that was sent with a media type, "" for none.
// Whatever two readers could read differently is refused, the rest of the document
// may be anything. Errors: ErrManifestInvalid, ErrDigestInvalid, ErrTooLarge.
func ParseManifest(mediaType string, body []byte) (*Document, error) {
	if len(body) > MaxManifest {
		return nil, fmt.Errorf("%w: manifest of %d bytes, at most %d are allowed", ErrTooLarge, len(body), MaxManifest)
	}
	if err := onlyOnce(body); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrManifestInvalid, err)
	}
	var f fields
	if err := json.Unmarshal(body, &f); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrManifestInvalid, err)
	}
	if f.SchemaVersion != 2 {
		return nil, fmt.Errorf("%w: schemaVersion is %d, want 2; images of schema 1 have to be pushed in a newer form", ErrManifestInvalid, f.SchemaVersion)
	}
	switch {
	case mediaType == "":
		mediaType = f.MediaType
	case f.MediaType != "" && f.MediaType != mediaType:
		return nil, fmt.Errorf("%w: Content-Type is %.255q, the manifest says %.255q", ErrManifestInvalid, mediaType, f.MediaType)
	}
	d := &Document{MediaType: mediaType, ArtifactType: f.ArtifactType, Annotations: f.Annotations, Subject: f.Subject}
	return d, d.take(f)
}

// take fills in what the manifest names, as its kind says.
func (d *Document) take(f fields) error {
	switch {
	case isImage(d.MediaType):
		if f.Config == nil || f.Layers == nil || f.Manifests != nil {
			return fmt.Errorf("%w: a manifest of type %s has config and layers, and no manifests", ErrManifestInvalid, d.MediaType)
		}
		d.Blobs = append([]v1.Descriptor{*f.Config}, *f.Layers...)
		if d.ArtifactType == "" {
			d.ArtifactType = f.Config.MediaType
		}
	case isIndex(d.MediaType):
		if f.Manifests == nil || f.Config != nil || f.Layers != nil {
			return fmt.Errorf("%w: an index of type %s has manifests, and neither config nor layers", ErrManifestInvalid, d.MediaType)
		}
		d.Manifests = *f.Manifests
	default:
		return fmt.Errorf("%w: media type %.255q is not kept here: want one of %s, %s, %s, %s", ErrManifestInvalid, d.MediaType,
			v1.MediaTypeImageManifest, v1.MediaTypeImageIndex, dockerManifest, dockerList)
	}
	if n := len(d.Blobs) + len(d.Manifests); n > MaxReferences {
		return fmt.Errorf("%w: it names %d others, at most %d are allowed", ErrManifestInvalid, n, MaxReferences)
	}
	for _, list := range [][]v1.Descriptor{d.Blobs, d.Manifests} {
		for i := range list {
			if err := checkDescriptor(&list[i]); err != nil {
				return err
			}
		}
	}
	if d.Subject != nil {
		return checkDescriptor(d.Subject)
	}
	return nil
}

func checkDescriptor(d *v1.Descriptor) error {
	if _, err := ParseDigest(string(d.Digest)); err != nil {
		return fmt.Errorf("%w: it names %w", ErrManifestInvalid, err)
	}
	if d.Size < 0 || len(d.MediaType) > maxMediaType {
		return fmt.Errorf("%w: it names %s with size %d and a media type of %d bytes", ErrManifestInvalid, d.Digest, d.Size, len(d.MediaType))
	}
	return nil
}

// onlyOnce refuses a document with a member that means something here and is there
// twice, or in another case: readers differ in which one they take.
func onlyOnce(body []byte) error {
	dec := json.NewDecoder(bytes.NewReader(body))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return fmt.Errorf("it is no JSON object")
	}
	seen := map[string]bool{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return err
		}
		name := t.(string) // what stands before a value in an object
		for _, k := range known {
			if !strings.EqualFold(name, k) {
				continue
			}
			if name != k || seen[k] {
				return fmt.Errorf("member %q is there twice, or is spelled %q", k, name)
			}
			seen[k] = true
		}
		var skip json.RawMessage
		if err := dec.Decode(&skip); err != nil {
			return err
		}
	}
	return nil
}

// digestOf is the digest of b by the algorithm of like.
func digestOf(like digest.Digest, b []byte) digest.Digest { return like.Algorithm().FromBytes(b) }
