package oci_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/image"
)

func TestListedPlatforms(t *testing.T) {
	l := testimage.New(t)
	of := func(platform string) testimage.Descriptor {
		return l.Image(testimage.Image{Platform: platform, Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("p", platform)}}}})
	}
	attestation := of("linux/amd64")
	attestation.Platform = &testimage.Platform{OS: "unknown", Architecture: "unknown"}
	index := l.Index(of("linux/amd64"), attestation, of("linux/s390x"), of("linux/amd64"), l.Index(of("linux/arm64/v8")))
	l.Tag("index", index)
	one := of("linux/amd64")
	l.Tag("one", one)
	here := image.Platform{OS: "linux", Arch: "amd64"}
	arm := image.Platform{OS: "linux", Arch: "arm64"}
	for _, tt := range []struct {
		tag    string
		source testimage.Descriptor
		want   []image.Platform
		list   []string
	}{
		{"index", index, nil, []string{"linux/amd64", "linux/s390x", "linux/arm64"}},
		{"index", index, []image.Platform{here, arm}, []string{"linux/amd64", "linux/arm64"}},
		{"index", index, []image.Platform{{OS: "linux", Arch: "riscv64"}}, nil},
		{"one", one, nil, nil},
		{"one", one, []image.Platform{arm}, nil},
	} {
		source, list, err := oci.Listed(t.Context(), "oci:"+l.Dir+":"+tt.tag, oci.Config{Platform: here}, tt.want)
		var got []string
		for _, p := range list {
			got = append(got, p.String())
		}
		if err != nil || source != parsed(t, tt.source) || !cmp.Equal(got, tt.list) {
			t.Errorf("%s for %v: got %s, %q, %v; want %q", tt.tag, tt.want, source, got, err, tt.list)
		}
	}
	if _, _, err := oci.Listed(t.Context(), "oci:"+l.Dir+":missing", oci.Config{}, nil); err == nil {
		t.Error("a missing tag: got no error")
	}
}
