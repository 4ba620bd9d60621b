package oci_test

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/image"
)

var (
	amd64  = image.Platform{OS: "linux", Arch: "amd64"}
	layerA = testimage.Layer{Entries: []testimage.Entry{testimage.File("a", "A")}}
	layerB = testimage.Layer{Entries: []testimage.Entry{testimage.File("b", "B")}, Codec: "zstd"}
)

func open(t *testing.T, src string, p image.Platform) *oci.Image {
	t.Helper()
	im, err := oci.Open(t.Context(), src, oci.Config{Platform: p})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := im.Close(); err != nil {
			t.Error(err)
		}
	})
	return im
}

func openError(t *testing.T, src string, p image.Platform, words ...string) {
	t.Helper()
	im, err := oci.Open(t.Context(), src, oci.Config{Platform: p})
	if err == nil {
		im.Close()
		t.Fatalf("%s opened, want an error with %q", src, words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

func TestAnImageIsReadFromFolderAndArchive(t *testing.T) {
	l := testimage.New(t)
	d := l.Image(testimage.Image{Layers: []testimage.Layer{layerA, layerB}, Config: map[string]any{"User": "u"}})
	l.Tag("v1", d)
	archive := l.Archive()
	for _, src := range []string{
		l.Source(""), l.Source(":v1"), l.Source("@" + d.Digest),
		"oci-archive:" + archive, "oci-archive:" + archive + ":v1", "oci-archive:" + archive + "@" + d.Digest,
	} {
		im := open(t, src, image.Platform{})
		if im.Source.String() != d.Digest || im.Platform != amd64 {
			t.Errorf("%s: source %s, platform %s", src, im.Source, im.Platform)
		}
		if chunk.Sum(im.Config) != im.ConfigDigest || !bytes.Contains(im.Config, []byte(`"User":"u"`)) {
			t.Errorf("%s: config %s", src, im.Config)
		}
		if len(im.Layers) != 2 || im.Layers[1].MediaType != testimage.MediaZstd {
			t.Fatalf("%s: layers %+v", src, im.Layers)
		}
		for i, want := range im.Layers {
			r, err := im.LayerReader(t.Context(), i)
			if err != nil {
				t.Fatal(err)
			}
			p, err := io.ReadAll(r)
			if err != nil || r.Close() != nil || chunk.Sum(p) != want.Digest || int64(len(p)) != want.Size {
				t.Errorf("%s: layer %d: %d bytes of %s, error %v", src, i, len(p), chunk.Sum(p), err)
			}
		}
		if got := im.Layers[0].DiffID; got != chunk.Sum(testimage.Tar(t, layerA.Entries...)) {
			t.Errorf("%s: diffID %s", src, got)
		}
	}
}

func TestASourceOrTagThatIsNotThereIsNamed(t *testing.T) {
	l := testimage.New(t)
	d1, d2 := l.Image(testimage.Image{Layers: []testimage.Layer{layerA}}), l.Image(testimage.Image{Layers: []testimage.Layer{layerB}})
	l.Tag("one", d1)
	l.Tag("two", d2)
	gz := filepath.Join(t.TempDir(), "x.tar.gz")
	other := filepath.Join(t.TempDir(), "other.tar")
	write(t, gz, testimage.Gzip(t, make([]byte, 1024)))
	write(t, other, testimage.Tar(t, testimage.File("manifest.json", "[]")))
	tests := map[string]struct {
		src   string
		words []string
	}{
		"an unknown scheme":               {"docker://debian", []string{"docker://debian", "oci:DIR", "oci-archive:FILE"}},
		"no scheme":                       {"debian", []string{"oci:DIR"}},
		"nothing after the scheme":        {"oci:", []string{"oci:DIR"}},
		"a folder that is not there":      {"oci:/nowhere:latest", []string{"/nowhere", "no such file"}},
		"a folder that is no layout":      {"oci:" + t.TempDir(), []string{"not an OCI layout"}},
		"an archive that is not there":    {"oci-archive:/nowhere.tar", []string{"/nowhere.tar", "no such file"}},
		"an archive of something else":    {"oci-archive:" + other, []string{"no oci-layout"}},
		"a compressed archive of nothing": {"oci-archive:" + gz, []string{"no oci-layout"}},
		"an archive of docker save":       {"oci-archive:" + other, []string{"docker-archive:"}},
		"a tag that is not there":         {l.Source(":three"), []string{`no tag "three"`, "one, two"}},
		"one of several tags not given":   {l.Source(""), []string{"2 images", "one, two"}},
		"a digest that is not there":      {l.Source("@sha256:" + strings.Repeat("0", 64)), []string{"no image sha256:000", "one, two"}},
		"a digest that is none":           {l.Source("@sha256:12"), []string{"64 lower-case hex digits"}},
		"an empty layout":                 {testimage.New(t).Source(""), []string{"names no image"}},
		"a tag of an empty layout":        {testimage.New(t).Source(":x"), []string{`no tag "x": there are none`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) { openError(t, tt.src, image.Platform{}, tt.words...) })
	}
}

func write(t *testing.T, path string, p []byte) {
	t.Helper()
	if err := os.WriteFile(path, p, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestOneImageUnderTwoTagsIsTheOnlyOne(t *testing.T) {
	l := testimage.New(t)
	d := l.Image(testimage.Image{Layers: []testimage.Layer{layerA}})
	l.Tag("one", d)
	l.Tag("two", d)
	if im := open(t, l.Source(""), amd64); im.Source.String() != d.Digest {
		t.Errorf("source %s", im.Source)
	}
}

// build makes a layout whose tag latest is what make returns.
func build(t *testing.T, make func(l *testimage.Layout) testimage.Descriptor) (*testimage.Layout, testimage.Descriptor) {
	t.Helper()
	l := testimage.New(t)
	d := make(l)
	l.Tag("latest", d)
	return l, d
}

func TestBadDocumentsAreRefused(t *testing.T) {
	type layout = testimage.Layout
	type descriptor = testimage.Descriptor
	simple := testimage.Image{Layers: []testimage.Layer{layerA}}
	conf := []byte(`{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":[]}}`)
	withConf := func(s string) testimage.Image { return testimage.Image{Layers: simple.Layers, RawConf: []byte(s)} }
	raw := func(mediaType, s string) func(*layout) descriptor {
		return func(l *layout) descriptor { return l.Blob(mediaType, []byte(s)) }
	}
	img := func(im testimage.Image) func(*layout) descriptor {
		return func(l *layout) descriptor { return l.Image(im) }
	}
	upper := strings.Repeat("AB", 32)
	tests := map[string]struct {
		make  func(l *layout) descriptor
		words []string
	}{
		"a manifest of other bytes": {func(l *layout) descriptor {
			d := l.Image(simple)
			flip(t, l.BlobPath(d.Digest))
			return d
		}, []string{"is damaged", "content has digest"}},
		"a manifest of another size": {func(l *layout) descriptor {
			d := l.Image(simple)
			d.Size++
			return d
		}, []string{"its descriptor says"}},
		"a manifest that is missing": {func(l *layout) descriptor {
			d := l.Image(simple)
			if err := os.Remove(l.BlobPath(d.Digest)); err != nil {
				t.Fatal(err)
			}
			return d
		}, []string{"blob is missing"}},
		"a config of other bytes": {func(l *layout) descriptor {
			d := l.Image(testimage.Image{RawConf: conf})
			flip(t, l.BlobPath(testimage.Digest(conf)))
			return d
		}, []string{"config of manifest", testimage.Digest(conf), "is damaged"}},
		"a manifest that is too large":        {raw(testimage.MediaManifest, strings.Repeat(" ", oci.MaxManifest+1)), []string{"at most 4194304"}},
		"a config that is too large":          {img(testimage.Image{RawConf: make([]byte, image.MaxConfig+1)}), []string{"at most 8388608"}},
		"a manifest that is not JSON":         {raw(testimage.MediaManifest, "hello"), []string{"not a JSON manifest"}},
		"a manifest with something after it":  {raw(testimage.MediaManifest, `{"schemaVersion":2,"config":{},"layers":[]}{}`), []string{"not a JSON manifest"}},
		"a manifest without config":           {raw(testimage.MediaManifest, `{"schemaVersion":2,"layers":[]}`), []string{"no config"}},
		"an index without manifests":          {raw(testimage.MediaIndex, `{"schemaVersion":2}`), []string{"no manifests"}},
		"an index of nothing":                 {raw(testimage.MediaIndex, `{"schemaVersion":2,"manifests":[]}`), []string{"no runnable platform"}},
		"an index called a manifest":          {raw(testimage.MediaManifest, `{"schemaVersion":2,"manifests":[]}`), []string{"wrong content"}},
		"a manifest called an index":          {raw(testimage.MediaIndex, `{"schemaVersion":2,"config":{},"layers":[]}`), []string{"wrong content"}},
		"a document that is both":             {raw(testimage.MediaManifest, `{"schemaVersion":2,"manifests":[],"layers":[]}`), []string{"ambiguous"}},
		"a document with two types":           {raw(testimage.MediaManifest, `{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json","config":{},"layers":[]}`), []string{"calls itself", "docker"}},
		"a schema 1 manifest":                 {raw("application/vnd.docker.distribution.manifest.v1+prettyjws", `{"schemaVersion":1}`), []string{"schema 1"}},
		"a schema 1 manifest in disguise":     {raw(testimage.MediaManifest, `{"schemaVersion":1,"fsLayers":[]}`), []string{"schema 1"}},
		"a descriptor of something else":      {raw("application/vnd.cncf.helm.config.v1+json", `{}`), []string{"helm", "not an image"}},
		"another schema version":              {raw(testimage.MediaManifest, `{"schemaVersion":3}`), []string{"schemaVersion is 3"}},
		"an artifact":                         {img(testimage.Image{ConfType: "application/vnd.oci.empty.v1+json", RawConf: []byte("{}")}), []string{"artifact", "vnd.oci.empty"}},
		"a config that is not JSON":           {img(withConf("hello")), []string{"not a JSON image config", testimage.Digest([]byte("hello"))}},
		"a config without rootfs":             {img(withConf(`{"os":"linux","architecture":"amd64"}`)), []string{"1 layers", "0 diff_ids"}},
		"a config of two diff_ids":            {img(testimage.Image{Layers: simple.Layers, DiffIDs: []string{"a", "b"}}), []string{"1 layers", "2 diff_ids"}},
		"a diff_id in capitals":               {img(testimage.Image{Layers: simple.Layers, DiffIDs: []string{"sha256:" + upper}}), []string{"diff_id of layer 1", upper}},
		"a diff_id of sha512":                 {img(testimage.Image{Layers: simple.Layers, DiffIDs: []string{"sha512:" + upper}}), []string{"diff_id of layer 1", "sha512"}},
		"a rootfs of another type":            {img(withConf(`{"os":"linux","architecture":"amd64","rootfs":{"type":"x","diff_ids":["a"]}}`)), []string{`rootfs type "x"`}},
		"a layer of an unknown type":          {img(testimage.Image{Layers: []testimage.Layer{{MediaType: "application/vnd.in-toto+json"}}}), []string{"layer 1", "in-toto", "not supported"}},
		"a config that names no platform":     {img(testimage.Image{RawConf: []byte("{}")}), []string{"no os and architecture"}},
		"more layers than anyone should have": {img(testimage.Image{Layers: make([]testimage.Layer, oci.MaxLayers+1)}), []string{"1001 layers", "at most 1000"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l, _ := build(t, tt.make)
			openError(t, l.Source(""), image.Platform{}, append(tt.words, l.Dir)...)
		})
	}
}

func flip(t *testing.T, path string) {
	t.Helper()
	p, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	p[len(p)/2] ^= 1
	write(t, path, p)
}

func TestALayerThatIsNotThereIsNamedWhenItIsRead(t *testing.T) {
	for mediaType, word := range map[string]string{
		testimage.MediaGzip: "blob is missing",
		"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip": "urls are never fetched",
	} {
		y := testimage.Layer{Entries: layerA.Entries, MediaType: mediaType}
		l := testimage.Build(t, y)
		im := open(t, l.Source(""), amd64)
		if err := os.Remove(l.BlobPath(im.Layers[0].Digest.String())); err != nil {
			t.Fatal(err)
		}
		_, err := im.LayerReader(t.Context(), 0)
		if err == nil || !strings.Contains(err.Error(), word) || !strings.Contains(err.Error(), im.Layers[0].Digest.String()) {
			t.Errorf("%s: error %v, want one with %q", mediaType, err, word)
		}
	}
}

func TestALayerOfAnotherSizeIsRefusedUnread(t *testing.T) {
	l := testimage.Build(t, layerA)
	im := open(t, l.Source(""), amd64)
	if err := os.Truncate(l.BlobPath(im.Layers[0].Digest.String()), 10); err != nil {
		t.Fatal(err)
	}
	if _, err := im.LayerReader(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "blob has 10 bytes") {
		t.Errorf("error %v", err)
	}
}

// A FIFO that nobody writes to would hold a job, and its place in the queue, for
// ever: no context ends an open(2).
func TestWhatIsNoRegularFileIsRefusedUnopened(t *testing.T) {
	fifo := func(name string) {
		if err := unix.Mkfifo(name, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	alone := filepath.Join(t.TempDir(), "fifo.tar")
	fifo(alone)
	l := testimage.New(t)
	d := l.Image(testimage.Image{Layers: []testimage.Layer{layerA}})
	l.Tag("v1", d)
	index := filepath.Join(l.Dir, "index.json")
	if err := os.Remove(index); err != nil {
		t.Fatal(err)
	}
	fifo(index)
	done := make(chan struct{})
	go func() { // ends with its opens, or with the test binary
		defer close(done)
		openError(t, "oci-archive:"+alone, amd64, "fifo.tar", "not a regular file")
		openError(t, "oci-archive:/dev/null", amd64, "/dev/null", "not a regular file")
		openError(t, "oci-archive:"+t.TempDir(), amd64, "not a regular file")
		openError(t, l.Source(""), amd64, "index.json", "not a regular file")
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("an open waits for a writer of a FIFO")
	}
}
