package foreign

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/bits"

	"github.com/klauspost/compress/zstd"
)

// Compressors of blobs and chunk-meta tables.
const (
	CompNone = 0
	CompLZ4  = 1
	CompGzip = 2
	CompZstd = 3
)

const (
	featureChunkInfoV2 = 0x4
	featureTOC         = 0x20000000
	headerLen          = 4096
	magic              = 0xb10bb10b
	tarLen             = 512
	// maxMeta bounds the chunk-meta table: 2^24 records of 24 bytes.
	maxMeta = 24 << 24
)

// Meta is one record of a blob's chunk-meta table.
type Meta struct {
	StoredOff, DevOff uint64
	StoredLen, Len    uint32
	Compressed        bool
	CRC               uint32
}

// TOCEntry is one entry of a blob's table of contents.
type TOCEntry struct {
	Flags      uint32
	Name       string
	Digest     [32]byte
	Off        uint64
	StoredSize uint64
	Size       uint64
}

// BlobReader reads a blob file the way nydusd does: chunks by number, found in
// the blob's own chunk-meta table.
type BlobReader struct {
	Metas   []Meta
	TOC     []TOCEntry
	Digests [][32]byte // blob.digest, when the blob has one

	blob Blob
	r    io.ReaderAt
}

// OpenBlob reads and checks the tail of the blob file that b describes.
func OpenBlob(b Blob, r io.ReaderAt) (*BlobReader, error) {
	br := &BlobReader{blob: b, r: r}
	if err := br.readMeta(); err != nil {
		return nil, fmt.Errorf("blob %s: chunk-meta table: %w", b.ID, err)
	}
	if b.Features&featureTOC == 0 {
		return br, nil
	}
	if err := br.readTOC(); err != nil {
		return nil, fmt.Errorf("blob %s: table of contents: %w", b.ID, err)
	}
	return br, nil
}

func (br *BlobReader) readMeta() error {
	b := br.blob
	if b.MetaCompressedSize > maxMeta || b.MetaSize > maxMeta {
		return fmt.Errorf("has %d bytes, over the limit of %d", b.MetaSize, maxMeta)
	}
	raw := make([]byte, b.MetaCompressedSize+headerLen)
	if _, err := br.r.ReadAt(raw, int64(b.MetaOff)); err != nil {
		return err
	}
	table, h := raw[:b.MetaCompressedSize], raw[b.MetaCompressedSize:]
	switch {
	case le.Uint32(h) != magic || le.Uint32(h[headerLen-4:]) != magic:
		return errors.New("header has no magic at both ends")
	case le.Uint32(h[8:]) != b.MetaCompressor, le.Uint32(h[12:]) != b.ChunkCount, le.Uint64(h[16:]) != b.MetaOff,
		le.Uint64(h[24:]) != b.MetaCompressedSize, le.Uint64(h[32:]) != b.MetaSize:
		return errors.New("header and blob record differ")
	}
	table, err := decompress(b.MetaCompressor, table, int(b.MetaSize))
	if err != nil {
		return err
	}
	record, size := metaV1, 16
	if b.Features&featureChunkInfoV2 != 0 {
		record, size = metaV2, 24
	}
	if uint64(len(table)) != uint64(b.ChunkCount)*uint64(size) {
		return fmt.Errorf("has %d bytes for %d chunks", len(table), b.ChunkCount)
	}
	for ; len(table) > 0; table = table[size:] {
		br.Metas = append(br.Metas, record(table))
	}
	return br.checkMetas()
}

func metaV1(b []byte) Meta {
	a, c := le.Uint64(b), le.Uint64(b[8:])
	m := Meta{
		StoredOff: c & (1<<40 - 1),
		StoredLen: uint32(c>>44) | uint32(c>>40&15)<<20,
		DevOff:    a & (1<<44 - 1) &^ 0xfff,
		Len:       uint32(a>>44) | uint32(a>>8&15)<<20,
	}
	m.StoredLen++
	m.Len++
	m.Compressed = m.StoredLen != m.Len
	return m
}

func metaV2(b []byte) Meta {
	a, c, flags := le.Uint64(b), le.Uint64(b[8:]), b[7]
	m := Meta{
		StoredOff:  c & (1<<40 - 1),
		StoredLen:  uint32(c >> 40),
		DevOff:     a & (1<<32 - 1) << 12,
		Len:        uint32(a>>32)&0xffffff + 1,
		Compressed: flags&1 != 0,
	}
	if flags&0x10 != 0 {
		m.CRC = le.Uint32(b[16:])
	}
	return m
}

// checkMetas holds the table against the rules that nydusd asserts: device
// offsets packed, stored offsets ascending and before the table.
func (br *BlobReader) checkMetas() error {
	var dev, stored uint64
	for i, m := range br.Metas {
		if m.DevOff != dev {
			return fmt.Errorf("chunk %d is at device offset %d, want %d", i, m.DevOff, dev)
		}
		if m.StoredOff < stored || m.StoredOff+uint64(m.StoredLen) > br.blob.MetaOff {
			return fmt.Errorf("chunk %d is stored at %d, want from %d to %d", i, m.StoredOff, stored, br.blob.MetaOff)
		}
		dev = (dev + uint64(m.Len) + 0xfff) &^ 0xfff
		stored = m.StoredOff + uint64(m.StoredLen)
	}
	if dev != br.blob.UncompressedSize {
		return fmt.Errorf("chunks end at device offset %d, the blob at %d", dev, br.blob.UncompressedSize)
	}
	return nil
}

func (br *BlobReader) readTOC() error {
	size := uint64(br.blob.TOCSize)
	if size < tarLen || size > 4096 || size%128 != 0 || size > br.blob.CompressedSize {
		return fmt.Errorf("has %d bytes", size)
	}
	toc := make([]byte, size)
	if _, err := br.r.ReadAt(toc, int64(br.blob.CompressedSize-size)); err != nil {
		return err
	}
	if sha256.Sum256(toc) != br.blob.TOCDigest {
		return errors.New("its digest is not the bootstrap's")
	}
	for b := toc[:size-tarLen]; len(b) > 0; b = b[128:] {
		e := TOCEntry{Flags: le.Uint32(b), Name: text(b[8:24]), Off: le.Uint64(b[56:]), StoredSize: le.Uint64(b[64:]), Size: le.Uint64(b[72:])}
		copy(e.Digest[:], b[24:])
		br.TOC = append(br.TOC, e)
		if e.Name != "blob.digest" {
			continue
		}
		digests := make([]byte, 32*len(br.Metas))
		if e.Size != uint64(len(digests)) {
			return fmt.Errorf("blob.digest has %d bytes for %d chunks", e.Size, len(br.Metas))
		}
		if _, err := br.r.ReadAt(digests, int64(e.Off)); err != nil {
			return err
		}
		if sha256.Sum256(digests) != e.Digest {
			return errors.New("blob.digest does not have the digest in its entry")
		}
		for i := range br.Metas {
			br.Digests = append(br.Digests, [32]byte(digests[32*i:]))
		}
	}
	return nil
}

// ReadChunk returns the plain bytes of chunk number i.
func (br *BlobReader) ReadChunk(i int) ([]byte, error) {
	if i < 0 || i >= len(br.Metas) {
		return nil, fmt.Errorf("chunk %d: %w", i, ErrBounds)
	}
	m := br.Metas[i]
	stored := make([]byte, m.StoredLen) // at most 16 MiB, a 24-bit field
	if _, err := br.r.ReadAt(stored, int64(m.StoredOff)); err != nil {
		return nil, fmt.Errorf("chunk %d: %w", i, err)
	}
	if !m.Compressed {
		return stored, nil
	}
	plain, err := decompress(br.blob.Compressor, stored, int(m.Len))
	if err != nil {
		return nil, fmt.Errorf("chunk %d: %w", i, err)
	}
	return plain, nil
}

// decompress returns exactly size plain bytes.
func decompress(compressor uint32, stored []byte, size int) ([]byte, error) {
	var r io.Reader
	switch compressor {
	case CompNone:
		r = bytes.NewReader(stored)
	case CompGzip:
		z, err := gzip.NewReader(bytes.NewReader(stored))
		if err != nil {
			return nil, err
		}
		r = z
	case CompZstd:
		window := uint64(1) << bits.Len64(uint64(size)|1<<20)
		z, err := zstd.NewReader(bytes.NewReader(stored), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(window))
		if err != nil {
			return nil, err
		}
		defer z.Close()
		r = z
	default:
		return nil, fmt.Errorf("compressor %d is not supported: only none, gzip and zstd", compressor)
	}
	plain, err := io.ReadAll(io.LimitReader(r, int64(size)+1))
	if err != nil {
		return nil, err
	}
	if len(plain) != size {
		return nil, fmt.Errorf("has %d plain bytes or more, want %d", len(plain), size)
	}
	return plain, nil
}
