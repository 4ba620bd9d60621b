package oci_test

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/chunk"
)

// seedDocuments are documents of every kind, good and bad.
func seedDocuments(f *testing.F, l *testimage.Layout) {
	d := l.Image(testimage.Image{Layers: []testimage.Layer{layerA}})
	index := l.Index(d)
	for _, digest := range []string{d.Digest, index.Digest} {
		p, err := os.ReadFile(l.BlobPath(digest))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(p)
	}
	f.Add([]byte(`{"schemaVersion":2,"manifests":[],"layers":[]}`))
	f.Add([]byte(`{"schemaVersion":1,"fsLayers":[]}`))
	f.Add([]byte(`[{"Config":"c.json","RepoTags":["x:latest"],"Layers":["1.tar"]}]`))
	f.Add([]byte(`[{"Config":"../../c.json","Layers":["../1.tar","/etc/passwd"]}]`))
	f.Add([]byte("null"))
}

// Whatever a document says, it is an image that keeps the maxima, or an error
// that names the source.
func FuzzDocument(f *testing.F) {
	l := testimage.New(f)
	seedDocuments(f, l)
	docker := filepath.Join(f.TempDir(), "saved.tar")
	conf := `{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":["` + chunk.Sum(nil).String() + `"]}}`
	f.Fuzz(func(t *testing.T, p []byte) {
		// One folder for all runs, which are one after the other in a process.
		write(t, docker, testimage.Tar(t, testimage.File("c.json", conf), testimage.File("1.tar", "x"), testimage.Symlink("2.tar", "1.tar"), testimage.File("manifest.json", string(p))))
		digest := testimage.Digest(p)
		blob := l.BlobPath(digest)
		if _, err := os.Stat(blob); err != nil {
			defer os.Remove(blob)
		}
		write(t, blob, p)
		index, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": []any{
			map[string]any{"mediaType": testimage.MediaManifest, "digest": digest, "size": len(p), "annotations": map[string]string{"org.opencontainers.image.ref.name": "latest"}},
			map[string]any{"mediaType": testimage.MediaIndex, "digest": digest, "size": len(p), "annotations": map[string]string{"org.opencontainers.image.ref.name": "index"}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(l.Dir, "index.json"), index)
		for _, src := range []string{"docker-archive:" + docker, l.Source(":latest"), l.Source(":index")} {
			im, err := oci.Open(t.Context(), src, oci.Config{Platform: amd64})
			if err != nil {
				if !strings.Contains(err.Error(), src) {
					t.Fatalf("error %q does not name %s", err, src)
				}
				continue
			}
			if len(im.Layers) > oci.MaxLayers || chunk.Sum(im.Config) != im.ConfigDigest {
				t.Fatalf("%d layers, config %s", len(im.Layers), im.ConfigDigest)
			}
			for i := range im.Layers {
				if r, err := im.LayerReader(t.Context(), i); err == nil {
					io.Copy(io.Discard, io.LimitReader(r, 1<<20))
					r.Close()
				}
			}
			im.Close()
		}
	})
}

// A source that is a string of any bytes opens nothing of the host that it does
// not name, asks no host, and fails with its own name.
func FuzzSource(f *testing.F) {
	for _, s := range []string{"oci:x", "oci-archive:x:y", "docker-archive:x@sha256:00", "registry://h:1/r", "registry:////", "oci:", ":", "registry://[::1]/x@sha256:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		t.Chdir(t.TempDir())
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // a registry is not asked
		im, err := oci.Open(ctx, s, oci.Config{})
		if err == nil {
			im.Close()
			t.Fatalf("%q opens", s)
		}
		if _, jerr := json.Marshal(err.Error()); jerr != nil {
			t.Fatal(jerr)
		}
		if oci.IsSource(s) && !strings.Contains(err.Error(), strings.SplitN(s, ":", 2)[0]) {
			t.Fatalf("error %q does not name %q", err, s)
		}
	})
}
