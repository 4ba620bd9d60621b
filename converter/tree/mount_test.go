package tree_test

import (
	"os"
	"path/filepath"
	"testing"

	"quarry/converter/tree"
	"quarry/internal/erofstest"
	"quarry/rafs"
)

// encoded returns the bootstrap of tr, and what it decodes to.
func encoded(t *testing.T, tr *rafs.Tree) ([]byte, *rafs.Image) {
	t.Helper()
	b, err := rafs.Encode(tr)
	if err != nil {
		t.Fatal(err)
	}
	m, err := rafs.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	return b, m
}

func TestDecodedBootstrapHasTheDigestOfItsTree(t *testing.T) {
	tr := sample(t, content{})
	_, m := encoded(t, tr)
	if got, want := tree.Digest(m.Tree), tree.Digest(tr); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
}

func TestMountedImageHasTheDigestOfItsTree(t *testing.T) {
	c := content{}
	tr := sample(t, c)
	b, m := encoded(t, tr)
	flat := make([]byte, m.DeviceSize())
	copy(flat, b)
	for _, k := range m.Blob.Chunks {
		copy(flat[m.Blob.MappedOff+k.DevOff:], c[k.Digest])
	}
	file := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(file, flat, 0o600); err != nil {
		t.Fatal(err)
	}
	mnt := erofstest.Mount(t, file)
	got, err := tree.FromDir(t.Context(), mnt, chunkSize)
	if err != nil {
		t.Fatal(err)
	}
	if g, w := show(got, c), show(tr, c); g != w {
		t.Errorf("mounted\n%s\nwant\n%s", g, w)
	}
	if g, w := tree.Digest(got), tree.Digest(tr); g != w {
		t.Errorf("mounted the tree has digest %s, want %s", g, w)
	}
}
