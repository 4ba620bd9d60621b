package tree_test

import (
	"fmt"
	"io"
	"testing"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// entries300k is a layer of 300 000 entries, 30 in a directory, behind a
// symlink as in images with a merged /usr.
func entries300k() []image.Entry {
	entries := []image.Entry{{Name: "usr/lib", Type: image.TypeDir}, {Name: "lib", Type: image.TypeSymlink, Link: "usr/lib"}}
	for i := range 10_000 {
		dir := fmt.Sprintf("lib/python3/site-packages/package%d/sub%d", i/10, i%10)
		entries = append(entries, image.Entry{Name: dir, Type: image.TypeDir, Mode: 0o755})
		for j := range 29 {
			d := chunk.Digest{byte(i), byte(i >> 8), byte(j)}
			entries = append(entries, image.Entry{Name: fmt.Sprintf("%s/module%d.py", dir, j), Type: image.TypeReg, Mode: 0o644, Size: 1, Chunks: []chunk.Digest{d}})
		}
	}
	return entries
}

func BenchmarkMerge300k(b *testing.B) {
	entries := entries300k()
	b.ReportAllocs()
	for b.Loop() {
		m := tree.NewMerger(tree.Config{})
		if err := m.Apply(entries); err != nil {
			b.Fatal(err)
		}
		m.Tree()
	}
}

func BenchmarkDigest300k(b *testing.B) {
	m := tree.NewMerger(tree.Config{})
	if err := m.Apply(entries300k()); err != nil {
		b.Fatal(err)
	}
	tr := m.Tree()
	b.ReportAllocs()
	for b.Loop() {
		tree.Digest(tr)
	}
}

func BenchmarkExport(b *testing.B) {
	c := content{}
	tr := random(b, c)
	var size int64
	_ = tr.Walk(func(_ string, n *rafs.Inode) error { size += n.Size; return nil })
	b.SetBytes(size)
	for b.Loop() {
		if err := tree.Export(b.Context(), io.Discard, tr, c); err != nil {
			b.Fatal(err)
		}
	}
}
