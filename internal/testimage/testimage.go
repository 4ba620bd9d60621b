// Package testimage builds small OCI layouts from a compact description, so
// that a test states the image it needs beside what it expects of it.
package testimage

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Media types that the layouts use.
const (
	MediaIndex    = "application/vnd.oci.image.index.v1+json"
	MediaManifest = "application/vnd.oci.image.manifest.v1+json"
	MediaConfig   = "application/vnd.oci.image.config.v1+json"
	MediaTar      = "application/vnd.oci.image.layer.v1.tar"
	MediaGzip     = "application/vnd.oci.image.layer.v1.tar+gzip"
	MediaZstd     = "application/vnd.oci.image.layer.v1.tar+zstd"
)

// Descriptor is an OCI descriptor.
type Descriptor struct {
	MediaType    string            `json:"mediaType"`
	Digest       string            `json:"digest"`
	Size         int64             `json:"size"`
	URLs         []string          `json:"urls,omitempty"`
	Annotations  map[string]string `json:"annotations,omitempty"`
	Platform     *Platform         `json:"platform,omitempty"`
	ArtifactType string            `json:"artifactType,omitempty"`
}

// Platform is the platform of a descriptor in an index.
type Platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Variant      string `json:"variant,omitempty"`
}

// Manifest is an OCI image manifest.
type Manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType,omitempty"`
	Config        Descriptor   `json:"config"`
	Layers        []Descriptor `json:"layers"`
}

// Index is an OCI image index.
type Index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType,omitempty"`
	Manifests     []Descriptor `json:"manifests"`
}

// Layer describes one layer. Only Entries, or Tar, or Blob is needed.
type Layer struct {
	Entries   []Entry
	Tar       []byte // the uncompressed layer, when entries cannot say it
	Codec     string // "gzip" (default), "zstd" or "none"
	Blob      []byte // the compressed layer, when Codec cannot say it; Tar gives the diffID
	MediaType string // default: that of Codec
	DiffID    string // what the config claims; default: the truth
}

// Image describes one image.
type Image struct {
	Platform string // "linux/amd64" by default; os/arch[/variant]
	Layers   []Layer
	Config   map[string]any // the "config" object: Env, User, …
	DiffIDs  []string       // replaces the diff_ids of the layers when not nil
	RawConf  []byte         // replaces the whole config
	ConfType string         // media type of the config
}

// Layout is an OCI layout in a folder of the test.
type Layout struct {
	Dir   string
	t     testing.TB
	index Index
}

// New makes an empty layout.
func New(t testing.TB) *Layout {
	t.Helper()
	l := &Layout{Dir: t.TempDir(), t: t, index: Index{SchemaVersion: 2, MediaType: MediaIndex, Manifests: []Descriptor{}}}
	l.write("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	l.writeIndex()
	return l
}

// Build makes a layout of one image with the tag latest.
func Build(t testing.TB, layers ...Layer) *Layout {
	t.Helper()
	l := New(t)
	l.Tag("latest", l.Image(Image{Layers: layers}))
	return l
}

// Source is the layout as an argument of quarry convert; suffix is "",
// ":TAG" or "@DIGEST".
func (l *Layout) Source(suffix string) string { return "oci:" + l.Dir + suffix }

// Digest returns the digest text of p.
func Digest(p []byte) string {
	sum := sha256.Sum256(p)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Blob stores p and returns its descriptor.
func (l *Layout) Blob(mediaType string, p []byte) Descriptor {
	l.t.Helper()
	d := Digest(p)
	l.write(l.BlobName(d), p)
	return Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(p))}
}

// BlobName returns the name of a blob's file, relative to Dir.
func (l *Layout) BlobName(digest string) string {
	return filepath.Join("blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))
}

// BlobPath returns the path of a blob's file.
func (l *Layout) BlobPath(digest string) string { return filepath.Join(l.Dir, l.BlobName(digest)) }

// JSON stores v as JSON.
func (l *Layout) JSON(mediaType string, v any) Descriptor {
	l.t.Helper()
	return l.Blob(mediaType, l.marshal(v))
}

// Layer stores one layer; it returns its descriptor and diffID.
func (l *Layout) Layer(y Layer) (Descriptor, string) {
	l.t.Helper()
	plain := y.Tar
	if plain == nil {
		plain = Tar(l.t, y.Entries...)
	}
	blob, mediaType := plain, MediaTar
	switch y.Codec {
	case "", "gzip":
		blob, mediaType = Gzip(l.t, plain), MediaGzip
	case "zstd":
		blob, mediaType = Zstd(l.t, plain), MediaZstd
	case "none":
	default:
		l.t.Fatalf("layer codec %q: want gzip, zstd or none", y.Codec)
	}
	if y.Blob != nil {
		blob = y.Blob
	}
	if y.MediaType != "" {
		mediaType = y.MediaType
	}
	diffID := y.DiffID
	if diffID == "" {
		diffID = Digest(plain)
	}
	return l.Blob(mediaType, blob), diffID
}

// Image stores an image and returns the descriptor of its manifest.
func (l *Layout) Image(im Image) Descriptor {
	l.t.Helper()
	m := Manifest{SchemaVersion: 2, MediaType: MediaManifest, Layers: []Descriptor{}}
	diffIDs := []string{}
	for _, y := range im.Layers {
		d, diffID := l.Layer(y)
		m.Layers = append(m.Layers, d)
		diffIDs = append(diffIDs, diffID)
	}
	if im.DiffIDs != nil {
		diffIDs = im.DiffIDs
	}
	p := parsePlatform(im.Platform)
	raw := im.RawConf
	if raw == nil {
		raw = l.marshal(map[string]any{
			"os": p.OS, "architecture": p.Architecture, "variant": p.Variant, "config": im.Config,
			"rootfs": map[string]any{"type": "layers", "diff_ids": diffIDs},
		})
	}
	confType := im.ConfType
	if confType == "" {
		confType = MediaConfig
	}
	m.Config = l.Blob(confType, raw)
	d := l.JSON(MediaManifest, m)
	d.Platform = &p
	return d
}

// Index stores an image index of the given manifests.
func (l *Layout) Index(manifests ...Descriptor) Descriptor {
	l.t.Helper()
	return l.JSON(MediaIndex, Index{SchemaVersion: 2, MediaType: MediaIndex, Manifests: manifests})
}

// Tag adds d to index.json under a tag; an empty tag means none.
func (l *Layout) Tag(tag string, d Descriptor) {
	l.t.Helper()
	annotations := map[string]string{}
	for k, v := range d.Annotations {
		annotations[k] = v
	}
	if tag != "" {
		annotations["org.opencontainers.image.ref.name"] = tag
	}
	d.Annotations = annotations
	l.index.Manifests = append(l.index.Manifests, d)
	l.writeIndex()
}

// Archive writes the layout as a tar file and returns its path.
func (l *Layout) Archive() string {
	l.t.Helper()
	path := filepath.Join(l.t.TempDir(), "image.tar")
	f, err := os.Create(path)
	if err != nil {
		l.t.Fatal(err)
	}
	defer f.Close()
	w := tar.NewWriter(f)
	if err := w.AddFS(os.DirFS(l.Dir)); err != nil {
		l.t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		l.t.Fatal(err)
	}
	return path
}

func parsePlatform(s string) Platform {
	if s == "" {
		s = "linux/amd64"
	}
	parts := append(strings.Split(s, "/"), "", "")
	return Platform{OS: parts[0], Architecture: parts[1], Variant: parts[2]}
}

func (l *Layout) writeIndex() {
	l.t.Helper()
	l.write("index.json", l.marshal(l.index))
}

func (l *Layout) marshal(v any) []byte {
	l.t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		l.t.Fatal(err)
	}
	return b
}

func (l *Layout) write(name string, p []byte) {
	l.t.Helper()
	path := filepath.Join(l.Dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		l.t.Fatal(err)
	}
	if err := os.WriteFile(path, p, 0o644); err != nil {
		l.t.Fatal(err)
	}
}
