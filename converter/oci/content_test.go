package oci_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/image"
)

// pushed is a layout's blobs as what was pushed; broken are those that cannot be
// read at this moment.
type pushed struct {
	*testimage.Layout
	broken map[string]bool
}

func (p pushed) Open(_ context.Context, d chunk.Digest) (io.ReadCloser, int64, error) {
	if p.broken[d.String()] {
		return nil, 0, fs.ErrPermission
	}
	f, err := os.Open(p.BlobPath(d.String()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, oci.ErrNoBlob
	}
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	return f, st.Size(), err
}

func parsed(t *testing.T, d testimage.Descriptor) chunk.Digest {
	t.Helper()
	v, err := chunk.Parse(d.Digest)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestPlatformsOfWhatWasPushed(t *testing.T) {
	l := testimage.New(t)
	of := func(platform string) testimage.Descriptor {
		return l.Image(testimage.Image{Platform: platform, Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("p", platform)}}}})
	}
	amd, arm, s390, v7 := of("linux/amd64"), of("linux/arm64/v8"), of("linux/s390x"), of("linux/arm/v7")
	untold := of("linux/arm64")
	untold.Platform = nil
	missing := l.Image(testimage.Image{Platform: "linux/arm64", Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.Dir("missing")}}}})
	if err := os.Remove(l.BlobPath(missing.Digest)); err != nil {
		t.Fatal(err)
	}
	artifact := l.Image(testimage.Image{ConfType: "application/vnd.example.thing", RawConf: []byte("{}")})
	artifact.Platform = nil
	want := []image.Platform{{OS: "linux", Arch: "amd64"}, {OS: "linux", Arch: "arm64"}}
	p := pushed{l, nil}
	for name, c := range map[string]struct {
		source testimage.Descriptor
		want   []string
	}{
		"one manifest":                  {amd, []string{""}},
		"one manifest of another kind":  {s390, []string{""}},
		"an index":                      {l.Index(attestation(l, amd), s390, arm, amd, v7, amd), []string{"linux/amd64", "linux/arm64"}},
		"a nested index":                {l.Index(l.Index(amd), attestation(l, amd)), []string{"linux/amd64"}},
		"an index that tells nothing":   {l.Index(untold), []string{"linux/arm64"}},
		"an index with one that lacks":  {l.Index(missing, amd), []string{"linux/amd64", "linux/arm64"}},
		"an index of others alone":      {l.Index(s390, v7), []string{""}},
		"attestations alone":            {l.Index(attestation(l, amd)), nil},
		"an index of null":              {l.Index(), []string{""}},
		"an empty index":                {l.Index([]testimage.Descriptor{}...), nil},
		"an artifact":                   {artifact, nil},
		"an index of artifacts":         {l.Index(artifact), nil},
		"a document that is no JSON":    {l.Blob(testimage.MediaManifest, []byte("{")), []string{""}},
		"a manifest without its config": {l.JSON(testimage.MediaManifest, map[string]any{"schemaVersion": 2}), []string{""}},
	} {
		list, err := oci.Platforms(t.Context(), p, parsed(t, c.source), want)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var got []string
		for _, p := range list {
			if p == (image.Platform{}) {
				got = append(got, "")
			} else {
				got = append(got, p.String())
			}
		}
		if diff := cmp.Diff(got, c.want); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		for _, platform := range list {
			im, err := oci.OpenContent(t.Context(), p, parsed(t, c.source), oci.Config{Platform: platform})
			if platform != (image.Platform{}) && name != "an index with one that lacks" && (err != nil || im.Platform != platform) {
				t.Errorf("%s for %s: %+v, %v", name, platform, im, err)
			}
		}
	}
	_, err := oci.OpenContent(t.Context(), p, parsed(t, l.Index(s390)), oci.Config{Platform: want[0]})
	if err == nil || !strings.Contains(err.Error(), "nothing for linux/amd64: there are linux/s390x") || errors.Is(err, oci.ErrContent) {
		t.Errorf("a platform that is not there: %v", err)
	}
}

// That a store cannot be read for a moment must not make a job fail for good.
func TestAContentThatIsAwayIsNotTheImagesFault(t *testing.T) {
	l := testimage.New(t)
	im := l.Image(testimage.Image{Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("a", "b")}}}})
	index := l.Index(im)
	want := []image.Platform{{OS: "linux", Arch: "amd64"}}
	for _, away := range []string{im.Digest, index.Digest} {
		p := pushed{l, map[string]bool{away: true}}
		if _, err := oci.Platforms(t.Context(), p, parsed(t, index), want); !errors.Is(err, oci.ErrContent) {
			t.Errorf("platforms: %v", err)
		}
		if _, err := oci.OpenContent(t.Context(), p, parsed(t, index), oci.Config{}); !errors.Is(err, oci.ErrContent) {
			t.Errorf("open: %v", err)
		}
	}
}
