package converter_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"quarry/converter/tree"
	"quarry/internal/layermodel"
	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/bucket/buckettest"
	"quarry/store/image"
)

const tameStacks = 25

func tameBytes(seed byte) func() []byte {
	rng := rand.NewChaCha8([32]byte{seed})
	return func() []byte {
		p := make([]byte, 1000)
		rng.Read(p)
		return p
	}
}

func layoutOf(t *testing.T, layers [][]testimage.Entry) *testimage.Layout {
	t.Helper()
	var list []testimage.Layer
	for i, l := range layers {
		list = append(list, testimage.Layer{Entries: l, Codec: []string{"gzip", "none"}[i%2]})
	}
	return testimage.Build(t, list...)
}

// Generated images are converted, exported, and the export unpacked by GNU tar.
// umoci unpacks the same images, and the model merges them: all three agree.
func TestGeneratedStacksAreWhatUmociUnpacks(t *testing.T) {
	need.Root(t)
	umoci := need.Tool(t, "umoci")
	next, files := tameBytes(5), 0
	for range tameStacks {
		s := newTameStack(next(), true)
		want, err := layermodel.Merge(s.layers...)
		if err != nil {
			t.Fatal(err)
		}
		layout := layoutOf(t, s.layers)
		bundle := filepath.Join(t.TempDir(), "bundle")
		command(t, umoci, "unpack", "--image", layout.Dir+":latest", bundle)
		wantSame(t, "umoci", onDisk(t, filepath.Join(bundle, "rootfs")), want, s.layers)
		wantSame(t, "quarry export", onDisk(t, exported(t, layout)), want, s.layers)
		files += len(want)
	}
	t.Logf("%d images with %d paths", tameStacks, files)
	if files < 10*tameStacks {
		t.Error("so few files show little: mend the dice")
	}
}

// GNU tar knows no whiteouts; without them it extracts layer upon layer. With
// --recursive-unlink, which it needs for files in the place of directories, it
// empties directories that are given again and leaves the root alone. It gives a
// directory that has no entry the time of what comes into it.
func TestGeneratedStacksWithoutMarkersAreWhatTarExtracts(t *testing.T) {
	need.Root(t)
	gnuTar := need.Tool(t, "tar")
	next := tameBytes(6)
	for range tameStacks {
		s := newTameStack(next(), false)
		dir := t.TempDir()
		for _, l := range s.layers {
			extract(t, gnuTar, dir, testimage.Tar(t, withoutDirXattrs(l)...), "--recursive-unlink")
		}
		for i := range s.layers {
			s.layers[i] = withoutDirXattrs(s.layers[i])
		}
		got, want := onDisk(t, dir), converted(t, newStore(t), layoutOf(t, s.layers))
		for _, tr := range []layermodel.Tree{got, want} {
			for p, n := range tr {
				if n.Type == tar.TypeDir {
					timeless := *n
					timeless.Mtime, timeless.Nsec = 0, 0
					if p == "" {
						timeless = layermodel.Node{}
					}
					tr[p] = &timeless
				}
			}
		}
		wantSame(t, "tar", got, want, s.layers)
	}
}

// withoutDirXattrs leaves out what tar does not take from a directory that a
// later layer has without them.
func withoutDirXattrs(entries []testimage.Entry) []testimage.Entry {
	var list []testimage.Entry
	for _, e := range entries {
		if strings.HasSuffix(e.Name, "/") {
			e.PAXRecords = nil
		}
		list = append(list, e)
	}
	return list
}

// What skopeo makes of a layout is another source of the same image.
func TestGeneratedStacksThroughSkopeoHaveTheSameTree(t *testing.T) {
	skopeo := need.Tool(t, "skopeo")
	next := tameBytes(7)
	for range 6 {
		layout := layoutOf(t, newTameStack(next(), true).layers)
		want := newStore(t).convert(t, layout.Source("")).Statement.Tree
		for _, form := range []string{"oci-archive", "docker-archive", "oci"} {
			path := filepath.Join(t.TempDir(), "copy")
			command(t, skopeo, "copy", "-q", "--insecure-policy", "oci:"+layout.Dir+":latest", form+":"+path+":img:latest")
			if got := newStore(t).convert(t, form+":"+path).Statement.Tree; got != want {
				t.Errorf("copied to %s the image has tree %s, want %s", form, got, want)
			}
		}
	}
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

func extract(t *testing.T, gnuTar, dir string, archive []byte, more ...string) {
	t.Helper()
	args := append([]string{"-C", dir, "--xattrs", "--xattrs-include=*", "--same-owner", "--numeric-owner", "-xpf", "-"}, more...)
	cmd := exec.Command(gnuTar, args...)
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
}

// stored converts a layout and returns the tree of the bootstrap.
func stored(t *testing.T, s *store, l *testimage.Layout) *rafs.Tree {
	t.Helper()
	st := s.convert(t, l.Source("")).Statement
	im, err := rafs.Decode(buckettest.Bytes(t, s.mem, image.BootstrapKey(st.Bootstrap)))
	if err != nil {
		t.Fatal(err)
	}
	return im.Tree
}

func converted(t *testing.T, s *store, l *testimage.Layout) layermodel.Tree {
	t.Helper()
	tr, err := modelOf(t.Context(), stored(t, s, l), s.Store)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// exported returns a folder with what tar makes of the image's export.
func exported(t *testing.T, l *testimage.Layout) string {
	t.Helper()
	var archive bytes.Buffer
	s := newStore(t)
	if err := tree.Export(t.Context(), &archive, stored(t, s, l), s.Store); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	extract(t, need.Tool(t, "tar"), dir, archive.Bytes())
	return dir
}

// wantSame compares all but the root's time, which umoci makes up.
func wantSame(t *testing.T, who string, got, want layermodel.Tree, layers [][]testimage.Entry) {
	t.Helper()
	for _, tr := range []layermodel.Tree{got, want} {
		root := *tr[""]
		root.Mtime, root.Nsec = 0, 0
		tr[""] = &root
	}
	if diff := layermodel.Diff(got, want); diff != "" {
		t.Fatalf("%s differs:\n%s of\n%s", who, diff, listLayers(layers))
	}
}

// onDisk reads a folder in the model's words.
func onDisk(t *testing.T, dir string) layermodel.Tree {
	t.Helper()
	tr, nodes := layermodel.Tree{}, map[any]*layermodel.Node{}
	for _, n := range listDisk(t, dir) {
		if nodes[n.inode] == nil {
			nodes[n.inode] = modelNode(t, dir, n)
		}
		tr[n.path] = nodes[n.inode]
	}
	return tr
}

func modelNode(t *testing.T, dir string, n node) *layermodel.Node {
	t.Helper()
	m := &layermodel.Node{
		Type: flagOf[n.mode&rafs.ModeType], Mode: int64(n.mode & rafs.ModePerm), UID: int64(n.uid), GID: int64(n.gid),
		Mtime: n.sec, Nsec: int64(n.nsec), Target: n.target, Xattrs: map[string]string{},
	}
	switch n.mode & rafs.ModeType {
	case rafs.ModeRegular:
		m.Body = string(readFile(t, filepath.Join(dir, n.path)))
	case rafs.ModeChar, rafs.ModeBlock:
		if _, err := fmt.Sscanf(n.rdev, "%d,%d", &m.Major, &m.Minor); err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range n.xattrs {
		name, value, _ := strings.Cut(x, "=")
		m.Xattrs[name] = value
	}
	return m
}
