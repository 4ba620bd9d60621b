package tree_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/converter/tree"
	"quarry/store/image"
)

// mergeCase is layers, lowest first, and the tree they make, or a part of the
// error. Several variants of the last layer must all come to the same.
type mergeCase struct {
	name     string
	layers   []string
	variants []string // of a last layer
	want     string
	wantErr  string
}

func runMerge(t *testing.T, cases []mergeCase) {
	t.Helper()
	for _, tc := range cases {
		if len(tc.variants) == 0 {
			tc.variants = []string{""}
		}
		for i, v := range tc.variants {
			t.Run(fmt.Sprintf("%s/%d", tc.name, i), func(t *testing.T) {
				t.Parallel()
				c := content{}
				m := tree.NewMerger(tree.Config{ChunkSize: chunkSize})
				var err error
				for _, l := range append(append([]string{}, tc.layers...), v) {
					if err == nil {
						err = m.Apply(layer(t, c, l))
					}
				}
				if tc.wantErr != "" {
					if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
						t.Fatalf("error %v, want one with %q", err, tc.wantErr)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(show(m.Tree(), c), lines(tc.want)); diff != "" {
					t.Fatalf("tree differs (-got +want):\n%s", diff)
				}
			})
		}
	}
}

func TestMergedUsr(t *testing.T) {
	c := content{}
	for _, target := range []string{"usr/lib", "/usr/lib", "../../usr/./lib/"} {
		got := show(merge(t, layer(t, c, "d usr\nd usr/lib\nl lib -> "+target), layer(t, c, `f lib/x "1"`)), c)
		if want := lines("l lib -> " + target + "\nd usr\nd usr/lib\nf usr/lib/x \"1\""); got != want {
			t.Errorf("bug 21: a parent that is a symlink is followed and stays:\n%swant\n%s", got, want)
		}
	}
}

func TestUnknownTypeIsRefused(t *testing.T) {
	m := tree.NewMerger(tree.Config{})
	err := m.Apply([]image.Entry{{Name: "dev/odd", Type: 'Z'}})
	if err == nil || !strings.Contains(err.Error(), `layer 1: entry "dev/odd": the entry type 'Z' is unknown`) {
		t.Fatalf("bug 37: error %v", err)
	}
	if again := m.Apply(nil); again != err {
		t.Errorf("after an error Apply returned %v, want it again", again)
	}
}

func TestChunksMustMakeTheSize(t *testing.T) {
	for _, e := range []image.Entry{
		{Name: "f", Type: image.TypeReg, Size: 1},
		{Name: "f", Type: image.TypeReg, Size: -1},
	} {
		err := tree.NewMerger(tree.Config{}).Apply([]image.Entry{e})
		if err == nil || !strings.Contains(err.Error(), `entry "f"`) {
			t.Errorf("size %d without chunks: error %v", e.Size, err)
		}
	}
}

func TestLayerOrderOfManyLayers(t *testing.T) {
	c := content{}
	var layers [][]image.Entry
	for i := range 300 {
		s := fmt.Sprintf("f n/%03d %d\nf same %d", i, i, i)
		if i%10 == 9 {
			s += fmt.Sprintf("\nf n/.wh.%03d \"\"", i-5)
		}
		layers = append(layers, layer(t, c, s))
	}
	got := show(merge(t, layers...), c)
	if !strings.Contains(got, `f same "299"`) || strings.Count(got, "\n") != 1+1+300-30 {
		t.Fatalf("bug 48: 300 layers made\n%s", got)
	}
}

func TestTreeEndsTheMerger(t *testing.T) {
	m := tree.NewMerger(tree.Config{})
	m.Tree()
	if err := m.Apply(nil); err == nil {
		t.Error("Apply after Tree succeeded")
	}
}
