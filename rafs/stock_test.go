package rafs_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/internal/erofstest"
	"quarry/internal/need"
	"quarry/rafs"
	"quarry/rafs/foreign"
	"quarry/store/chunk"
)

// TestStockImageMounted flattens the image that nydus-image wrote and lets the
// kernel read it. That proves the reader for stock files right, and with it the
// geometry by which we flatten our own.
func TestStockImageMounted(t *testing.T) {
	folder := filepath.Join(need.Fixtures(t), "rafs")
	boot, err := os.ReadFile(filepath.Join(folder, "rafs-v6-2.2.boot"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := foreign.Open(boot)
	if err != nil {
		t.Fatal(err)
	}
	b := m.Blobs[0]
	stored, err := os.ReadFile(filepath.Join(folder, b.ID))
	if err != nil {
		t.Fatal(err)
	}
	br, err := foreign.OpenBlob(b, bytes.NewReader(stored))
	if err != nil {
		t.Fatal(err)
	}
	start := int(b.SlotMappedBlock) * 4096
	flat := make([]byte, start+int(b.SlotBlocks)*4096)
	copy(flat, boot)
	s := &sample{tree: m.Tree, data: map[chunk.Digest][]byte{}}
	for i, meta := range br.Metas {
		p, err := br.ReadChunk(i)
		if err != nil {
			t.Fatal(err)
		}
		s.data[br.Digests[i]] = p
		copy(flat[start+int(meta.DevOff):], p)
	}
	compareMounted(t, s, erofstest.Mount(t, writeFile(t, filepath.Join(t.TempDir(), "flat.img"), flat)))

	if _, err := rafs.Decode(boot); err == nil || !strings.Contains(err.Error(), "meta block address is 0x2, want 0x1") {
		t.Errorf("our strict reader says of a stock bootstrap: %v", err)
	}
}
