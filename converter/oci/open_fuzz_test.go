package oci_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/image"
)

// Documents of one image. An index in an index takes the places one further down:
// the manifest is the config's, the config the layer's.
const (
	fuzzIndex = `{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"@manifest","size":@manifestsize,` +
		`"platform":{"os":"linux","architecture":"amd64"},"annotations":{"org.opencontainers.image.ref.name":"latest"}}]}`
	fuzzManifest = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json",` +
		`"digest":"@config","size":@configsize},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"@layer","size":@layersize}]}`
	fuzzConfig = `{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":["@layer"]}}`
	fuzzDocker = `[{"Config":"config.json","RepoTags":["img:latest"],"Layers":["a/layer.tar"]}]`

	fuzzNested = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"mediaType":"application/vnd.oci.image.index.v1+json",` +
		`"digest":"@manifest","size":@manifestsize},{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"@config","size":@configsize,` +
		`"platform":{"os":"unknown","architecture":"unknown"},"annotations":{"vnd.docker.reference.type":"attestation-manifest"}}]}`
	fuzzInner = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[` +
		`{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"@config","size":@configsize}]}`
	fuzzDeep = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json",` +
		`"digest":"@layer","size":@layersize},"layers":[]}`
	fuzzBare = `{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":[]}}`
)

// expand puts digests and sizes in place of their names, so that documents a
// fuzzer changes still hang together.
func expand(doc []byte, blobs ...[]byte) []byte {
	for i, name := range []string{"layer", "config", "manifest"}[:len(blobs)] {
		doc = bytes.ReplaceAll(doc, []byte("@"+name+"size"), []byte(strconv.Itoa(len(blobs[i]))))
		doc = bytes.ReplaceAll(doc, []byte("@"+name), []byte(testimage.Digest(blobs[i])))
	}
	return doc
}

// fuzzArchive is an archive of the documents, kind 0 of a layout and 1 of docker
// save, or top as it stands.
func fuzzArchive(kind uint8, top, manifest, config, blob []byte) (scheme string, archive []byte) {
	var b bytes.Buffer
	add := func(name string, p []byte) { b.Write(testimage.RawTar(testimage.File(name, string(p)))) }
	config = expand(config, blob)
	switch kind % 4 {
	case 0:
		manifest = expand(manifest, blob, config)
		add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
		for _, p := range [][]byte{blob, config, manifest} {
			add("blobs/sha256/"+strings.TrimPrefix(testimage.Digest(p), "sha256:"), p)
		}
		add("index.json", expand(top, blob, config, manifest))
		scheme = "oci-archive"
	case 1:
		add("a/layer.tar", blob)
		b.Write(testimage.RawTar(testimage.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "b/layer.tar", Linkname: string(manifest)}}))
		add("config.json", config)
		add("manifest.json", expand(top, blob, config))
		scheme = "docker-archive"
	case 2:
		return "oci-archive", top
	case 3:
		return "docker-archive", top
	}
	b.Write(testimage.EndMarker)
	return scheme, b.Bytes()
}

// Whatever an archive holds, opening it gives an image whose layers can be read,
// or an error that names the archive.
func FuzzOpen(f *testing.F) {
	blob := testimage.Tar(f, testimage.File("f", "x"))
	f.Add(uint8(0), []byte(fuzzIndex), []byte(fuzzManifest), []byte(fuzzConfig), blob)
	f.Add(uint8(0), []byte(fuzzNested), []byte(fuzzInner), []byte(fuzzDeep), []byte(fuzzBare))
	f.Add(uint8(0), []byte(fuzzIndex), []byte(fuzzManifest), []byte("{}"), []byte{})
	f.Add(uint8(1), []byte(fuzzDocker), []byte("../a/layer.tar"), []byte(fuzzConfig), blob)
	f.Add(uint8(1), []byte(strings.Replace(fuzzDocker, "a/layer", "b/layer", 1)), []byte("../../../etc/passwd"), []byte(fuzzConfig), testimage.Gzip(f, blob))
	for _, doc := range []string{`{"schemaVersion":2,"manifests":[],"layers":[]}`, `{"schemaVersion":1,"fsLayers":[]}`, "[]", "null"} {
		f.Add(uint8(0), []byte(fuzzIndex), []byte(doc), []byte(fuzzConfig), blob)
		f.Add(uint8(1), []byte(doc), []byte{}, []byte(fuzzConfig), blob)
	}
	f.Add(uint8(1), []byte(`[{"Config":"../../config.json","Layers":["../1.tar","/etc/passwd"]}]`), []byte{}, []byte(fuzzConfig), blob)
	for kind, top := range []string{fuzzIndex, fuzzDocker} {
		_, archive := fuzzArchive(uint8(kind), []byte(top), []byte(fuzzManifest), []byte(fuzzConfig), blob)
		f.Add(uint8(2+kind), archive, []byte{}, []byte{}, []byte{})
		f.Add(uint8(2+kind), testimage.Gzip(f, archive), []byte{}, []byte{}, []byte{})
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, kind uint8, top, manifest, config, blob []byte) {
		scheme, archive := fuzzArchive(kind, top, manifest, config, blob)
		path := filepath.Join(dir, fmt.Sprint("archive", os.Getpid()))
		if err := os.WriteFile(path, archive, 0o600); err != nil {
			t.Fatal(err)
		}
		const most = 1 << 20
		cfg := oci.Config{TmpDir: dir, Limits: layer.Limits{MaxBytes: most, MaxEntries: 1000, MaxMetadata: most}}
		im, err := oci.Open(t.Context(), scheme+":"+path, cfg)
		if err != nil {
			if !strings.Contains(err.Error(), path) {
				t.Fatalf("the error names no archive: %v", err)
			}
			return
		}
		defer im.Close()
		checkImage(t, im)
	})
}

// The seeds of FuzzOpen reach what they are meant for.
func TestFuzzSeedsAreImages(t *testing.T) {
	blob := testimage.Tar(t, testimage.File("f", "x"))
	for _, docs := range [][]string{
		{"\x00", fuzzIndex, fuzzManifest, fuzzConfig, string(blob)},
		{"\x00", fuzzNested, fuzzInner, fuzzDeep, fuzzBare},
		{"\x01", fuzzDocker, "", fuzzConfig, string(blob)},
	} {
		scheme, archive := fuzzArchive(docs[0][0], []byte(docs[1]), []byte(docs[2]), []byte(docs[3]), []byte(docs[4]))
		path := filepath.Join(t.TempDir(), "archive")
		if err := os.WriteFile(path, archive, 0o600); err != nil {
			t.Fatal(err)
		}
		im, err := oci.Open(t.Context(), scheme+":"+path, oci.Config{})
		if err != nil {
			t.Error(err)
			continue
		}
		checkImage(t, im)
		im.Close()
	}
}

func checkImage(t *testing.T, im *oci.Image) {
	t.Helper()
	if im.Source.IsZero() || im.ConfigDigest.String() != testimage.Digest(im.Config) || len(im.Layers) > oci.MaxLayers {
		t.Fatalf("image %s with config %s and %d layers", im.Source, im.ConfigDigest, len(im.Layers))
	}
	if _, err := image.ParsePlatform(im.Platform.String()); err != nil {
		t.Fatalf("platform %q: %v", im.Platform, err)
	}
	for i, l := range im.Layers {
		if l.Size < 0 || l.Digest.IsZero() || l.DiffID.IsZero() {
			t.Fatalf("layer %+v", l)
		}
		r, err := im.LayerReader(t.Context(), i)
		if err != nil {
			continue // the blob is missing or of another size
		}
		_, _ = io.Copy(io.Discard, io.LimitReader(r, 1<<20)) // a damaged archive may end early
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
