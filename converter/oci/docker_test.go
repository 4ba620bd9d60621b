package oci_test

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/converter/tree"
	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// paths converts a source and returns its paths in order.
func paths(t *testing.T, src string) []string {
	t.Helper()
	im := open(t, src, image.Platform{})
	m := tree.NewMerger(tree.Config{ChunkSize: chunk.MinSize})
	for i, l := range im.Layers {
		r, err := im.LayerReader(t.Context(), i)
		if err != nil {
			t.Fatal(err)
		}
		rec, err := layer.Read(t.Context(), r, layer.Descriptor{Digest: l.Digest, Size: l.Size}, hashed{}, layer.Config{ChunkSize: chunk.MinSize})
		if err != nil || r.Close() != nil {
			t.Fatalf("%s: layer %d: %v", src, i+1, err)
		}
		if rec.DiffID != l.DiffID {
			t.Fatalf("%s: layer %d has diffID %s, the config says %s", src, i+1, rec.DiffID, l.DiffID)
		}
		if err := m.Apply(rec.Entries); err != nil {
			t.Fatal(err)
		}
	}
	var list []string
	walk(m.Tree().Root, "", &list)
	return list
}

func walk(dir *rafs.Inode, path string, list *[]string) {
	for _, e := range dir.Entries {
		p := path + "/" + e.Name
		*list = append(*list, p)
		walk(e.Inode, p, list)
	}
}

// hashed is a store.Putter that keeps nothing.
type hashed struct{}

func (hashed) Put(_ context.Context, p []byte) (chunk.Digest, error) { return chunk.Sum(p), nil }

// saved writes an archive with the given members.
func savedTar(t *testing.T, members ...testimage.Entry) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "saved.tar")
	write(t, path, testimage.Tar(t, members...))
	return path
}

// savedImage is one image of an archive: its config, and manifest.json's entry.
type savedImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func manifestJSON(t *testing.T, images ...savedImage) testimage.Entry {
	t.Helper()
	b, err := json.Marshal(images)
	if err != nil {
		t.Fatal(err)
	}
	return testimage.File("manifest.json", string(b))
}

// configFor is an image config that claims the given plain layers.
func configFor(t *testing.T, plain ...[]byte) string {
	t.Helper()
	ids := []string{}
	for _, p := range plain {
		ids = append(ids, testimage.Digest(p))
	}
	b, err := json.Marshal(map[string]any{"os": "linux", "architecture": "amd64", "rootfs": map[string]any{"type": "layers", "diff_ids": ids}})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestAnArchiveOfDockerSaveIsRead(t *testing.T) {
	a, b := testimage.Tar(t, testimage.File("a", "A")), testimage.Tar(t, testimage.File("b", "B"))
	conf := configFor(t, a, b)
	file := testimage.File
	im := func(layers ...string) savedImage {
		return savedImage{Config: "c.json", RepoTags: []string{"x:latest"}, Layers: layers}
	}
	tests := map[string][]testimage.Entry{
		"manifest.json first": {manifestJSON(t, im("1/layer.tar", "2/layer.tar")), file("c.json", conf), file("1/layer.tar", string(a)), file("2/layer.tar", string(b))},
		"manifest.json last":  {file("c.json", conf), file("1/layer.tar", string(a)), file("2/layer.tar", string(b)), manifestJSON(t, im("1/layer.tar", "2/layer.tar"))},
		"members behind ./":   {file("./c.json", conf), file("./1/layer.tar", string(a)), file("./2/layer.tar", string(b)), manifestJSON(t, im("1/layer.tar", "2/layer.tar"))},
		"names behind ./":     {file("c.json", conf), file("1/layer.tar", string(a)), file("2/layer.tar", string(b)), manifestJSON(t, im("./1/layer.tar", "./2/layer.tar"))},
		"a layer behind a symlink": {file("c.json", conf), testimage.Symlink("1/layer.tar", "../2/l.tar"), file("2/l.tar", string(a)), file("3/layer.tar", string(b)),
			manifestJSON(t, im("1/layer.tar", "3/layer.tar"))},
		"a layer behind two links": {file("c.json", conf), testimage.Symlink("1/layer.tar", "x"), testimage.Hardlink("1/x", "blobs/sha256/a"), file("blobs/sha256/a", string(a)), file("3/layer.tar", string(b)),
			manifestJSON(t, im("1/layer.tar", "3/layer.tar"))},
		"compressed layers": {file("c.json", conf), file("1.tar.gz", string(testimage.Gzip(t, a))), file("2.tar.zst", string(testimage.Zstd(t, b))), manifestJSON(t, im("1.tar.gz", "2.tar.zst"))},
	}
	var source chunk.Digest
	for name, members := range tests {
		t.Run(name, func(t *testing.T) {
			src := "docker-archive:" + savedTar(t, members...)
			if got, want := paths(t, src), []string{"/a", "/b"}; !slices.Equal(got, want) {
				t.Errorf("paths %q, want %q", got, want)
			}
			im := open(t, src, image.Platform{})
			if source.IsZero() {
				source = im.Source
			}
			if im.Source != source {
				t.Errorf("source digest %s, another archive of the same image has %s", im.Source, source)
			}
		})
	}
}

func TestALayerThatAnImageHasTwiceIsThereOnce(t *testing.T) {
	a, b := testimage.Tar(t, testimage.File("a", "A")), testimage.Tar(t, testimage.File(".wh.a", ""))
	f := savedTar(t, testimage.File("c.json", configFor(t, a, b, a)), testimage.File("1/layer.tar", string(a)), testimage.File("2/layer.tar", string(b)),
		testimage.Symlink("3/layer.tar", "../1/layer.tar"), manifestJSON(t, savedImage{Config: "c.json", Layers: []string{"1/layer.tar", "2/layer.tar", "3/layer.tar"}}))
	if got := paths(t, "docker-archive:"+f); !slices.Equal(got, []string{"/a"}) {
		t.Errorf("paths %q", got)
	}
}

func TestLinksOfAnArchiveLeadNowhereElse(t *testing.T) {
	a := testimage.Tar(t, testimage.File("a", "A"))
	outside := filepath.Join(t.TempDir(), "outside.tar")
	write(t, outside, a)
	tests := map[string]struct {
		link  testimage.Entry
		words []string
	}{
		"above the archive":           {testimage.Symlink("1/layer.tar", "../../../../../../../../.."+outside), []string{"1/layer.tar", "leads out of the archive"}},
		"an absolute path":            {testimage.Symlink("1/layer.tar", outside), []string{"1/layer.tar", "leads out of the archive"}},
		"a hard link above":           {testimage.Hardlink("1/layer.tar", "../../.."+outside), []string{"1/layer.tar", "leads out of the archive"}},
		"a target only at the top":    {testimage.Symlink("1/layer.tar", "c.json"), []string{"1/layer.tar", "1/c.json", "not in the archive"}},
		"a link to itself":            {testimage.Symlink("1/layer.tar", "layer.tar"), []string{"more than 16 links"}},
		"a directory":                 {testimage.Dir("1/layer.tar"), []string{"not a plain file"}},
		"a device":                    {testimage.Device("1/layer.tar", tar.TypeChar, 1, 3), []string{"not a plain file"}},
		"a layer that is not there":   {testimage.File("else", ""), []string{"layer 1 of 1", "blob is missing"}},
		"a layer of other bytes":      {testimage.File("1/layer.tar", string(a[:512])), nil},
		"a layer that says it's gzip": {testimage.File("1/layer.tar", "\x1f\x8bnot really"), []string{"layer 1 of 1", "gzip"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f := savedTar(t, testimage.File("c.json", configFor(t, a)), tt.link, manifestJSON(t, savedImage{Config: "c.json", Layers: []string{"1/layer.tar"}}))
			if tt.words != nil {
				openError(t, "docker-archive:"+f, image.Platform{}, append(tt.words, f)...)
				return
			}
			im := open(t, "docker-archive:"+f, image.Platform{})
			r, err := im.LayerReader(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			l := im.Layers[0]
			_, err = layer.Read(t.Context(), r, layer.Descriptor{Digest: l.Digest, Size: l.Size}, hashed{}, layer.Config{ChunkSize: chunk.MinSize})
			if err == nil || !strings.Contains(err.Error(), "blob has digest") {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestOneOfSeveralSavedImagesIsChosen(t *testing.T) {
	a, b := testimage.Tar(t, testimage.File("a", "A")), testimage.Tar(t, testimage.File("b", "B"))
	f := savedTar(t,
		testimage.File("a.json", configFor(t, a)), testimage.File("b.json", configFor(t, b)), testimage.File("a.tar", string(a)), testimage.File("b.tar", string(b)),
		manifestJSON(t, savedImage{"a.json", []string{"docker.io/library/debian:latest", "host:5000/p/x:1"}, []string{"a.tar"}}, savedImage{"b.json", nil, []string{"b.tar"}}))
	for _, name := range []string{"debian", "debian:latest", "docker.io/library/debian", "host:5000/p/x:1"} {
		if got := paths(t, "docker-archive:"+f+":"+name); !slices.Equal(got, []string{"/a"}) {
			t.Errorf("%s: paths %q", name, got)
		}
	}
	_, err := oci.Open(t.Context(), "docker-archive:"+f, oci.Config{})
	if err == nil || !strings.Contains(err.Error(), "2 images") || !strings.Contains(err.Error(), "debian") {
		t.Fatalf("error %v", err)
	}
	_, digest, ok := strings.Cut(err.Error(), "name one of @")
	if !ok {
		t.Fatalf("error %q names no digest", err)
	}
	digest, _, _ = strings.Cut(digest, ",")
	if got := paths(t, "docker-archive:"+f+"@"+digest); !slices.Equal(got, []string{"/b"}) {
		t.Errorf("paths %q", got)
	}
	openError(t, "docker-archive:"+f+":debian:12", image.Platform{}, `"debian:12"`, "host:5000/p/x:1")
	openError(t, "docker-archive:"+f+"@sha256:"+strings.Repeat("0", 64), image.Platform{}, "no image sha256:0000")
}

func TestBadManifestsOfDockerSaveAreRefused(t *testing.T) {
	a := testimage.Tar(t, testimage.File("a", "A"))
	conf := testimage.File("c.json", configFor(t, a))
	tests := map[string]struct {
		members []testimage.Entry
		words   []string
	}{
		"no manifest.json":        {[]testimage.Entry{conf}, []string{"not an archive of docker save", "manifest.json"}},
		"an old docker's":         {[]testimage.Entry{conf, testimage.File("repositories", "{}")}, []string{"before 1.10"}},
		"a layout":                {[]testimage.Entry{testimage.File("oci-layout", "{}")}, []string{"oci-archive:"}},
		"null":                    {[]testimage.Entry{testimage.File("manifest.json", "null")}, []string{"names no image"}},
		"no images":               {[]testimage.Entry{testimage.File("manifest.json", "[]")}, []string{"names no image"}},
		"an object":               {[]testimage.Entry{testimage.File("manifest.json", "{}")}, []string{"not a list of images"}},
		"no JSON":                 {[]testimage.Entry{testimage.File("manifest.json", "hello")}, []string{"not a list of images"}},
		"cut JSON":                {[]testimage.Entry{testimage.File("manifest.json", `[{"Config":`)}, []string{"not a list of images"}},
		"no config":               {[]testimage.Entry{testimage.File("manifest.json", "[{}]")}, []string{`config ""`}},
		"a config not there":      {[]testimage.Entry{manifestJSON(t, savedImage{Config: "c.json"})}, []string{`config "c.json"`, "missing"}},
		"a config that is none":   {[]testimage.Entry{testimage.File("c.json", "x"), manifestJSON(t, savedImage{Config: "c.json"})}, []string{`config "c.json"`, "not a JSON image config"}},
		"fewer layers than diffs": {[]testimage.Entry{conf, manifestJSON(t, savedImage{Config: "c.json"})}, []string{"0 layers", "1 diff_ids"}},
		"too large":               {[]testimage.Entry{testimage.File("manifest.json", strings.Repeat(" ", oci.MaxManifest+1))}, []string{"at most 4194304"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f := savedTar(t, tt.members...)
			openError(t, "docker-archive:"+f, image.Platform{}, append(tt.words, f)...)
		})
	}
}

func TestAnArchiveThatIsCompressedAsAWholeIsRead(t *testing.T) {
	a := testimage.Tar(t, testimage.File("a", "A"))
	docker, err := os.ReadFile(savedTar(t, testimage.File("c.json", configFor(t, a)), testimage.File("1.tar", string(a)), manifestJSON(t, savedImage{Config: "c.json", Layers: []string{"1.tar"}})))
	if err != nil {
		t.Fatal(err)
	}
	layoutTar, err := os.ReadFile(testimage.Build(t, layerA).Archive())
	if err != nil {
		t.Fatal(err)
	}
	for scheme, plain := range map[string][]byte{"docker-archive:": docker, "oci-archive:": layoutTar} {
		for name, blob := range map[string][]byte{"x.tar.gz": testimage.Gzip(t, plain), "x.tar.zst": testimage.Zstd(t, plain)} {
			f := filepath.Join(t.TempDir(), name)
			write(t, f, blob)
			tmp := t.TempDir()
			im, err := oci.Open(t.Context(), scheme+f, oci.Config{TmpDir: tmp})
			if err != nil {
				t.Fatal(err)
			}
			if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
				t.Errorf("%s%s: left in the folder while open: %v, %v", scheme, name, left, err)
			}
			if err := im.Close(); err != nil {
				t.Error(err)
			}
			if got := paths(t, scheme+f); !slices.Equal(got, []string{"/a"}) {
				t.Errorf("%s%s: paths %q", scheme, name, got)
			}
			for _, most := range []int64{int64(len(plain)), int64(len(plain)) - 1} {
				im, err := oci.Open(t.Context(), scheme+f, oci.Config{Limits: layer.Limits{MaxBytes: most}})
				if most < int64(len(plain)) {
					wantErr(t, err, "decompress the archive", fmt.Sprint(most), "limit MaxBytes")
				} else if err != nil {
					t.Errorf("%s%s of %d bytes, MaxBytes %d: error %v", scheme, name, len(plain), most, err)
				}
				if err == nil {
					im.Close()
				}
			}
		}
	}
	cut := filepath.Join(t.TempDir(), "cut.tar.gz")
	gz := testimage.Gzip(t, docker)
	write(t, cut, gz[:len(gz)/2])
	openError(t, "docker-archive:"+cut, image.Platform{}, cut, "decompress the archive")
}

// skopeo makes a manifest of the same archives too. It must be the same one, so
// that anybody can find out what a source digest stands for.
func TestTheManifestOfASavedImageIsSkopeos(t *testing.T) {
	need.Tool(t, "skopeo")
	dir := filepath.Join(need.Fixtures(t), "images")
	for ours, theirs := range map[string]string{
		"docker-hello-world.tar": "", "dive-docker.tar": "", "dive-kaniko.tar": "", "ggcr-hello-world-v25.tar": "", "ggcr-overwritten_file.tar": "",
		"ggcr-source_image.tar": "", "ggcr-source_image_with_empty_layer_history.tar": "", "ggcr-whiteout_image.tar": "",
		"ggcr-test_bundle.tar:test_image_2": "ggcr-test_bundle.tar:@0", "ggcr-test_bundle.tar:test_image_1": "ggcr-test_bundle.tar:@1",
		"ggcr-test_link.tar:bazel/v1/tarball:test_image_1": "",
	} {
		src := "docker-archive:" + filepath.Join(dir, cmp.Or(theirs, ours))
		out, err := exec.Command("skopeo", "inspect", "--raw", src).Output()
		if err != nil {
			t.Errorf("skopeo %s: %v", src, err)
			continue
		}
		im := open(t, "docker-archive:"+filepath.Join(dir, ours), image.Platform{})
		if got, want := im.Source, chunk.Sum(bytes.TrimSpace(out)); got != want {
			t.Errorf("%s: source digest %s, skopeo's manifest has %s:\n%s", src, got, want, out)
		}
	}
}
