package rafs_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"testing"

	"quarry/rafs"
	"quarry/rafs/foreign"
	"quarry/store/chunk"
)

// TestForeignReaderAgrees reads our bootstraps with the reader for stock files,
// and their files through the virtual blob, as nydusd would.
func TestForeignReaderAgrees(t *testing.T) {
	for name, s := range oracleSamples() {
		t.Run(name, func(t *testing.T) {
			boot, m := s.encode(t)
			other, err := foreign.Open(boot)
			if err != nil {
				t.Fatal(err)
			}
			if err := sameTree(other.Tree, s.tree); err != nil {
				t.Error(err)
			}
			if m.Blob == nil {
				if len(other.Blobs) != 0 {
					t.Errorf("got %d blobs, want none", len(other.Blobs))
				}
				return
			}
			checkBlobRecord(t, m, other.Blobs)
			virtual := s.virtualBlob(m.Blob)
			if got := int64(len(virtual)); got != m.Blob.Size() {
				t.Fatalf("virtual blob has %d bytes, want %d", got, m.Blob.Size())
			}
			br, err := foreign.OpenBlob(other.Blobs[0], bytes.NewReader(virtual))
			if err != nil {
				t.Fatal(err)
			}
			checkChunks(t, s, m.Blob, other, br)
		})
	}
}

func checkBlobRecord(t *testing.T, m *rafs.Image, blobs []foreign.Blob) {
	t.Helper()
	if len(blobs) != 1 {
		t.Fatalf("got %d blobs, want 1", len(blobs))
	}
	b, id := blobs[0], m.Blob.ID.Hex()
	got := fmt.Sprint(b.ID, b.SlotTag, b.Index, b.ChunkSize, b.ChunkCount, b.Compressor, b.Digester, b.MetaCompressor, b.Features,
		b.CompressedSize, b.UncompressedSize, b.MetaOff, b.SlotBlocks, b.SlotMappedBlock)
	want := fmt.Sprint(id, id, 0, m.ChunkSize, len(m.Blob.Chunks), 0, 1, 0, 0x60000025,
		m.Blob.Size(), m.Blob.DevSize(), m.Blob.DataSize(), m.Blob.DevSize()/4096, m.Blob.MappedOff/4096)
	if got != want {
		t.Errorf("got blob record %s, want %s", got, want)
	}
	if off := m.Blob.MappedOff; off < m.Size || off%(512<<10) != 0 || off-m.Size >= 512<<10 {
		t.Errorf("bootstrap of %d bytes has its data mapped at %d", m.Size, off)
	}
}

func checkChunks(t *testing.T, s *sample, b *rafs.Blob, other *foreign.Image, br *foreign.BlobReader) {
	t.Helper()
	if len(other.Table) != len(b.Chunks) || len(br.Digests) != len(b.Chunks) {
		t.Fatalf("got %d chunk-info records and %d digests, want %d", len(other.Table), len(br.Digests), len(b.Chunks))
	}
	for i, c := range b.Chunks {
		p, err := br.ReadChunk(i)
		if err != nil {
			t.Fatal(err)
		}
		rec, meta := other.Table[i], br.Metas[i]
		if chunk.Sum(p) != c.Digest || br.Digests[i] != c.Digest || rec.Digest != c.Digest {
			t.Errorf("chunk %d: digests differ", i)
		}
		if rec.Number != uint32(i) || rec.Flags != 0 || rec.CRC != 0 || meta.CRC != 0 || meta.Compressed {
			t.Errorf("chunk %d: got record %+v and chunk-meta %+v", i, rec, meta)
		}
		if rec.Len != c.Len || meta.Len != c.Len || rec.StoredOff != uint64(c.Off) || meta.StoredOff != uint64(c.Off) ||
			rec.DevOff != uint64(c.DevOff) || meta.DevOff != uint64(c.DevOff) {
			t.Errorf("chunk %d: got record %+v and chunk-meta %+v, want %+v", i, rec, meta, c)
		}
	}
	for n, indexes := range other.Indexes {
		for k, x := range indexes {
			if b.Chunks[x.Number].Digest != n.Chunks[k] || int64(x.Block)*4096 != b.Chunks[x.Number].DevOff {
				t.Errorf("index %d of a file of %d bytes is %+v", k, n.Size, x)
			}
		}
	}
}

// TestBlobIDIsTheDigestOfTheChunkTable also sees that chunks are numbered in
// path order, each at its first use.
func TestBlobIDIsTheDigestOfTheChunkTable(t *testing.T) {
	s := randomSample(4, 400)
	boot, m := s.encode(t)
	off, size := le.Uint64(boot[1152+24:]), le.Uint64(boot[1152+32:])
	if got := chunk.Digest(sha256.Sum256(boot[off : off+size])); got != m.Blob.ID {
		t.Errorf("got %s, want %s", got, m.Blob.ID)
	}
	next, seen := 0, map[chunk.Digest]bool{}
	m.Walk(func(path string, n *rafs.Inode) error {
		for _, d := range n.Chunks {
			if !seen[d] {
				if m.Blob.Chunks[next].Digest != d {
					t.Errorf("chunk %d is not the first new one of %q", next, path)
				}
				seen[d] = true
				next++
			}
		}
		return nil
	})
	if next != len(m.Blob.Chunks) {
		t.Errorf("got %d chunks, the tree has %d", len(m.Blob.Chunks), next)
	}
}

// TestTailEndsInATarHeader reads the header with archive/tar.
func TestTailEndsInATarHeader(t *testing.T) {
	_, m := smallSample().encode(t)
	tail := m.Blob.Tail()
	r := tar.NewReader(io.MultiReader(bytes.NewReader(tail[len(tail)-512:]), bytes.NewReader(make([]byte, 128))))
	h, err := r.Next()
	if err != nil || h.Name != "rafs.blob.toc" || h.Size != 128 || h.Typeflag != tar.TypeReg || h.Format != tar.FormatGNU {
		t.Errorf("got header %+v, error %v", h, err)
	}
}

// TestChunkSizeChangesTheBlobID sees that the same files with
// another chunk size are another virtual blob.
func TestChunkSizeChangesTheBlobID(t *testing.T) {
	ids := map[chunk.Digest]bool{}
	for _, size := range []uint32{4096, 8192} {
		s := newSample(size)
		s.tree.Root = dir(0o755, map[string]*rafs.Inode{"f": s.file(randomBytes(1, 20000))})
		_, m := s.encode(t)
		ids[m.Blob.ID] = true
	}
	if len(ids) != 2 {
		t.Error("two chunk sizes gave one blob id")
	}
}
