package tree_test

import (
	"fmt"
	"strings"
	"testing"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/image"
)

func TestLimitsAreNamedInErrors(t *testing.T) {
	c := content{}
	tests := []struct {
		name    string
		limits  tree.Limits
		layer   string
		wantErr string
	}{
		{"names", tree.Limits{Names: 3}, "d a\nd a/b\nf a/b/c \"1\"\nf d \"2\"", `entry "d": the image makes more than 3 names`},
		{"implied directories are names", tree.Limits{Names: 3}, `f a/b/c/d "1"`, "more than 3 names"},
		{"depth", tree.Limits{Depth: 3}, "f a/b/c \"1\"\nf a/b/d/e \"1\"", `entry "a/b/d/e": the path has more than 3 components`},
		{"depth of implied directories", tree.Limits{Depth: 3}, `f a/b/c/d/e "1"`, "more than 3 components"},
		{"depth behind a symlink", tree.Limits{Depth: 3}, "d a/b\nl l -> a/b\nf l/c/d \"1\"", "more than 3 components"},
		{"path bytes", tree.Limits{PathBytes: 20}, "f aaaaaaaa/b \"1\"\nf aaaaaaaa/c \"1\"", "longer than 20 bytes together"},
		{"steps behind symlinks", tree.Limits{LinkSteps: 10}, "l l -> " + strings.Repeat("./", 9) + "\nf l/a \"1\"\nf l/b \"1\"", `entry "l/b": the image's paths lead through symlinks for more than 10 steps`},
		{"steps behind symlinks of markers", tree.Limits{LinkSteps: 3}, "l l -> a/b/c/d/e\nf l/a \"1\"", "for more than 3 steps"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			tc.limits = withRoom(tc.limits)
			m := tree.NewMerger(tree.Config{ChunkSize: chunkSize, Limits: tc.limits})
			err := m.Apply(layer(t, c, tc.layer))
			if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
				t.Fatalf("error %v, want one with %q", err, tc.wantErr)
			}
		})
	}
}

// Every limit lets through what is exactly as large, and nothing larger.
func TestEveryLimitIsKeptToTheUnit(t *testing.T) {
	c := content{}
	tests := []struct {
		field       string
		limits      tree.Limits
		fits, over  string
		wantErrPart string
	}{
		{"Names", tree.Limits{Names: 3}, `f a/b/c "1"`, "f a/b/c \"1\"\nf d \"1\"", "more than 3 names"},
		{"Names, of markers' directories", tree.Limits{Names: 3}, `f a/b/c/.wh.x ""`, `f a/b/c/d/.wh.x ""`, "more than 3 names"},
		{"Depth", tree.Limits{Depth: 3}, `f a/b/c "1"`, `f a/b/c/d "1"`, "more than 3 components"},
		{"Depth, of markers' directories", tree.Limits{Depth: 3}, `f a/b/c/.wh.x ""`, `f a/b/c/d/.wh.x ""`, "more than 3 components"},
		{"PathBytes", tree.Limits{PathBytes: 2 + 4}, `f a/b "1"`, `f a/bc "1"`, "longer than 6 bytes together"},
		{"LinkSteps", tree.Limits{LinkSteps: 2 + 2}, "l l -> d/e\nd l/f\nd l/g", "l l -> d/e\nd l/f\nd l/g\nd l/h", "for more than 4 steps"},
		{"NameBytes", tree.Limits{NameBytes: 4}, `f abcd/abcd "1"`, `f abcd/abcde "1"`, `component "abcde" has 5 bytes, at most 4 are possible (limit NameBytes)`},
		{"NameBytes, of implied directories", tree.Limits{NameBytes: 4}, `f abcd/a "1"`, `f abcde/a "1"`, `component "abcde" has 5 bytes`},
		{"TargetBytes", tree.Limits{TargetBytes: 4}, `l l -> abcd`, `l l -> abcde`, "target has 5 bytes, at most 4 are possible (limit TargetBytes)"},
		{"XattrNameBytes", tree.Limits{XattrNameBytes: 6}, `f a "1" user.x=1`, `f a "1" user.xy=1`, `"user.xy" has 7 bytes, at most 6 are possible (limit XattrNameBytes)`},
		{"XattrValueBytes", tree.Limits{XattrValueBytes: 2}, `f a "1" user.x=12`, `f a "1" user.x=123`, `"user.x" has 3 bytes, at most 2 are possible (limit XattrValueBytes)`},
		{"XattrBytes", tree.Limits{XattrBytes: 12 + 12 + 12}, `f a "1" user.x=1 user.y=12`, `f a "1" user.x=1 user.y=123`, "its 2 xattrs take 40 bytes"},
		{"XattrBytes, over hard links", tree.Limits{XattrBytes: 12 + 12 + 12}, "f a \"1\" user.x=1\nh b => a user.y=1\nh c => a user.x=12", "f a \"1\" user.x=1\nh b => a user.y=1\nh c => a user.z=1", "limit XattrBytes"},
		{"a higher NameBytes is the format's", tree.Limits{NameBytes: 1000}, `f ` + longName + ` "1"`, `f ` + longName + `n "1"`, "at most 255"},
		{"a higher TargetBytes is the format's", tree.Limits{TargetBytes: 9999}, `l l -> ` + strings.Repeat("t", 4095), `l l -> ` + strings.Repeat("t", 4096), "at most 4095"},
		{"a higher XattrValueBytes is the format's", tree.Limits{XattrValueBytes: 1 << 20}, `f a "" user.x=` + strings.Repeat("v", 65535), `f a "" user.x=` + strings.Repeat("v", 65536), "at most 65535"},
	}
	for _, tc := range tests {
		t.Run(tc.field, func(t *testing.T) {
			apply := func(text string) error {
				return tree.NewMerger(tree.Config{ChunkSize: chunkSize, Limits: withRoom(tc.limits)}).Apply(layer(t, c, text))
			}
			if err := apply(tc.fits); err != nil {
				t.Errorf("what fits is refused: %v", err)
			}
			if err := apply(tc.over); err == nil || !strings.Contains(err.Error(), tc.wantErrPart) || !strings.Contains(err.Error(), "layer 1: entry ") {
				t.Errorf("error %v, want one with %q and the entry", err, tc.wantErrPart)
			}
		})
	}
}

// A hostile name of a megabyte does not become a message of four.
func TestMessagesAreShort(t *testing.T) {
	long := strings.Repeat("\xff", 1<<20)
	for name, e := range map[string]image.Entry{
		"name":   {Name: long, Type: image.TypeReg},
		"path":   {Name: strings.Repeat("d/", 1<<19) + "f", Type: image.TypeReg},
		"link":   {Name: "a", Type: image.TypeLink, Link: long},
		"target": {Name: "a", Type: image.TypeSymlink, Link: long},
		"xattr":  {Name: "a", Type: image.TypeReg, Xattrs: []rafs.Xattr{{Name: "user." + long}}},
		"marker": {Name: long + "/.wh.", Type: image.TypeReg},
	} {
		err := tree.NewMerger(tree.Config{}).Apply([]image.Entry{e})
		if err == nil || len(err.Error()) > 40_000 {
			t.Errorf("%s: error of %d bytes, want one of some thousand", name, len(fmt.Sprint(err)))
		}
	}
	var warned string
	m := tree.NewMerger(tree.Config{Warn: func(w tree.Warning) { warned = w.String() }})
	if err := m.Apply([]image.Entry{{Name: "a", Type: image.TypeReg, Xattrs: []rafs.Xattr{{Name: long}}}}); err != nil || warned == "" || len(warned) > 40_000 {
		t.Errorf("a warning of %d bytes, %v", len(warned), err)
	}
}

// withRoom returns l with zero fields large, so that the tests do not depend on
// the defaults.
func withRoom(l tree.Limits) tree.Limits {
	if l.Names == 0 {
		l.Names = 1 << 20
	}
	if l.Depth == 0 {
		l.Depth = 1 << 20
	}
	if l.PathBytes == 0 {
		l.PathBytes = 1 << 40
	}
	if l.LinkSteps == 0 {
		l.LinkSteps = 1 << 40
	}
	return l
}

// A path of 4095 components, and one whose depth only the limits end.
func TestDeepTrees(t *testing.T) {
	deep := strings.Repeat("d/", tree.DefaultDepth-1) + "f"
	m := tree.NewMerger(tree.Config{})
	if err := m.Apply([]image.Entry{{Name: deep, Type: image.TypeReg}}); err != nil {
		t.Fatal(err)
	}
	tr := m.Tree()
	tree.Digest(tr)
	if _, err := rafs.Encode(tr); err != nil {
		t.Errorf("a tree of the default depth cannot be encoded: %v", err)
	}
	err := tree.NewMerger(tree.Config{}).Apply([]image.Entry{{Name: "d/" + deep, Type: image.TypeReg}})
	if err == nil {
		t.Error("a path one deeper was taken")
	}

	const depth = 100_000
	m = tree.NewMerger(tree.Config{Limits: tree.Limits{Depth: depth, PathBytes: 1 << 40}})
	if err := m.Apply([]image.Entry{{Name: strings.Repeat("d/", depth-1) + "f", Type: image.TypeReg}}); err != nil {
		t.Fatal(err)
	}
	m.Tree()
}
