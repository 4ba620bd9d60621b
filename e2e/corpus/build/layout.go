package build

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// recipeKey is the annotation that holds a recipe's id.
const recipeKey = "quarry.corpus.recipe"

// built reports whether a layout is there, of exactly this recipe.
func built(dir string, r Recipe) bool {
	raw, err := os.ReadFile(filepath.Join(dir, ocispec.ImageIndexFile))
	if err != nil {
		return false
	}
	var index ocispec.Index
	if err := json.Unmarshal(raw, &index); err != nil || len(index.Manifests) != 1 {
		return false
	}
	return index.Manifests[0].Annotations[recipeKey] == r.id()
}

// writer makes one OCI layout in a folder that publish gives its name.
type writer struct {
	dir     string
	layers  []ocispec.Descriptor
	diffIDs []digest.Digest
	size    int64 // of the layers
}

func newWriter(dir string) (*writer, error) {
	if err := os.RemoveAll(dir); err != nil { // of a build that was stopped
		return nil, err
	}
	return &writer{dir: dir}, os.MkdirAll(filepath.Join(dir, "blobs/sha256"), 0o755)
}

// discard removes what was not published.
func (w *writer) discard() { os.RemoveAll(w.dir) }

// addLayer adds what has changed in root since a snapshot.
func (w *writer) addLayer(root string, old snapshot, order Order) (next snapshot, err error) {
	f, err := os.CreateTemp(w.dir, "layer")
	if err != nil {
		return nil, err
	}
	defer f.Close() // closed already unless something failed
	digester := digest.SHA256.Digester()
	z := gzip.NewWriter(io.MultiWriter(f, digester.Hash()))
	plain := digest.SHA256.Digester()
	if next, err = writeLayer(io.MultiWriter(z, plain.Hash()), root, old, order); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	size, err := f.Seek(0, io.SeekCurrent)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return nil, err
	}
	w.layers = append(w.layers, ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digester.Digest(), Size: size})
	w.diffIDs = append(w.diffIDs, plain.Digest())
	w.size += size
	return next, os.Rename(f.Name(), w.blob(digester.Digest()))
}

func (w *writer) blob(d digest.Digest) string {
	return filepath.Join(w.dir, "blobs", d.Algorithm().String(), d.Encoded())
}

func (w *writer) addJSON(mediaType string, v any) (ocispec.Descriptor, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(raw), Size: int64(len(raw))}
	return d, os.WriteFile(w.blob(d.Digest), raw, 0o644)
}

// publish writes the documents and gives the layout its name.
func (w *writer) publish(dir string, r Recipe, created time.Time) error {
	config := ocispec.Image{
		Created:  &created,
		Platform: ocispec.Platform{Architecture: "amd64", OS: "linux"},
		Config:   ocispec.ImageConfig{Env: r.Env, Cmd: r.Cmd},
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: w.diffIDs},
	}
	config.History = append(config.History, ocispec.History{Created: &created, CreatedBy: "mmdebstrap " + suite})
	for _, s := range r.Steps {
		config.History = append(config.History, ocispec.History{Created: &created, CreatedBy: fmt.Sprintf("RUN %v %s", s.Packages, s.Script)})
	}
	c, err := w.addJSON(ocispec.MediaTypeImageConfig, config)
	if err != nil {
		return err
	}
	v2 := specs.Versioned{SchemaVersion: 2}
	m, err := w.addJSON(ocispec.MediaTypeImageManifest, ocispec.Manifest{Versioned: v2, MediaType: ocispec.MediaTypeImageManifest, Config: c, Layers: w.layers})
	if err != nil {
		return err
	}
	m.Platform = &config.Platform
	m.Annotations = map[string]string{ocispec.AnnotationRefName: "latest", recipeKey: r.id()}
	index, err := json.Marshal(ocispec.Index{Versioned: v2, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{m}})
	if err != nil {
		return err
	}
	layout := fmt.Sprintf(`{"imageLayoutVersion":%q}`, ocispec.ImageLayoutVersion)
	return errors.Join(
		os.WriteFile(filepath.Join(w.dir, ocispec.ImageLayoutFile), []byte(layout), 0o644),
		os.WriteFile(filepath.Join(w.dir, ocispec.ImageIndexFile), index, 0o644),
		os.RemoveAll(dir), os.Rename(w.dir, dir))
}
