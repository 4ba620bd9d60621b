package foreign_test

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"quarry/internal/need"
	"quarry/rafs"
	"quarry/rafs/foreign"
)

const stockBlob = "be7d77eeb719f70884758d1aa800ed0fb09d701aaec469964e9d54325f0d5fef"

// openStock opens the image that nydus-image 2.2 wrote: two Rust source files,
// zstd, BLAKE3 digests, chunk-meta V1.
func openStock(t *testing.T) (*foreign.Image, *foreign.BlobReader) {
	t.Helper()
	folder := filepath.Join(need.Fixtures(t), "rafs")
	boot, err := os.ReadFile(filepath.Join(folder, "rafs-v6-2.2.boot"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := foreign.Open(boot)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Blobs) != 1 || m.Blobs[0].ID != stockBlob {
		t.Fatalf("got blobs %+v, want the one of the fixture", m.Blobs)
	}
	data, err := os.ReadFile(filepath.Join(folder, m.Blobs[0].ID))
	if err != nil {
		t.Fatal(err)
	}
	br, err := foreign.OpenBlob(m.Blobs[0], bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return m, br
}

// content reads a regular file chunk by chunk through the blob's own table.
func content(t *testing.T, m *foreign.Image, br *foreign.BlobReader, n *rafs.Inode) []byte {
	t.Helper()
	var p []byte
	for _, x := range m.Indexes[n] {
		c, err := br.ReadChunk(int(x.Number))
		if err != nil {
			t.Fatal(err)
		}
		p = append(p, c...)
	}
	if int64(len(p)) != n.Size {
		t.Fatalf("got %d bytes, want %d", len(p), n.Size)
	}
	return p
}

func TestStockImage(t *testing.T) {
	m, br := openStock(t)
	sizes := map[string]int64{}
	err := m.Tree.Walk(func(path string, n *rafs.Inode) error {
		sizes[path] = n.Size
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := map[string]int64{"/": 0, "/lib.rs": 16931, "/sync_io.rs": 13400}; !maps.Equal(sizes, want) {
		t.Errorf("got files %v, want %v", sizes, want)
	}
	for _, d := range m.Tree.Root.Entries {
		if p := content(t, m, br, d.Inode); !bytes.HasPrefix(p, []byte("//")) {
			t.Errorf("%s begins with %q, want a comment", d.Name, p[:40])
		}
	}
	var names []string
	for _, e := range br.TOC {
		names = append(names, e.Name)
	}
	if len(names) != 4 || names[3] != "blob.digest" || len(br.Digests) != 2 {
		t.Errorf("got table of contents %q and %d digests", names, len(br.Digests))
	}
	for _, c := range m.Table {
		if br.Digests[c.Number] != c.Digest {
			t.Errorf("chunk %d: blob.digest and chunk-info table differ", c.Number)
		}
	}
}

// TestBrokenBlobs sees that a tail that does not fit its bootstrap is refused.
func TestBrokenBlobs(t *testing.T) {
	m, _ := openStock(t)
	data, err := os.ReadFile(filepath.Join(need.Fixtures(t), "rafs", stockBlob))
	if err != nil {
		t.Fatal(err)
	}
	for name, off := range map[string]int{"magic": 0x209a, "entries": 0x20a6, "device offset": 0x207b, "toc": len(data) - 1, "blob.digest": 0x329a} {
		broken := bytes.Clone(data)
		broken[off] ^= 0x10
		if _, err := foreign.OpenBlob(m.Blobs[0], bytes.NewReader(broken)); err == nil {
			t.Errorf("%s: a flipped bit was accepted", name)
		}
	}
}
