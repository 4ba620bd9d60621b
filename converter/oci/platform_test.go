package oci_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/image"
)

// marked is an image that a test can tell from others by its config, which names
// its layer.
func marked(l *testimage.Layout, platform, mark string) testimage.Descriptor {
	return l.Image(testimage.Image{Platform: platform, Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("mark", mark)}}}})
}

// configOf returns the digest of an image's config.
func configOf(t *testing.T, l *testimage.Layout, d testimage.Descriptor) string {
	t.Helper()
	raw, err := os.ReadFile(l.BlobPath(d.Digest))
	if err != nil {
		t.Fatal(err)
	}
	var m testimage.Manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		t.Fatal(err)
	}
	return m.Config.Digest
}

func attestation(l *testimage.Layout, of testimage.Descriptor) testimage.Descriptor {
	d := l.Image(testimage.Image{Layers: []testimage.Layer{{MediaType: "application/vnd.in-toto+json"}}})
	d.Platform = &testimage.Platform{OS: "unknown", Architecture: "unknown"}
	d.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": of.Digest}
	return d
}

func parse(t *testing.T, s string) image.Platform {
	t.Helper()
	if s == "" {
		return image.Platform{}
	}
	p, err := image.ParsePlatform(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestThePlatformAskedForIsChosen(t *testing.T) {
	host := image.HostPlatform().String()
	tests := map[string]struct {
		have       []string // platforms of the index, in order
		want       string
		chosen     int    // position in have
		asPlatform string // of the image
		err        []string
	}{
		"the only one":                  {[]string{"linux/amd64"}, "linux/amd64", 0, "linux/amd64", nil},
		"this machine's by default":     {[]string{"linux/s390x", host, "linux/mips"}, "", 1, host, nil},
		"the second":                    {[]string{"linux/amd64", "linux/arm64"}, "linux/arm64", 1, "linux/arm64", nil},
		"arm64 and arm64/v8 are one":    {[]string{"linux/amd64", "linux/arm64/v8"}, "linux/arm64", 1, "linux/arm64", nil},
		"arm means v7":                  {[]string{"linux/arm/v5", "linux/arm/v6", "linux/arm/v7"}, "linux/arm", 2, "linux/arm/v7", nil},
		"v7 runs v6, the nearest":       {[]string{"linux/arm/v5", "linux/arm/v6"}, "linux/arm/v7", 1, "linux/arm/v6", nil},
		"v6 does not run v7":            {[]string{"linux/arm/v7", "linux/amd64"}, "linux/arm/v6", 0, "", []string{"nothing for linux/arm/v6", "linux/amd64, linux/arm/v7"}},
		"amd64/v3 runs plain amd64":     {[]string{"linux/arm64", "linux/amd64"}, "linux/amd64/v3", 1, "linux/amd64", nil},
		"plain amd64 does not run v3":   {[]string{"linux/amd64/v3"}, "linux/amd64", 0, "", []string{"nothing for linux/amd64", "linux/amd64/v3"}},
		"the first of two that fit":     {[]string{"linux/amd64", "linux/amd64"}, "linux/amd64", 0, "linux/amd64", nil},
		"another operating system":      {[]string{"windows/amd64"}, "linux/amd64", 0, "", []string{"windows/amd64"}},
		"what is not there lists all":   {[]string{"linux/arm64", "linux/amd64"}, "linux/s390x", 0, "", []string{"linux/s390x", "linux/amd64, linux/arm64"}},
		"platforms nobody has heard of": {[]string{"plan9/mips"}, "plan9/mips", 0, "plan9/mips", nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := testimage.New(t)
			var ds []testimage.Descriptor
			for i, p := range tt.have {
				ds = append(ds, marked(l, p, strings.Repeat("x", i+1)))
			}
			index := l.Index(ds...)
			l.Tag("latest", index)
			if tt.err != nil {
				openError(t, l.Source(""), parse(t, tt.want), tt.err...)
				return
			}
			im := open(t, l.Source(""), parse(t, tt.want))
			if got, want := im.ConfigDigest.String(), configOf(t, l, ds[tt.chosen]); got != want {
				t.Errorf("config %s, want %s", got, want)
			}
			if im.Source.String() != index.Digest || im.Platform != parse(t, tt.asPlatform) {
				t.Errorf("source %s, platform %s", im.Source, im.Platform)
			}
		})
	}
}

func TestIndexesOfOtherShapes(t *testing.T) {
	type layout = testimage.Layout
	type descriptor = testimage.Descriptor
	noPlatform := func(d descriptor) descriptor { d.Platform = nil; return d }
	artifact := func(l *layout) descriptor {
		return noPlatform(l.Image(testimage.Image{ConfType: "application/vnd.oci.empty.v1+json", RawConf: []byte("{}")}))
	}
	deep := func(l *layout, n int) descriptor {
		d := marked(l, "linux/amd64", "good")
		for range n {
			d = l.Index(d)
		}
		return d
	}
	good := func(l *layout) descriptor { return marked(l, "linux/amd64", "good") }
	tests := map[string]struct {
		make func(l *layout) descriptor
		err  []string
	}{
		"an attestation first": {func(l *layout) descriptor { return l.Index(attestation(l, good(l)), good(l)) }, nil},
		"an attestation last":  {func(l *layout) descriptor { return l.Index(good(l), attestation(l, good(l))) }, nil},
		"an attestation alone": {func(l *layout) descriptor { return l.Index(attestation(l, good(l))) }, []string{"no runnable platform"}},
		"an artifact first":    {func(l *layout) descriptor { return l.Index(artifact(l), good(l)) }, nil},
		"an artifact alone":    {func(l *layout) descriptor { return l.Index(artifact(l)) }, []string{"no runnable platform", "artifact"}},
		"something that is no manifest": {func(l *layout) descriptor {
			return l.Index(l.Blob("text/plain", []byte("x")), good(l))
		}, nil},
		"no platform told": {func(l *layout) descriptor {
			return l.Index(noPlatform(marked(l, "linux/arm64", "bad")), noPlatform(good(l)))
		}, nil},
		"an index in an index": {func(l *layout) descriptor { return deep(l, 2) }, nil},
		"indexes without end":  {func(l *layout) descriptor { return deep(l, 5) }, []string{"nested more than 4"}},
		"a child that is missing": {func(l *layout) descriptor {
			d := good(l)
			d.Digest = testimage.Digest([]byte("gone"))
			return l.Index(d)
		}, []string{testimage.Digest([]byte("gone")), "blob is missing"}},
		"a missing child of another platform": {func(l *layout) descriptor {
			d := marked(l, "linux/arm64", "bad")
			d.Digest = testimage.Digest([]byte("gone"))
			return l.Index(d, good(l))
		}, nil},
		"a child of another size": {func(l *layout) descriptor {
			d := good(l)
			d.Size--
			return l.Index(d)
		}, []string{"its descriptor says"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l, _ := build(t, tt.make)
			want := configOf(t, l, good(l))
			if tt.err != nil {
				openError(t, l.Source(""), amd64, tt.err...)
				return
			}
			if im := open(t, l.Source(""), amd64); im.ConfigDigest.String() != want {
				t.Errorf("config %s, want %s", im.ConfigDigest, want)
			}
		})
	}
}

func TestOneImageSuitsOnlyItsPlatform(t *testing.T) {
	l, d := build(t, func(l *testimage.Layout) testimage.Descriptor { return marked(l, "linux/arm64/v8", "x") })
	for _, p := range []string{"", "linux/arm64"} {
		if im := open(t, l.Source(""), parse(t, p)); im.Platform.String() != "linux/arm64" || im.Source.String() != d.Digest {
			t.Errorf("asked for %q: platform %s, source %s", p, im.Platform, im.Source)
		}
	}
	openError(t, l.Source(""), amd64, "image is for linux/arm64, not for linux/amd64")
}

func TestAPlatformIsTakenFromTheUserWhenTheConfigHasNone(t *testing.T) {
	l, _ := build(t, func(l *testimage.Layout) testimage.Descriptor { return l.Image(testimage.Image{RawConf: []byte("{}")}) })
	im, err := oci.Open(t.Context(), l.Source(""), oci.Config{Platform: amd64})
	if err != nil {
		t.Fatal(err)
	}
	defer im.Close()
	if im.Platform != amd64 {
		t.Errorf("platform %s", im.Platform)
	}
}
