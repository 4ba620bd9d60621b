package tree_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/image"
)

// dice turns bytes into choices; behind their end it always chooses the first.
type dice []byte

func (d *dice) roll(n int) int {
	if len(*d) == 0 {
		return 0
	}
	v := int((*d)[0]) % n
	*d = (*d)[1:]
	return v
}

func (d *dice) path() string {
	names := [...]string{"a", "b", "c", "a", "b", ".."}
	p := names[d.roll(5)]
	for d.roll(5) > 2 {
		p += "/" + names[d.roll(6)]
	}
	return p
}

func (d *dice) entry(serial int64) image.Entry {
	e := image.Entry{Name: d.path(), Mtime: serial}
	switch d.roll(10) {
	case 0, 1:
		e.Type = image.TypeReg
	case 2, 3:
		e.Type = image.TypeDir
	case 4, 5:
		e.Type, e.Link = image.TypeSymlink, d.path()
		if d.roll(4) == 0 {
			e.Link = "/" + e.Link
		}
		if d.roll(4) == 0 {
			e.Link = "../" + e.Link
		}
	case 6:
		e.Type, e.Link = image.TypeLink, d.path()
	case 7, 8:
		e.Type = image.TypeReg
		i := strings.LastIndexByte(e.Name, '/') + 1
		if e.Name[i:] != ".." {
			e.Name = e.Name[:i] + ".wh." + e.Name[i:]
		}
	case 9:
		e.Type = image.TypeReg
		e.Name = e.Name[:strings.LastIndexByte(e.Name, '/')+1] + ".wh..wh..opq"
	}
	return e
}

// layers makes up to 4 layers of up to 8 entries over three names.
func (d *dice) layers() [][]image.Entry {
	ls := make([][]image.Entry, 1+d.roll(4))
	serial := int64(0)
	for i := range ls {
		for range 1 + d.roll(8) {
			serial++
			ls[i] = append(ls[i], d.entry(serial))
		}
	}
	return ls
}

// compareWithModel applies layers both ways, each up to its first error. It
// reports whether all of them could be applied.
func compareWithModel(t *testing.T, layers [][]image.Entry) bool {
	t.Helper()
	m, want := tree.NewMerger(tree.Config{}), model{}
	for i, l := range layers {
		err, wantErr := m.Apply(l), want.apply(i+1, l)
		if (err != nil) != (wantErr != nil) {
			t.Fatalf("layer %d: error %v, the model's %v\n%s", i+1, err, wantErr, printLayers(layers))
		}
		if err != nil {
			return false
		}
	}
	tr := m.Tree()
	if got, want := showPlain(tr), want.show(); got != want {
		t.Fatalf("merged\n%swant\n%sfrom\n%s", got, want, printLayers(layers))
	}
	if _, err := rafs.Encode(tr); err != nil {
		t.Fatalf("the tree cannot be encoded: %v\n%s", err, printLayers(layers))
	}
	return true
}

func showPlain(tr *rafs.Tree) string {
	var b strings.Builder
	first := map[*rafs.Inode]string{}
	_ = tr.Walk(func(path string, n *rafs.Inode) error {
		path = strings.TrimPrefix(path, "/")
		target, again := first[n]
		switch {
		case path == "" && n.Mtime == 0:
		case again:
			fmt.Fprintf(&b, "h %s => %s\n", path, target)
		case n.IsDir():
			fmt.Fprintf(&b, "d %s %d\n", path, n.Mtime)
		case n.Type() == rafs.ModeSymlink:
			fmt.Fprintf(&b, "l %s -> %s\n", path, n.Target)
		default:
			fmt.Fprintf(&b, "f %s %d\n", path, n.Mtime)
		}
		if !again {
			first[n] = path
		}
		return nil
	})
	return b.String()
}

func printLayers(layers [][]image.Entry) string {
	var b strings.Builder
	for i, l := range layers {
		fmt.Fprintf(&b, "L%d\n", i+1)
		for _, e := range l {
			fmt.Fprintf(&b, "  %c %q %q %d\n", e.Type, e.Name, e.Link, e.Mtime)
		}
	}
	return b.String()
}

func FuzzMergerAgainstModel(f *testing.F) {
	f.Add([]byte{1, 2, 0, 0, 3, 1, 1, 0, 9})
	f.Add([]byte("whiteouts, links and symlinks over three names"))
	f.Fuzz(func(t *testing.T, p []byte) {
		d := dice(p)
		compareWithModel(t, d.layers())
	})
}

func TestMergerAgainstModel(t *testing.T) {
	rng := rand.NewChaCha8([32]byte{1})
	merged := 0
	const rounds = 10_000
	for range rounds {
		d := make(dice, 200)
		rng.Read(d)
		if compareWithModel(t, d.layers()) {
			merged++
		}
	}
	if merged < rounds/10 {
		t.Errorf("only %d of %d random images could be merged: the test shows little", merged, rounds)
	}
	t.Logf("%d of %d random images merged without error", merged, rounds)
}
