package measure_test

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/converter"
	"quarry/e2e/corpus/measure"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
)

// noise is n bytes that zstd cannot make smaller, so a chunk of them is stored as
// it is.
func noise(seed uint64, n int) string {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	b := make([]byte, n)
	r.Read(b)
	return string(b)
}

const zeros = 4096 // a chunk that is stored as a frame

// images are two images of one family and one of another.
//
//	one: a = 4096 + 4096 + 1808 bytes; b is a; c begins with a's first 4096 bytes,
//	     then 4096 and 100 of its own; z is 4096 zeros
//	two: the first layer of one again, built another time; c is gone, d has 50
//	three: a alone
func images(t *testing.T) []measure.Image {
	t.Helper()
	a := noise(1, 10000)
	c := a[:4096] + noise(2, 4196)
	first := []testimage.Entry{testimage.File("a", a), testimage.File("b", a), testimage.Hardlink("l", "a"), testimage.File("c", c)}
	later := slices.Clone(first)
	for i := range later {
		later[i] = later[i].WithMtime(testimage.Mtime.Add(time.Hour))
	}
	build := func(layers ...testimage.Layer) string { return testimage.Build(t, layers...).Dir }
	return []measure.Image{
		{Name: "one", Family: "f", Layout: build(testimage.Layer{Entries: first},
			testimage.Layer{Entries: []testimage.Entry{testimage.File("z", strings.Repeat("\x00", zeros))}})},
		{Name: "two", Family: "f", Layout: build(testimage.Layer{Entries: later},
			testimage.Layer{Entries: []testimage.Entry{testimage.File(".wh.c", ""), testimage.File("d", noise(3, 50))}})},
		{Name: "three", Family: "g", Layout: build(testimage.Layer{Entries: []testimage.Entry{testimage.File("a", a)}})},
	}
}

func read(t *testing.T, cfg measure.Config) *measure.Report {
	t.Helper()
	cfg.TmpDir = t.TempDir()
	c, err := measure.Read(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// packOf is the length of one pack of n chunks with that many stored bytes, from
// store/pack/FORMAT.md: header 12, record headers 56, footer tag 4, entries 48,
// trailer 20.
func packOf(n, stored int64) int64 { return 12 + 56*n + stored + 4 + 48*n + 20 }

func TestColumnsOfTwoTinyFamilies(t *testing.T) {
	ims := images(t)
	r := read(t, measure.Config{Images: ims, Sizes: []int64{4096, 8192}})
	_, frame := pack.Compress(nil, make([]byte, zeros))
	z := int64(len(frame))
	if z >= 100 {
		t.Fatalf("4096 zeros are stored as %d bytes", z)
	}

	type row struct{ Chunks, Plain, Stored, Pack int64 }
	// Distinct chunks of image one at 4096: a 4096 4096 1808, c 4096 100, z 4096.
	// At 8192: a 8192 1808, c 8192 100, z 4096. Image two adds d.
	want := map[string]struct {
		Images, Layers               int
		Files, Raw, Image, FileBytes int64
		Small, Large                 row
	}{
		// Raw: one 2·10000 + 8292 + 4096, two 2·10000 + 8292 + 0 + 50, three 10000.
		// Trees: one as raw, since l is a link; two without c.
		"all": {
			Images: 3, Layers: 5, Files: 4 + 5 + 1, Raw: 32388 + 28342 + 10000, Image: 32388 + 20050 + 10000,
			FileBytes: 10000 + 8292 + 4096 + 50,
			Small:     row{7, 14196 + 4096 + 50, 14196 + z + 50, packOf(7, 14196+z+50)},
			Large:     row{6, 18292 + 4096 + 50, 18292 + z + 50, packOf(6, 18292+z+50)},
		},
		"f": {
			Images: 2, Layers: 4, Files: 9, Raw: 60730, Image: 52438, FileBytes: 22438,
			Small: row{7, 18342, 14246 + z, packOf(7, 14246+z)},
			Large: row{6, 22438, 18342 + z, packOf(6, 18342+z)},
		},
		"g": {
			Images: 1, Layers: 1, Files: 1, Raw: 10000, Image: 10000, FileBytes: 10000,
			Small: row{3, 10000, 10000, packOf(3, 10000)},
			Large: row{2, 10000, 10000, packOf(2, 10000)},
		},
	}
	if len(r.Groups) != len(want) || r.Groups[0].Name != "all" {
		t.Fatalf("got %d groups, the first %q", len(r.Groups), r.Groups[0].Name)
	}
	for _, g := range r.Groups {
		w := want[g.Name]
		if g.Images != w.Images || g.Layers != w.Layers || g.Files != w.Files || g.RawBytes != w.Raw || g.ImageBytes != w.Image || g.FileBytes != w.FileBytes {
			t.Errorf("%s: got %+v, want %+v", g.Name, g, w)
		}
		for i, wr := range []row{w.Small, w.Large} {
			f := g.Fixed[i]
			if got := (row{f.Chunks, f.PlainBytes, f.StoredBytes, f.PackBytes}); got != wr {
				t.Errorf("%s, S = %d: got %+v, want %+v", g.Name, f.Size, got, wr)
			}
			// A key and its location are at least 32 + 32 bytes before compression.
			if f.IndexBytes < 64*f.Chunks {
				t.Errorf("%s, S = %d: an index of %d bytes for %d chunks", g.Name, f.Size, f.IndexBytes, f.Chunks)
			}
			checkCDC(t, g, g.CDC[i])
		}
	}
	checkLayers(t, ims, r)
	checkBootstraps(t, ims, r)
}

// checkCDC checks what holds for any way of cutting: everything distinct is
// there once, and nothing is stored twice as the fixed cut may do.
func checkCDC(t *testing.T, g measure.Group, row measure.Row) {
	t.Helper()
	if row.Chunks == 0 || row.PlainBytes > g.FileBytes || row.StoredBytes > row.PlainBytes || row.PackBytes != packOf(row.Chunks, row.StoredBytes) {
		t.Errorf("%s, content-defined: %+v of %d file bytes", g.Name, row, g.FileBytes)
	}
}

// checkLayers compares with the blobs of the layouts: no two layers are equal, so
// layer deduplication saves nothing.
func checkLayers(t *testing.T, ims []measure.Image, r *measure.Report) {
	t.Helper()
	all := r.Groups[0]
	if all.GzipBytes != all.LayerBytes || all.LayerBytes != r.Groups[1].LayerBytes+r.Groups[2].LayerBytes || all.DiffIDBytes <= all.RawBytes {
		t.Errorf("layers: %+v", all)
	}
	twice := read(t, measure.Config{Images: append(slices.Clone(ims), measure.Image{Name: "again", Family: "h", Layout: ims[0].Layout}), Sizes: []int64{4096}})
	one := read(t, measure.Config{Images: ims[:1], Sizes: []int64{4096}}).Groups[0]
	got := twice.Groups[0]
	if got.GzipBytes != all.GzipBytes+one.GzipBytes || got.LayerBytes != all.LayerBytes || got.DiffIDBytes != all.DiffIDBytes || got.RawBytes != all.RawBytes+one.RawBytes {
		t.Errorf("with one image twice: %+v, without %+v", got, all)
	}
}

// checkBootstraps compares with the trees that the converter makes.
func checkBootstraps(t *testing.T, ims []measure.Image, r *measure.Report) {
	t.Helper()
	for i, size := range r.Sizes {
		var want int64
		for _, im := range ims {
			tr, err := converter.SourceTree(t.Context(), "oci:"+im.Layout, image.Platform{}, uint32(size))
			if err != nil {
				t.Fatal(err)
			}
			b, err := rafs.Encode(tr)
			if err != nil {
				t.Fatal(err)
			}
			want += int64(len(b))
		}
		got := r.Groups[0].Fixed[i]
		if got.BootstrapBytes != want || got.BootstrapZstd <= 0 || got.BootstrapZstd >= want {
			t.Errorf("S = %d: bootstraps of %d bytes, %d on the wire, want %d", size, got.BootstrapBytes, got.BootstrapZstd, want)
		}
	}
}

// A file longer than a piece is cut as a conversion cuts it.
func TestFileOfSeveralPieces(t *testing.T) {
	body := noise(4, chunk.MaxSize+5000)
	l := testimage.Build(t, testimage.Layer{Entries: []testimage.Entry{testimage.File("big", body), testimage.File("shifted", "x"+body)}})
	r := read(t, measure.Config{Images: []measure.Image{{Name: "big", Family: "f", Layout: l.Dir}}, Sizes: []int64{64 << 10, 1 << 20}})
	g := r.Groups[0]
	checkBootstraps(t, []measure.Image{{Layout: l.Dir}}, r)
	n := int64(len(body))
	if g.FileBytes != 2*n+1 || g.Fixed[0].PlainBytes != 2*n+1 || g.Fixed[0].Chunks != 2*129 || g.Fixed[1].Chunks != 2*9 {
		t.Errorf("got %+v", g)
	}
	if got := g.CDC[0].PlainBytes; got > n*12/10 {
		t.Errorf("content-defined chunks of a file and of it with one byte more before are %d bytes, want hardly more than %d", got, n)
	}
}

func TestColdCommands(t *testing.T) {
	ims := images(t)[:1]
	cmds := []measure.Command{{Image: "one", Args: []string{"x"}}, {Image: "one", Args: []string{"y"}}, {Image: "other", Args: []string{"z"}}}
	cfg := measure.Config{Images: ims, Sizes: []int64{4096, 8192}, Commands: cmds}
	cfg.Trace = func(_ context.Context, im measure.Image, got []measure.Command) ([]measure.Touched, error) {
		if im.Name != "one" || len(got) != 2 {
			t.Errorf("asked for %d commands of %s", len(got), im.Name)
		}
		return []measure.Touched{
			{"/a": {{Off: 0, Len: 4096}, {Off: 8192, Len: 4096}}, "/c": {{Off: 0, Len: 4096}}}, // the last page is cut to 1808
			{"/z": {{Off: 0, Len: 1}}},
		}, nil
	}
	_, frame := pack.Compress(nil, make([]byte, zeros))
	want := []measure.ColdStart{
		{Image: "one", Command: []string{"x"}, Files: 2, Pages: 4096 + 1808 + 4096, Fixed: []measure.Fetched{
			{Size: 4096, Chunks: 2, PlainBytes: 4096 + 1808, StoredBytes: 4096 + 1808}, // c's first chunk is a's
			{Size: 8192, Chunks: 3, PlainBytes: 8192 + 1808 + 8192, StoredBytes: 8192 + 1808 + 8192},
		}},
		{Image: "one", Command: []string{"y"}, Files: 1, Pages: 1, Fixed: []measure.Fetched{
			{Size: 4096, Chunks: 1, PlainBytes: 4096, StoredBytes: int64(len(frame))},
			{Size: 8192, Chunks: 1, PlainBytes: 4096, StoredBytes: int64(len(frame))},
		}},
	}
	if diff := cmp.Diff(want, read(t, cfg).Cold); diff != "" {
		t.Errorf("cold starts (-want +got):\n%s", diff)
	}

	for name, bad := range map[string]measure.Touched{
		"no such file":     {"/nothing": {{Off: 0, Len: 1}}},
		"behind the end":   {"/a": {{Off: 10000, Len: 1}}},
		"nothing":          {"/a": {{Off: 5, Len: 0}}},
		"before the start": {"/a": {{Off: -1, Len: 4}}},
	} {
		cfg.Trace = func(context.Context, measure.Image, []measure.Command) ([]measure.Touched, error) {
			return []measure.Touched{bad, bad}, nil
		}
		if _, err := measure.Read(t.Context(), cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestReportIsRefusedOrWhole(t *testing.T) {
	for _, sizes := range [][]int64{{5000}, {8192, 4096}, {4096, 4096}, {2 * chunk.MaxSize}} {
		if _, err := measure.Read(t.Context(), measure.Config{Sizes: sizes}); err == nil {
			t.Errorf("sizes %v are accepted", sizes)
		}
	}
	if _, err := measure.Read(t.Context(), measure.Config{Sizes: []int64{4096}, Images: []measure.Image{{Name: "gone", Layout: t.TempDir()}}}); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("a missing image: %v", err)
	}
}

func TestDocumentAndTable(t *testing.T) {
	r := read(t, measure.Config{Images: images(t), Sizes: []int64{4096, 1 << 20}})
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back measure.Report
	if err := json.Unmarshal(raw, &back); err != nil {
		t.Fatal(err)
	}
	if back.Version != measure.Version || cmp.Diff(*r, back) != "" {
		t.Errorf("the document reads back as %+v", back)
	}
	var out bytes.Buffer
	if err := r.Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"layer-dedup", "diffID-dedup", "S = 4 KiB", "S = 1 MiB", "CDC 1 MiB", "0.1"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
}
