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

// The worst that symlinks can do must end soon with an error. The bound is a
// sixteenth of the default, so the default costs sixteen times this.
func TestSymlinkBombEnds(t *testing.T) {
	var entries []image.Entry
	for i := range 250 {
		target := strings.Repeat("./", 2000) + fmt.Sprint(i+1)
		entries = append(entries, image.Entry{Name: fmt.Sprint(i), Type: image.TypeSymlink, Link: target})
	}
	entries = append(entries, image.Entry{Name: "250", Type: image.TypeDir})
	for i := range 100_000 {
		entries = append(entries, image.Entry{Name: fmt.Sprintf("0/%d", i), Type: image.TypeReg})
	}
	limits := tree.Limits{LinkSteps: tree.DefaultLinkSteps / 16}
	err := tree.NewMerger(tree.Config{Limits: limits}).Apply(entries)
	if err == nil || !strings.Contains(err.Error(), "through symlinks for more than") {
		t.Errorf("error %v", err)
	}
}
