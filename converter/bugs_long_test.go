//go:build long

package converter_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"testing"

	"quarry/converter/layer"
	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/chunk"
)

// bigTar makes a tar of one file of 4 KiB blocks, each with its number, and one
// file more, as it is read.
type bigTar struct {
	size int64
	head []byte
	tail []byte
	pos  int64
}

// hashOnly is a store that keeps nothing.
type hashOnly struct{}

func (hashOnly) Put(_ context.Context, p []byte) (chunk.Digest, error) { return chunk.Sum(p), nil }

func (b *bigTar) Read(p []byte) (int, error) {
	h, padded := int64(len(b.head)), (b.size+511)&^511
	switch off := b.pos - h; {
	case b.pos < h:
		n := copy(p, b.head[b.pos:])
		b.pos += int64(n)
		return n, nil
	case off < padded:
		n := min(int64(len(p)), 4096-off%4096, padded-off)
		clear(p[:n])
		if off%4096 == 0 && n >= 8 && off < b.size {
			binary.LittleEndian.PutUint64(p, uint64(off/4096)+1)
		}
		b.pos += n
		return int(n), nil
	case off < padded+int64(len(b.tail)):
		n := copy(p, b.tail[off-padded:])
		b.pos += int64(n)
		return n, nil
	}
	return 0, io.EOF
}

// A file that is longer than 32 bits count and not sparse. Memory stays bounded:
// the store keeps no content.
func TestBug38ABigFileWithoutHoles(t *testing.T) {
	t.Parallel()
	const size = 1<<32 + 4096 + 9
	e := &tarEntry{flag: '0', name: "big", mode: 0o644, mtime: "1700000000", size: size, format: "gnu"}
	stream := bufio.NewReaderSize(&bigTar{size: size, head: e.bytes(), tail: tarNotation(t, `f end "intact"`)}, 1<<20)
	// Known beforehand, so that four gigabytes are not made twice.
	digest, err := chunk.Parse("sha256:da47736ed536ea619a54c404a0948d328250228f7afdfa683cba9079a0db2c62")
	if err != nil {
		t.Fatal(err)
	}
	d := layer.Descriptor{Digest: digest, Size: 512 + (size+511)&^511 + 4*512}
	rec, err := layer.Read(t.Context(), stream, d, hashOnly{}, layer.Config{ChunkSize: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	m := tree.NewMerger(tree.Config{ChunkSize: 1 << 20})
	if err := m.Apply(rec.Entries); err != nil {
		t.Fatal(err)
	}
	boot, err := rafs.Encode(m.Tree())
	if err != nil {
		t.Fatal(err)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	big, end := im.Tree.Root.Entries[0].Inode, im.Tree.Root.Entries[1].Inode
	if big.Size != size || len(big.Chunks) != size>>20+1 || end.Size != int64(len("intact")) || end.Chunks[0] != chunk.Sum([]byte("intact")) {
		t.Fatalf("big has %d bytes in %d chunks, end has %d", big.Size, len(big.Chunks), end.Size)
	}
	for k, d := range big.Chunks {
		p := make([]byte, chunk.Len(int64(k), size, 1<<20))
		for off := 0; off+8 <= len(p); off += 4096 {
			binary.LittleEndian.PutUint64(p[off:], uint64(k<<8+off/4096)+1)
		}
		if k%97 < 2 || k > 4090 {
			if chunk.Sum(p) != d {
				t.Errorf("chunk %d of the big file is another", k)
			}
		}
	}
}
