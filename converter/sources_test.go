package converter_test

import (
	"archive/tar"
	"bytes"
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"quarry/converter"
	"quarry/converter/tree"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

const (
	mediaDocker     = "application/vnd.docker.image.rootfs.diff.tar"
	mediaDockerGzip = "application/vnd.docker.image.rootfs.diff.tar.gzip"
	mediaDockerZstd = "application/vnd.docker.image.rootfs.diff.tar.zstd"
)

// treeOf returns the tree of a source; its errors are those of Convert.
func treeOf(t *testing.T, src string) (*rafs.Tree, error) {
	t.Helper()
	return converter.SourceTree(t.Context(), src, image.Platform{}, testChunk)
}

// The bytes say how a layer is compressed; media types do not.
func TestBug42MediaTypesThatLie(t *testing.T) {
	plain := testimage.Tar(t, testimage.File("a", strings.Repeat("a", 10_000)), testimage.Dir("d"))
	odd := testimage.Tar(t, testimage.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "\x1f\x8b\x08", Format: tar.FormatGNU}})
	want := ""
	for _, mediaType := range []string{testimage.MediaTar, testimage.MediaGzip, testimage.MediaZstd, mediaDocker, mediaDockerGzip, mediaDockerZstd} {
		for _, codec := range []string{"none", "gzip", "zstd"} {
			l := testimage.Build(t, testimage.Layer{Tar: plain, Codec: codec, MediaType: mediaType}, testimage.Layer{Tar: odd, Codec: codec, MediaType: mediaType})
			tr, err := treeOf(t, l.Source(""))
			if err != nil {
				t.Errorf("%s as %s: %v", codec, mediaType, err)
				continue
			}
			if want = cmp.Or(want, tree.Digest(tr).String()); tree.Digest(tr).String() != want {
				t.Errorf("%s as %s has another tree", codec, mediaType)
			}
		}
		for blob, word := range map[string]string{
			"\xfd7zXZ\x00" + strings.Repeat("x", 600): "compression xz is not supported",
			"BZh9" + strings.Repeat("x", 600):         "compression bzip2 is not supported",
			strings.Repeat("text ", 200):              "neither a tar archive nor gzip nor zstd",
		} {
			l := testimage.Build(t, testimage.Layer{Tar: plain, Blob: []byte(blob), MediaType: mediaType})
			if _, err := treeOf(t, l.Source("")); err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("%s: error %v, want one with %q", mediaType, err, word)
			}
		}
		empty := testimage.Build(t, testimage.Layer{Tar: plain}, testimage.Layer{Tar: []byte{}, Blob: []byte{}, MediaType: mediaType})
		if tr, err := treeOf(t, empty.Source("")); err != nil || len(tr.Root.Entries) != 2 {
			t.Errorf("a layer of no bytes as %s: %v", mediaType, err)
		}
	}
}

func TestBug46ConfigsThatDoNotFit(t *testing.T) {
	a, b := layerOf(testimage.File("a", "A")), layerOf(testimage.File("b", "B"))
	idA, idB := testimage.Digest(testimage.Tar(t, a.Entries...)), testimage.Digest(testimage.Tar(t, b.Entries...))
	conf := func(rest string) []byte { return []byte(`{"os":"linux","architecture":"amd64"` + rest + `}`) }
	rootfs := fmt.Sprintf(`,"rootfs":{"type":"layers","diff_ids":[%q,%q]}`, idA, idB)
	both := []testimage.Layer{a, b}
	tests := map[string]struct {
		image testimage.Image
		words []string // of the error; none: it converts
	}{
		"no rootfs":             {testimage.Image{Layers: both, RawConf: conf("")}, []string{"2 layers", "0 diff_ids"}},
		"an empty rootfs":       {testimage.Image{Layers: both, RawConf: conf(`,"rootfs":{}`)}, []string{"2 layers", "0 diff_ids"}},
		"a layer of no kind":    {testimage.Image{Layers: []testimage.Layer{a, b, {MediaType: "application/x-odd"}}, DiffIDs: []string{idA, idB}}, []string{"3 layers", "2 diff_ids"}},
		"more diff_ids":         {testimage.Image{Layers: both, DiffIDs: []string{idA, idB, idA}}, []string{"2 layers", "3 diff_ids"}},
		"fewer diff_ids":        {testimage.Image{Layers: both, DiffIDs: []string{idA}}, []string{"2 layers", "1 diff_ids"}},
		"diff_ids swapped":      {testimage.Image{Layers: both, DiffIDs: []string{idB, idA}}, []string{"has the diffID " + idA, "says " + idB}},
		"history without sense": {testimage.Image{Layers: both, RawConf: conf(rootfs + `,"history":[{"empty_layer":true},{},{},{},{"empty_layer":true}]`)}, nil},
		"history with too few":  {testimage.Image{Layers: both, RawConf: conf(rootfs + `,"history":[{}]`)}, nil},
		"no history":            {testimage.Image{Layers: both, RawConf: conf(rootfs)}, nil},
		"an empty config":       {testimage.Image{Layers: both, RawConf: []byte("{}"), ConfType: "application/vnd.oci.empty.v1+json"}, []string{"artifact", "vnd.oci.empty"}},
		"no JSON":               {testimage.Image{Layers: both, RawConf: []byte("\x00")}, []string{"not a JSON image config"}},
		"capitals":              {testimage.Image{Layers: both, DiffIDs: []string{strings.ToUpper(idA), idB}}, []string{"diff_id of layer 1"}},
		"sha512":                {testimage.Image{Layers: both, DiffIDs: []string{idA, "sha512:" + strings.Repeat("ab", 64)}}, []string{"diff_id of layer 2"}},
		"no layers at all":      {testimage.Image{RawConf: conf("")}, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := testimage.New(t)
			l.Tag("latest", l.Image(tt.image))
			s := newStore(t)
			if tt.words != nil {
				s.fail(t, l.Source(""), tt.words...)
				return
			}
			s.convert(t, l.Source(""))
		})
	}
}

// manyLayers is an image of n layers: each adds a file, all replace one, every
// tenth removes an earlier one.
func manyLayers(t testing.TB, n int) (*testimage.Layout, []string) {
	var layers []testimage.Layer
	there := map[string]bool{}
	for i := range n {
		name := fmt.Sprintf("n/%03d", i)
		entries := []testimage.Entry{testimage.File(name, fmt.Sprint(i)), testimage.File("same", fmt.Sprint(i))}
		there[name] = true
		if i%10 == 9 {
			gone := fmt.Sprintf("%03d", i/2)
			delete(there, "n/"+gone)
			entries = append(entries, testimage.File("n/.wh."+gone, ""))
		}
		layers = append(layers, layerOf(entries...))
	}
	var names []string
	for name := range there {
		names = append(names, strings.TrimPrefix(name, "n/"))
	}
	slices.Sort(names)
	return testimage.Build(t, layers...), names
}

func TestBug48ManyLayers(t *testing.T) {
	stored := newStore(t)
	for _, n := range []int{128, 1000} {
		l, want := manyLayers(t, n)
		tr, err := treeOf(t, l.Source(""))
		if err != nil {
			t.Fatalf("%d layers: %v", n, err)
		}
		if n == 128 {
			stored.convert(t, l.Source(""))
		}
		var names []string
		for _, e := range tr.Root.Entries[0].Inode.Entries {
			names = append(names, e.Name)
		}
		same := tr.Root.Entries[1].Inode
		if !slices.Equal(names, want) || !slices.Equal(same.Chunks, []chunk.Digest{chunk.Sum([]byte(fmt.Sprint(n - 1)))}) {
			t.Errorf("%d layers: n has %d files, want %d; same has %d bytes", n, len(names), len(want), same.Size)
		}
	}
	v, _ := stored.verified(t, latest)
	if got := stored.files(t, v.Statement)["same"]; !strings.Contains(got, "127") {
		t.Errorf("same is %q", got)
	}
}

// A manifest that refers to another is an image as any; one that refers with no
// content of its own is an artifact.
func TestBug50ASubjectChangesNothing(t *testing.T) {
	l := testimage.New(t)
	d := l.Image(testimage.Image{Layers: []testimage.Layer{base}})
	raw := bytes.TrimSuffix(readFile(t, l.BlobPath(d.Digest)), []byte("}"))
	with := fmt.Appendf(raw, `,"subject":{"mediaType":%q,"digest":%q,"size":7}}`, testimage.MediaManifest, testimage.Digest([]byte("subject")))
	l.Tag("plain", d)
	l.Tag("subject", l.Blob(testimage.MediaManifest, with))
	a, err := treeOf(t, l.Source(":plain"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := treeOf(t, l.Source(":subject"))
	if err != nil {
		t.Fatal(err)
	}
	if tree.Digest(a) != tree.Digest(b) {
		t.Error("the subject changes the tree")
	}
}

// A disk image of 1 TiB with a byte in the middle: what it costs is its digests,
// 32 bytes a chunk in the record and the tree, 8 in the bootstrap.
func TestAHoleOfATerabyteConverts(t *testing.T) {
	const size, s = int64(1) << 40, chunk.DefaultSize
	body := paxSparse("1.0", "disk", size-s, []extent{{size / 2, "x"}, {size - s, ""}}) // with the file behind it MaxChunks exactly
	l := testimage.Build(t, testimage.Layer{Tar: append(body, tarNotation(t, `f end "intact"`)...)})
	tr, err := converter.SourceTree(t.Context(), l.Source(""), image.Platform{}, s)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := rafs.Encode(tr)
	if err != nil {
		t.Fatal(err)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	disk := im.Tree.Root.Entries[0].Inode
	if disk.Size != size-s || disk.Chunks[size/2/s] == disk.Chunks[0] || disk.Chunks[1] != disk.Chunks[len(disk.Chunks)-1] {
		t.Errorf("disk has %d bytes", disk.Size)
	}
	if most := int(size/s)*8 + 1<<20; len(boot) > most {
		t.Errorf("the bootstrap has %d bytes, want at most %d", len(boot), most)
	}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	p, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
