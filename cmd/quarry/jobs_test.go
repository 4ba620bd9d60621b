package main

import (
	"errors"
	"testing"

	"quarry/api"
	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/image"
)

// A manifest may name what another repository has: it is not read for whoever
// pushed it, and what becomes of it is not told in other repositories.
func TestWhatIsPushedStaysInItsRepository(t *testing.T) {
	w := newPushWorld(t, false)
	l := testimage.New(t)
	file := testimage.Layer{Entries: []testimage.Entry{testimage.File("f", "1")}}
	layer, _ := l.Layer(file)
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{file}}))
	source := w.push(t, l, "one", "one") // to t/x
	blob, err := chunk.Parse(layer.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		repos []string
		want  error
	}{{nil, nil}, {[]string{"t/x"}, nil}, {[]string{"t/y", "t/x"}, nil}, {[]string{"t/y"}, oci.ErrNoBlob}, {[]string{"t"}, oci.ErrNoBlob}} {
		for what, d := range map[string]chunk.Digest{"manifest": source, "layer": blob} {
			r, _, err := (pushedContent{w.registry, c.repos}).Open(t.Context(), d)
			if !errors.Is(err, c.want) {
				t.Errorf("%s in %q: got %v, want %v", what, c.repos, err, c.want)
			}
			if err == nil {
				r.Close()
			}
		}
	}
	amd64 := image.Platform{OS: "linux", Arch: "amd64"}
	for _, c := range []struct {
		repo   string
		source chunk.Digest
		p      image.Platform
		want   error
	}{
		{"t/x", source, amd64, api.ErrPending},
		{"t/x", source, image.Platform{}, api.ErrPending},
		{"t/y", source, amd64, nil},
		{"t/x", chunk.Digest{}, amd64, nil},
	} {
		if err := w.job(t.Context(), image.Ref{Repo: c.repo, Digest: &c.source}, c.source, c.p); !errors.Is(err, c.want) {
			t.Errorf("%s@%s for %s: got %v, want %v", c.repo, c.source, c.p, err, c.want)
		}
	}
	w.convertAll(t)
}
