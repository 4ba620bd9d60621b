package rafs

import (
	"encoding/binary"

	"quarry/store/chunk"
)

// The profile's constants. FORMAT.md draws the file they describe.
const (
	blockBits = 12
	blockSize = 1 << blockBits

	superOff     = 1024              // EROFS superblock, 128 bytes
	extSuperOff  = superOff + 128    // RAFS extended superblock, 256 bytes
	deviceOff    = extSuperOff + 256 // the one device slot, 128 bytes
	blobTableOff = blockSize         // the one blob record, 256 bytes
	blobRecSize  = 256

	// Nids count 32-byte slots from the block of the blob table, so that the
	// root, in the block behind it, gets a nid that is neither 0, which glibc
	// hides, nor above the superblock's 16 bits.
	metaBlock = 1
	slotSize  = 32
	inodeArea = 2 * blockSize
	rootNid   = (inodeArea - metaBlock*blockSize) / slotSize

	inodeSize    = 64 // extended inode
	direntSize   = 12
	indexSize    = 8 // chunk index behind a regular file's inode
	chunkRecSize = 80

	mappedAlign = 512 << 10 // the data starts here in the flattened device

	superMagic      = 0xE0F5E1E2
	featureCompat   = 0x40000000 // marks RAFS v6
	featureIncompat = 0x0C       // chunk-based files, device table

	// COMP_NONE, SHA256, EXPLICIT_UID_GID, INLINED_CHUNK_DIGEST, ENCRYPTION_NONE.
	superFlags         = 0x1 | 0x8 | 0x10 | 0x100 | 0x0100_0000
	superFlagXattr     = 0x20
	blobDigesterSHA256 = 1
	// ALIGNED, CHUNK_INFO_V2, INLINED_CHUNK_DIGEST, HAS_TOC, CAP_TAR_TOC.
	blobFeatures = 0x1 | 0x4 | 0x20 | 0x2000_0000 | 0x4000_0000

	layoutPlain  = 0 // data in blocks of its own
	layoutInline = 2 // last, partial block right behind the inode
	layoutChunk  = 4 // chunk indexes behind the inode
	chunkIndexed = 0x20
)

// Limits of what a bootstrap can say.
const (
	// MaxBootstrap bounds the file in both directions. At 8 bytes a chunk index
	// and 80 a chunk record it also keeps chunk numbers below their 24 bits.
	MaxBootstrap = 1 << 30
	// MaxDepth bounds nested directories, so that walking a tree never needs an
	// unbounded stack. Paths of 4096 bytes, the most a system call takes, hold
	// at most 2048 names.
	MaxDepth = 4096
	// MaxName is the longest name of a directory entry.
	MaxName = 255
	// MaxTarget is the longest symlink target: Linux reads targets into a page
	// and needs its last byte.
	MaxTarget = 4095
	// MaxXattrName and MaxXattrNames are Linux's XATTR_NAME_MAX and
	// XATTR_LIST_MAX: a longer name, or a longer list of one file's names with a
	// NUL each, could be stored and never read.
	MaxXattrName  = 255
	MaxXattrNames = 64 << 10
	// MaxXattrValue is what a 16-bit length counts to.
	MaxXattrValue = 1<<16 - 1
	// MaxXattrs is the largest xattr area of one inode: a 12-byte header and
	// 65534 words of 4 bytes, since the 16-bit count starts at 1.
	MaxXattrs = xattrHeader + 4*(1<<16-2)
	// MaxBlob is the largest virtual blob: offsets in it have 40 bits. The data
	// device cannot then reach 16 TiB, where its 32-bit block addresses end:
	// padding adds at most 4095 bytes to each of the chunks, of which
	// MaxBootstrap holds less than 2^24.
	MaxBlob = 1 << 40
)

var le = binary.LittleEndian

// align rounds n up to a multiple of to, a power of two.
func align(n, to int64) int64 { return (n + to - 1) &^ (to - 1) }

// shape is how much room an inode takes, and where.
type shape struct {
	layout uint16
	size   int64 // i_size
	xattrs int64 // bytes of the xattr area
	behind int64 // bytes behind the xattrs: inline tail, or padding and chunk indexes
	blocks int64 // blocks of its own in the block area
}

// flatShape is the shape of a directory or symlink with size bytes of data. A
// tail is inline when inode, xattrs and tail fit in one block, because it must
// not cross a block boundary.
func flatShape(size, xattrs int64) shape {
	tail := size % blockSize
	if tail != 0 && inodeSize+xattrs+tail <= blockSize {
		return shape{layout: layoutInline, size: size, xattrs: xattrs, behind: tail, blocks: size / blockSize}
	}
	return shape{layout: layoutPlain, size: size, xattrs: xattrs, blocks: align(size, blockSize) / blockSize}
}

// fileShape is the shape of a regular file. Its indexes are 8-aligned, and so
// is its inode.
func fileShape(size, xattrs int64, chunkSize uint32) shape {
	indexes := align(xattrs, indexSize) - xattrs + indexSize*chunk.Count(size, int64(chunkSize))
	return shape{layout: layoutChunk, size: size, xattrs: xattrs, behind: indexes}
}

// place returns the offset of an inode of shape s when everything before next
// is taken, and the new next. Inodes never cross a block boundary, nor do they
// with their inline tails; xattrs and chunk indexes may.
func place(next int64, s shape) (off, newNext int64) {
	unit := int64(inodeSize)
	if s.layout == layoutInline {
		unit += s.xattrs + s.behind
	}
	if next%blockSize+unit > blockSize {
		next = align(next, blockSize)
	}
	return next, align(next+inodeSize+s.xattrs+s.behind, slotSize)
}

func nidOf(off int64) uint64 { return uint64(off-metaBlock*blockSize) / slotSize }
