package rafs

import (
	"crypto/sha256"
	"math/bits"
)

// Encode returns the bootstrap of t: the same bytes for equal trees, always. It
// fails with a *TreeError when something in t has no place in the format.
func Encode(t *Tree) ([]byte, error) {
	p, err := newPlan(t)
	if err != nil {
		return nil, err
	}
	return p.encode(), nil
}

// encode writes the bootstrap and fills in p.blob.ID. The id is the digest of
// the chunk-info table, which must therefore not hold it; the device slot and
// the blob record get it last.
func (p *plan) encode() []byte {
	b := make([]byte, p.size)
	p.putChunkTable(b)
	for i := range p.nodes {
		p.putInode(b, &p.nodes[i])
	}
	p.putSuper(b[superOff:])
	p.putExtSuper(b[extSuperOff:])
	if p.hasBlob() {
		p.putDevice(b[deviceOff:])
		p.putBlobRecord(b[blobTableOff:])
	}
	return b
}

func (p *plan) hasBlob() bool { return len(p.blob.Chunks) > 0 }

func (p *plan) putChunkTable(b []byte) {
	table := b[p.chunkTable:]
	for i, c := range p.blob.Chunks {
		rec := table[i*chunkRecSize:]
		copy(rec, c.Digest[:])
		le.PutUint32(rec[40:], c.Len) // stored length
		le.PutUint32(rec[44:], c.Len)
		le.PutUint64(rec[48:], uint64(c.Off))
		le.PutUint64(rec[56:], uint64(c.DevOff))
		le.PutUint64(rec[64:], uint64(p.fileOffs[i]))
		le.PutUint32(rec[72:], uint32(i))
	}
	p.blob.ID = sha256.Sum256(table[:len(p.blob.Chunks)*chunkRecSize])
}

func (p *plan) putSuper(b []byte) {
	le.PutUint32(b, superMagic)
	le.PutUint32(b[8:], featureCompat)
	b[12] = blockBits
	le.PutUint16(b[14:], rootNid)
	le.PutUint64(b[16:], uint64(len(p.nodes)))
	le.PutUint32(b[36:], uint32(p.blob.DevSize()/blockSize))
	le.PutUint32(b[40:], metaBlock)
	le.PutUint32(b[80:], featureIncompat)
	if p.hasBlob() {
		le.PutUint16(b[86:], 1) // extra devices
	}
	le.PutUint16(b[88:], deviceOff/128)
}

func (p *plan) putExtSuper(b []byte) {
	flags := uint64(superFlags)
	if p.hasXattrs {
		flags |= superFlagXattr
	}
	le.PutUint64(b, flags)
	le.PutUint64(b[8:], blobTableOff)
	le.PutUint32(b[20:], p.tree.ChunkSize)
	if p.hasBlob() {
		le.PutUint32(b[16:], blobRecSize)
		le.PutUint64(b[24:], uint64(p.chunkTable))
		le.PutUint64(b[32:], uint64(len(p.blob.Chunks)*chunkRecSize))
	}
}

func (p *plan) putDevice(b []byte) {
	copy(b, p.blob.ID.Hex())
	le.PutUint32(b[64:], uint32(p.blob.DevSize()/blockSize))
	le.PutUint32(b[68:], uint32(p.blob.MappedOff/blockSize))
}

func (p *plan) putBlobRecord(b []byte) {
	copy(b, p.blob.ID.Hex())
	le.PutUint32(b[68:], p.tree.ChunkSize)
	le.PutUint32(b[72:], uint32(len(p.blob.Chunks)))
	le.PutUint32(b[80:], blobDigesterSHA256)
	le.PutUint32(b[84:], blobFeatures)
	le.PutUint64(b[88:], uint64(p.blob.Size()))
	le.PutUint64(b[96:], uint64(p.blob.DevSize()))
	le.PutUint32(b[104:], tocSize)
	le.PutUint64(b[112:], uint64(p.blob.DataSize()))
	le.PutUint64(b[120:], uint64(p.blob.metaSize()))
	le.PutUint64(b[128:], uint64(p.blob.metaSize()))
	toc := sha256.Sum256(p.blob.toc())
	copy(b[136:], toc[:])
}

func (p *plan) putInode(b []byte, nd *node) {
	n, h := nd.inode, b[nd.off:]
	le.PutUint16(h, 1|nd.layout<<1)
	le.PutUint16(h[2:], xattrCount(nd.xattrs))
	le.PutUint16(h[4:], uint16(n.Mode))
	le.PutUint64(h[8:], uint64(nd.size))
	le.PutUint32(h[16:], p.inodeData(nd))
	le.PutUint32(h[20:], uint32(nidOf(nd.off)))
	le.PutUint32(h[24:], n.UID)
	le.PutUint32(h[28:], n.GID)
	le.PutUint64(h[32:], uint64(n.Mtime))
	le.PutUint32(h[40:], n.MtimeNsec)
	le.PutUint32(h[44:], nd.nlink)
	putXattrs(h[inodeSize:], n.Xattrs)
	switch n.Type() {
	case ModeDir:
		p.putDir(b, nd)
	case ModeRegular:
		indexes := h[inodeSize+align(nd.xattrs, indexSize):]
		for k, d := range n.Chunks {
			p.putIndex(indexes[k*indexSize:], p.numbers[d])
		}
	case ModeSymlink:
		copy(p.segment(b, nd, 0), n.Target)
	}
}

// inodeData is the field of an inode whose meaning depends on its type: device
// number, chunk format, or first block.
func (p *plan) inodeData(nd *node) uint32 {
	switch {
	case nd.layout == layoutChunk:
		return chunkIndexed | uint32(bits.TrailingZeros32(p.tree.ChunkSize)-blockBits)
	case nd.blocks > 0:
		return uint32(align(p.inodeEnd, blockSize)/blockSize + nd.block)
	default:
		return nd.inode.Rdev
	}
}

// putIndex writes one chunk index. The kernel reads the device number 1 and the
// block; nydusd also the chunk number, spread over fields the kernel ignores.
func (p *plan) putIndex(b []byte, number uint32) {
	le.PutUint16(b, uint16(number))
	le.PutUint16(b[2:], 1|uint16(number>>16)<<8)
	le.PutUint32(b[4:], uint32(p.blob.Chunks[number].DevOff/blockSize))
}

// segment returns the bytes for block i of a directory's or symlink's data: in
// the block area, or behind the inode.
func (p *plan) segment(b []byte, nd *node, i int64) []byte {
	if i < nd.blocks {
		off := align(p.inodeEnd, blockSize) + (nd.block+i)*blockSize
		return b[off : off+blockSize]
	}
	off := nd.off + inodeSize + nd.xattrs
	return b[off : off+nd.behind]
}

func (p *plan) putDir(b []byte, nd *node) {
	ds := withDots(nil, nd.inode, nd.parent)
	for i := int64(0); len(ds) > 0; i++ {
		n, _ := dirBlock(ds)
		putDirents(p.segment(b, nd, i), ds[:n], func(n *Inode) uint64 {
			return nidOf(p.nodes[p.index[n]].off)
		})
		ds = ds[n:]
	}
}
