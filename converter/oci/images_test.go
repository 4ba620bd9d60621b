package oci_test

import (
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/internal/need"
	"quarry/store/image"
)

// fixture is what a real archive must give: its paths, the number of them when
// they are many, or an error.
type fixture struct {
	paths []string
	count int
	has   []string // of many paths
	lacks []string
	err   []string
}

// fixtureImages has a row for every source in the fixtures' images folder.
var fixtureImages = map[string]fixture{
	"docker-archive:docker-hello-world.tar":                           {paths: []string{"/hello"}},
	"docker-archive:ggcr-hello-world-v25.tar":                         {paths: []string{"/hello"}},
	"oci-archive:ggcr-hello-world-v25.tar":                            {err: []string{"index.json", "no manifests"}}, // it says null
	"docker-archive:ggcr-no_manifest.tar":                             {err: []string{"ggcr-no_manifest.tar has no manifest.json", "before 1.10"}},
	"docker-archive:ggcr-null_manifest.tar":                           {err: []string{"manifest.json", "names no image"}},
	"docker-archive:ggcr-overwritten_file.tar":                        {paths: []string{"/bar.txt", "/foo.txt"}},
	"docker-archive:ggcr-source_image.tar":                            {paths: []string{"/bar", "/foo"}},
	"docker-archive:ggcr-source_image_with_empty_layer_history.tar":   {paths: []string{"/bar", "/foo"}},
	"docker-archive:ggcr-test_bundle.tar":                             {err: []string{"2 images", "test_image_1, test_image_2"}},
	"docker-archive:ggcr-test_bundle.tar:test_image_1":                {paths: []string{"/bar", "/foo"}},
	"docker-archive:ggcr-test_bundle.tar:test_image_2:latest":         {paths: []string{"/bat", "/baz"}},
	"docker-archive:ggcr-test_link.tar":                               {err: []string{"2 images", "bazel/v1/tarball:test_image_3"}},
	"docker-archive:ggcr-test_link.tar:bazel/v1/tarball:test_image_3": {paths: []string{"/bar", "/foo", "/test"}},
	"docker-archive:ggcr-test_link.tar:bazel/v1/tarball:test_image_1": {paths: []string{"/bar", "/foo"}},
	"docker-archive:ggcr-whiteout_image.tar":                          {paths: []string{"/bar.txt"}},
	"docker-archive:dive-docker.tar": {count: 423, has: []string{"/somefile.txt", "/root/saved.txt", "/root/.saved.txt", "/root/.data/saved.again2.txt", "/tmp/saved.again1.txt"},
		lacks: []string{"/root/example", "/root/example/somefile1.txt"}},
	"docker-archive:dive-kaniko.tar": {count: 429, has: []string{"/somefile.txt", "/root/saved.txt", "/root/.saved.txt", "/root/.data/test-coverage.sh", "/tmp/saved.again1.txt"},
		lacks: []string{"/root/example", "/root/example/somefile1.txt"}},
	"oci-archive:dive-docker.tar":           {err: []string{"no oci-layout", "docker-archive:"}},
	"oci-archive:dive-oci-gzip.tar":         {paths: []string{"/README.md"}},
	"oci-archive:dive-oci-uncompressed.tar": {paths: []string{"/README.md"}},
	"docker-archive:dive-oci-gzip.tar":      {err: []string{"oci-archive:"}},
	"oci-archive:dive-gzip.tar":             {err: []string{"no oci-layout"}}, // one file in a tar, no image
	"docker-archive:dive-gzip.tar":          {err: []string{"not an archive of docker save"}},
	"docker-archive:dive-uncompressed.tar":  {err: []string{"not an archive of docker save"}},
}

func TestEveryFixtureImageGivesItsTreeOrItsError(t *testing.T) {
	dir := filepath.Join(need.Fixtures(t), "images")
	files, err := filepath.Glob(filepath.Join(dir, "*.tar"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no fixtures in %s: %v", dir, err)
	}
	rows := map[string]bool{} // the files that have one
	for src, want := range fixtureImages {
		scheme, rest, _ := strings.Cut(src, ":")
		file, _, _ := strings.Cut(rest, ":")
		rows[file] = true
		if !slices.Contains(files, filepath.Join(dir, file)) {
			t.Errorf("%s: the file is not in %s", src, dir)
			continue
		}
		t.Run(src, func(t *testing.T) { want.check(t, scheme+":"+filepath.Join(dir, rest)) })
	}
	for _, f := range files {
		if !rows[filepath.Base(f)] {
			t.Errorf("%s: no row says what it must give", f)
		}
	}
}

func (f fixture) check(t *testing.T, src string) {
	t.Helper()
	if f.err != nil {
		openError(t, src, image.Platform{}, f.err...)
		return
	}
	got := paths(t, src)
	if f.count == 0 && !slices.Equal(got, f.paths) || f.count > 0 && f.count != len(got) {
		t.Errorf("%d paths %q", len(got), got)
	}
	for _, p := range f.has {
		if !slices.Contains(got, p) {
			t.Errorf("no path %s", p)
		}
	}
	for _, p := range f.lacks {
		if slices.Contains(got, p) {
			t.Errorf("path %s is there", p)
		}
	}
}

// umoci unpacks what skopeo makes of an archive; its files have the same paths.
func TestFixtureImagesHaveThePathsThatUmociUnpacks(t *testing.T) {
	need.Tool(t, "skopeo")
	need.Tool(t, "umoci")
	dir := filepath.Join(need.Fixtures(t), "images")
	for src, want := range fixtureImages {
		if want.err != nil || strings.HasSuffix(src, "test_image_3") || strings.Contains(src, "bundle") {
			continue // skopeo 1.9 takes a link for an empty layer, and names without a tag for nothing
		}
		scheme, rest, _ := strings.Cut(src, ":")
		src = scheme + ":" + filepath.Join(dir, rest)
		tmp := t.TempDir()
		run(t, "skopeo", "copy", "--quiet", "--insecure-policy", src, "oci:"+filepath.Join(tmp, "layout")+":x")
		run(t, "umoci", "unpack", "--rootless", "--image", filepath.Join(tmp, "layout")+":x", filepath.Join(tmp, "bundle"))
		root := filepath.Join(tmp, "bundle", "rootfs")
		var theirs []string
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if path != root {
				theirs = append(theirs, strings.TrimPrefix(path, root))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		ours := paths(t, src)
		slices.Sort(ours)
		slices.Sort(theirs)
		if diff := cmp.Diff(ours, theirs); diff != "" {
			t.Errorf("%s: paths (-ours +umoci's):\n%s", src, diff)
		}
	}
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}
