package registry_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"quarry/store/bucket"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/registry"
)

// lab is a registry over a bucket in memory.
type lab struct {
	*registry.Store
	bucket  *mem.Bucket
	catalog *catalog.Catalog
	cfg     registry.Config
}

func newLab(t *testing.T, change func(*registry.Config)) *lab {
	t.Helper()
	b := mem.New()
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: b})
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{bucket: b, catalog: c, cfg: registry.Config{Bucket: b, Names: c, Dir: t.TempDir()}}
	if change != nil {
		change(&l.cfg)
	}
	l.open(t)
	return l
}

// open opens the registry, once more as after a restart.
func (l *lab) open(t *testing.T) {
	t.Helper()
	s, err := registry.Open(l.cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	l.Store = s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got error %v, want %v", what, got, want)
	}
}

// push makes content a blob of repo, in one piece.
func (l *lab) push(t *testing.T, repo string, content []byte) digest.Digest {
	t.Helper()
	d := digest.FromBytes(content)
	must(t, l.pushAs(t, repo, content, d))
	return d
}

func (l *lab) pushAs(t *testing.T, repo string, content []byte, d digest.Digest) error {
	t.Helper()
	id, err := l.StartUpload(repo, "")
	must(t, err)
	return l.FinishUpload(t.Context(), repo, id, part(content), d)
}

func part(content []byte) registry.Part {
	return registry.Part{Body: bytes.NewReader(content), At: -1, Size: int64(len(content))}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	must(t, err)
	return b
}

func describe(mediaType string, content []byte) v1.Descriptor {
	return v1.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
}

// image pushes config and layers and returns their manifest.
func (l *lab) image(t *testing.T, repo string, layers ...string) []byte {
	t.Helper()
	config := []byte("{}")
	l.push(t, repo, config)
	m := v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
		Config: describe(v1.MediaTypeImageConfig, config), Layers: []v1.Descriptor{},
	}
	for _, layer := range layers {
		l.push(t, repo, []byte(layer))
		m.Layers = append(m.Layers, describe(v1.MediaTypeImageLayer, []byte(layer)))
	}
	return encode(t, m)
}

func (l *lab) put(t *testing.T, repo string, body []byte, tags ...string) digest.Digest {
	t.Helper()
	m, err := l.PutManifest(t.Context(), registry.PutRequest{Repo: repo, Body: body, Tags: tags})
	must(t, err)
	return m.Digest
}

func (l *lab) manifest(t *testing.T, repo string, d digest.Digest) (m registry.Manifest, body []byte, err error) {
	t.Helper()
	if m, err = l.StatManifest(t.Context(), repo, d); err == nil {
		body, err = l.ReadManifest(t.Context(), m)
	}
	return m, body, err
}

// objects counts the objects below a prefix.
func objects(t *testing.T, b bucket.Bucket, prefix string) int {
	t.Helper()
	n := 0
	for _, err := range b.List(t.Context(), prefix) {
		must(t, err)
		n++
	}
	return n
}
