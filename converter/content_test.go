package converter_test

import (
	"context"
	"errors"
	"io"
	"os"
	"testing"

	"quarry/converter"
	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/image"
)

// pushed is the blobs of a layout as what was pushed.
type pushed struct{ *testimage.Layout }

func (p pushed) Open(_ context.Context, d chunk.Digest) (io.ReadCloser, int64, error) {
	f, err := os.Open(p.BlobPath(d.String()))
	if os.IsNotExist(err) {
		return nil, 0, oci.ErrNoBlob
	}
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	return f, st.Size(), err
}

func (s *store) convertPushed(t *testing.T, l *testimage.Layout, d testimage.Descriptor) (*converter.Result, error) {
	t.Helper()
	source, err := chunk.Parse(d.Digest)
	if err != nil {
		t.Fatal(err)
	}
	return converter.Convert(t.Context(), s.Config, converter.Request{Source: "t/x:v1", Content: pushed{l}, Digest: source})
}

// What was pushed becomes the image that its layout becomes, and no name moves.
func TestAPushedImageIsTheImageOfItsLayout(t *testing.T) {
	l := testimage.New(t)
	d := l.Image(testimage.Image{Layers: []testimage.Layer{
		layerOf(testimage.File("a", "one"), testimage.File("b", "two")), layerOf(testimage.File(".wh.a", "")),
	}})
	l.Tag("latest", d)
	one, two := newStore(t), newStore(t)
	want := one.convert(t, l.Source(""))
	got, err := two.convertPushed(t, l, d)
	if err != nil {
		t.Fatal(err)
	}
	if got.ImageID != want.ImageID || got.Source != want.Source {
		t.Errorf("pushed is %s of %s, the layout %s of %s", got.ImageID, got.Source, want.ImageID, want.Source)
	}
	if names := two.Catalog.Names(); len(names) != 0 {
		t.Errorf("names moved: %v", names)
	}
	again, err := two.convertPushed(t, l, d)
	if err != nil || again.LayersReused != 2 || again.NewChunks != 0 {
		t.Errorf("once more: %+v, %v", again, err)
	}
}

func TestAnErrorOfAnImageNamesLayerAndEntry(t *testing.T) {
	l := testimage.New(t)
	good := layerOf(testimage.File("a", "one"))
	bad := layerOf(testimage.File("dir/ok", "1"), testimage.Device("dir/odd", '3', 1<<20, 1))
	merged := layerOf(testimage.File("dir/.wh.", "")) // a whiteout of nothing
	for name, c := range map[string]struct {
		layer testimage.Layer
		entry string
	}{"in reading": {bad, "dir/odd"}, "in merging": {merged, "dir/.wh."}} {
		_, err := newStore(t).convertPushed(t, l, l.Image(testimage.Image{Layers: []testimage.Layer{good, c.layer}}))
		layer, isLayer := errors.AsType[*converter.LayerError](err)
		entry, isEntry := errors.AsType[*image.EntryError](err)
		d, _ := l.Layer(c.layer)
		if !isLayer || !isEntry || layer.Layer.String() != d.Digest || entry.Entry != c.entry || !errors.As(err, new(*converter.InputError)) {
			t.Errorf("%s: got %v, want layer %s, entry %s", name, err, d.Digest, c.entry)
		}
	}
}
