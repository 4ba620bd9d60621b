package rafs

import (
	"crypto/sha256"
	"fmt"

	"quarry/store/chunk"
)

const (
	metaRecSize  = 24 // chunk-meta record of the virtual blob
	metaHeader   = blockSize
	metaMagic    = 0xb10bb10b
	tocEntrySize = 128
	tarHeader    = 512
	tocSize      = tocEntrySize + tarHeader
)

// Blob is the one data blob of a bootstrap, as two views of the image's distinct
// chunks in the order of their first use. The virtual blob is what nydusd reads:
// the chunks packed, then a tail of metadata. The data device is what the kernel
// reads: each chunk at a 4 KiB boundary, zeros between. Neither need exist as a
// file: both follow from Chunks.
type Blob struct {
	ID        chunk.Digest // the virtual blob's id V: SHA-256 of the chunk-info table
	Chunks    []Chunk      // by chunk number
	MappedOff int64        // where the data device starts in the flattened device
}

// Chunk is one distinct chunk of an image and its place in both views.
type Chunk struct {
	Digest chunk.Digest
	Len    uint32
	Off    int64 // in the virtual blob
	DevOff int64 // in the data device, a multiple of 4096
}

// add appends a chunk behind the last one.
func (b *Blob) add(d chunk.Digest, length uint32) {
	b.Chunks = append(b.Chunks, Chunk{Digest: d, Len: length, Off: b.DataSize(), DevOff: b.DevSize()})
}

// DataSize is the length of the packed chunks, the virtual blob without its tail.
func (b *Blob) DataSize() int64 {
	if len(b.Chunks) == 0 {
		return 0
	}
	last := b.Chunks[len(b.Chunks)-1]
	return last.Off + int64(last.Len)
}

// DevSize is the length of the data device, a multiple of 4096.
func (b *Blob) DevSize() int64 {
	if len(b.Chunks) == 0 {
		return 0
	}
	last := b.Chunks[len(b.Chunks)-1]
	return align(last.DevOff+int64(last.Len), blockSize)
}

// Size is the length of the whole virtual blob.
func (b *Blob) Size() int64 { return b.tocOff() + tocSize }

func (b *Blob) metaSize() int64   { return metaRecSize * int64(len(b.Chunks)) }
func (b *Blob) digestOff() int64  { return b.DataSize() + b.metaSize() + metaHeader }
func (b *Blob) digestSize() int64 { return sha256.Size * int64(len(b.Chunks)) }
func (b *Blob) tocOff() int64     { return b.digestOff() + b.digestSize() }

// Tail returns the bytes of the virtual blob from DataSize to Size: chunk-meta
// table and its header, blob.digest, table of contents and its tar header.
func (b *Blob) Tail() []byte {
	tail := make([]byte, b.Size()-b.DataSize())
	for i, c := range b.Chunks {
		rec := tail[i*metaRecSize:]
		le.PutUint64(rec, uint64(c.DevOff)>>blockBits|uint64(c.Len-1)<<32)
		le.PutUint64(rec[8:], uint64(c.Off)|uint64(c.Len)<<40)
	}
	b.putMetaHeader(tail[b.metaSize():])
	digests := tail[b.digestOff()-b.DataSize():]
	for i, c := range b.Chunks {
		copy(digests[i*sha256.Size:], c.Digest[:])
	}
	copy(tail[b.tocOff()-b.DataSize():], b.toc())
	return tail
}

func (b *Blob) putMetaHeader(h []byte) {
	le.PutUint32(h, metaMagic)
	le.PutUint32(h[4:], blobFeatures)
	le.PutUint32(h[12:], uint32(len(b.Chunks)))
	le.PutUint64(h[16:], uint64(b.DataSize()))
	le.PutUint64(h[24:], uint64(b.metaSize()))
	le.PutUint64(h[32:], uint64(b.metaSize()))
	le.PutUint32(h[metaHeader-4:], metaMagic)
}

// toc returns the table of contents, whose one entry is blob.digest, and the tar
// header that follows it. The header is written by hand: the bootstrap holds its
// digest, which must not follow another library's choices.
func (b *Blob) toc() []byte {
	toc := make([]byte, tocSize)
	le.PutUint32(toc, 1) // not compressed
	copy(toc[8:24], "blob.digest")
	sum := sha256.New()
	for _, c := range b.Chunks {
		sum.Write(c.Digest[:])
	}
	copy(toc[24:56], sum.Sum(nil))
	le.PutUint64(toc[56:], uint64(b.digestOff()))
	le.PutUint64(toc[64:], uint64(b.digestSize()))
	le.PutUint64(toc[72:], uint64(b.digestSize()))

	h := toc[tocEntrySize:]
	copy(h, "rafs.blob.toc")
	copy(h[124:], fmt.Sprintf("%011o", tocEntrySize))
	copy(h[136:], "00000000000") // mtime
	copy(h[148:], "        ")    // the checksum counts itself as spaces
	h[156] = '0'                 // regular file
	copy(h[257:], "ustar  \x00") // GNU
	var checksum int
	for _, c := range h {
		checksum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", checksum))
	return toc
}

// checkSize holds the blob against the format's offset widths.
func (b *Blob) checkSize() error {
	if size := b.Size(); size > MaxBlob {
		return fmt.Errorf("the tree's distinct chunks need a virtual blob of %d bytes, over the limit of %d", size, int64(MaxBlob))
	}
	return nil
}
