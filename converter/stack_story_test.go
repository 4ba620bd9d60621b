package converter_test

import (
	"archive/tar"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"quarry/internal/layermodel"
	"quarry/internal/testimage"
)

// stories are stacks in which two rules meet, each with the image that comes of
// it, "" when it is refused. Random stacks seldom have them.
var stories = map[string]struct {
	want   string // as brief says it
	layers [][]testimage.Entry
}{
	"a hard link in the place of the directory its target is in": {"", [][]testimage.Entry{
		{testimage.File("a/b", "x"), testimage.Hardlink("a", "a/b")},
	}},
	"a hard link to a lower file is this layer's name, so nothing can be below it": {"", [][]testimage.Entry{
		{testimage.File("f", "x")},
		{testimage.Hardlink("p", "f"), testimage.File("p/x", "y")},
	}},
	"a directory without a name is the root": {"/, f x", [][]testimage.Entry{
		{testimage.File("f", "x"), {Header: tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}}},
	}},
	"a directory made for a marker lies behind a symlink that led nowhere": {"/, a/, l -> a", [][]testimage.Entry{
		{testimage.Symlink("l", "a")},
		{testimage.File("a/b/.wh.c", ""), testimage.File("l/.wh.b", "")},
	}},
	"the same, the markers the other way round": {"/, a/, l -> a", [][]testimage.Entry{
		{testimage.Symlink("l", "a")},
		{testimage.File("l/.wh.b", ""), testimage.File("a/b/.wh.c", "")},
	}},
	"a marker below a symlink that goes with its directory": {"/, t/, t/x stays", [][]testimage.Entry{
		{testimage.Dir("a"), testimage.Symlink("a/l", "../t"), testimage.File("t/x", "stays")},
		{testimage.File("a/l/.wh.x", ""), testimage.File(".wh.a", "")},
	}},
	"a marker below a symlink in a directory made anew": {"/, a/, t/, t/x stays", [][]testimage.Entry{
		{testimage.Dir("a"), testimage.Symlink("a/l", "../t"), testimage.File("t/x", "stays")},
		{testimage.File("a/.wh..wh..opq", ""), testimage.File("a/l/.wh..wh..opq", "")},
	}},
	"a marker below a symlink in a directory that a file replaces": {"/, a file, t/, t/x stays", [][]testimage.Entry{
		{testimage.Dir("a"), testimage.Symlink("a/l", "../t"), testimage.File("t/x", "stays")},
		{testimage.File("a/l/.wh.x", ""), testimage.File("a", "file")},
	}},
	"a marker that takes away the symlink it leads through": {"/, y y", [][]testimage.Entry{
		{testimage.Symlink("x", "."), testimage.File("y", "y")},
		{testimage.File("x/.wh.x", "")},
	}},
	"markers of symlinks that lead through one another": {"/", [][]testimage.Entry{
		{testimage.Symlink("a", "."), testimage.Symlink("b", ".")},
		{testimage.File("a/.wh.b", ""), testimage.File("b/.wh.a", "")},
	}},
	"a link of AUFS's to a file with xattrs, twice": {"/, a kept user.k=v, b kept user.k=v", [][]testimage.Entry{
		{testimage.File(".wh..wh.plnk/1.2", "kept").WithXattr("user.k", "v"), testimage.Hardlink("a", ".wh..wh.plnk/1.2"), testimage.Hardlink("b", ".wh..wh.plnk/1.2").WithXattr("user.k", "w")},
	}},
	"a hard link to itself, with xattrs": {"/, f 1 user.k=v", [][]testimage.Entry{
		{testimage.File("f", "1")},
		{testimage.Hardlink("f", "f").WithXattr("user.k", "v")},
	}},
	"a directory in the place of a symlink to one, and back": {"/, l -> t, t/, t/a 1, t/c 3", [][]testimage.Entry{
		{testimage.Dir("t"), testimage.Symlink("l", "t"), testimage.File("l/a", "1")},
		{testimage.Dir("l"), testimage.File("l/b", "2")},
		{testimage.Symlink("l", "t"), testimage.File("l/c", "3")},
	}},
	"a parent through a symlink to a directory that does not exist yet": {"/, l -> no/../where, where/, where/a 1", [][]testimage.Entry{
		{testimage.Symlink("l", "no/../where"), testimage.File("l/a", "1")},
	}},
	"a whiteout of the name .wh, which is an ordinary one": {"/, d/, d/.wh z, d/wh. y", [][]testimage.Entry{
		{testimage.File("d/.wh", "x"), testimage.File("d/wh.", "y")},
		{testimage.File("d/.wh..wh", ""), testimage.File("d/.wh", "z")},
	}},
}

func TestStacksWithAStory(t *testing.T) {
	for name, story := range stories {
		t.Run(name, func(t *testing.T) {
			var blobs [][]byte
			for _, l := range story.layers {
				var plain []byte
				for i := range l {
					l[i].ModTime = time.Unix(1_700_000_000, 0)
					plain = append(plain, testimage.RawTar(l[i])...)
				}
				blobs = append(blobs, append(plain, testimage.EndMarker...))
			}
			want, wantErr := layermodel.Merge(story.layers...)
			got, err := convertBlobs(t.Context(), blobs)
			if (err != nil) != (wantErr != nil) {
				t.Fatalf("the converter says %v, the model %v", err, wantErr)
			}
			if brief(got) != story.want {
				t.Errorf("the image is %q, want %q", brief(got), story.want)
			}
			if err != nil {
				return
			}
			if diff := layermodel.Diff(got, want); diff != "" {
				t.Errorf("the image differs from the model:\n%s", diff)
			}
		})
	}
}

// brief lists a tree in one line, names and content alone; "" is for a refused
// image.
func brief(t layermodel.Tree) string {
	var words []string
	first := map[*layermodel.Node]string{}
	for _, p := range slices.Sorted(maps.Keys(t)) {
		n := t[p]
		switch of, again := first[n]; {
		case again:
			p += " is " + of
		case n.Type == tar.TypeDir:
			p += "/"
		case n.Type == tar.TypeSymlink:
			p += " -> " + n.Target
		default:
			p += " " + n.Body
		}
		for _, k := range slices.Sorted(maps.Keys(n.Xattrs)) {
			p += " " + k + "=" + n.Xattrs[k]
		}
		first[n] = strings.Fields(p)[0]
		words = append(words, p)
	}
	return strings.Join(words, ", ")
}
