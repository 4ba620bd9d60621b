package rafs

import (
	"crypto/sha256"
	"math/bits"
	"slices"

	"quarry/store/chunk"
)

// Encode returns the bootstrap of t: the same bytes for equal trees, always. It
// fails with a *TreeError when something in t has no place in the format.
func Encode(t *Tree) ([]byte, error) {
	return EncodeTo(t, func(size int64) []byte { return make([]byte, size) })
}

// EncodeTo is Encode into the memory that alloc returns: size zeros. alloc is
// called once, when all else that encoding needs is there.
func EncodeTo(t *Tree, alloc func(size int64) []byte) ([]byte, error) {
	p, err := newPlan(t, knowledge{})
	if err != nil {
		return nil, err
	}
	return p.encode(alloc(p.size)), nil
}

// encode writes the bootstrap to b and fills in p.blob.ID.
func (p *plan) encode(b []byte) []byte {
	_ = p.parts(func(_ area, off int64, part []byte) error { // fails only if the function does
		copy(b[off:], part)
		return nil
	})
	return b
}

// area is a region of the bootstrap.
type area int

const (
	headArea  area = iota // superblocks, device slot, blob table
	nodeArea              // inodes with what is behind them
	blockArea             // blocks of directories and symlinks
	chunkArea             // chunk-info table
	areas
)

// bounds returns where an area begins and where the next one does.
func (p *plan) bounds(a area) (start, end int64) {
	blocks := align(p.inodeEnd, blockSize)
	table := blocks + p.blocks*blockSize
	return []int64{0, inodeArea, blocks, table}[a], []int64{inodeArea, blocks, table, p.size}[a]
}

// parts calls put for every part of the bootstrap that is not only zeros, of each
// area in ascending order, with memory that is put's until it returns. The blob's
// id is the digest of the chunk-info table, which must therefore not hold it;
// the head has it and comes last.
func (p *plan) parts(put func(a area, off int64, part []byte) error) error {
	if err := p.putChunkTable(put); err != nil {
		return err
	}
	var w nodeWriter
	for i := range p.nodes {
		if err := w.write(p, uint32(i), put); err != nil {
			return err
		}
	}
	head := make([]byte, inodeArea)
	p.putSuper(head[superOff:])
	p.putExtSuper(head[extSuperOff:])
	if p.hasBlob() {
		p.putDevice(head[deviceOff:])
		p.putBlobRecord(head[blobTableOff:])
	}
	return put(headArea, 0, head)
}

func (p *plan) hasBlob() bool { return len(p.blob.Chunks) > 0 }

// tablePart is how many chunk-info records are put at once: 80 KiB.
const tablePart = 1024

func (p *plan) putChunkTable(put func(area, int64, []byte) error) error {
	sum := sha256.New()
	buf := make([]byte, min(tablePart, len(p.blob.Chunks))*chunkRecSize)
	for i := 0; i < len(p.blob.Chunks); i += tablePart {
		part := p.blob.Chunks[i:min(i+tablePart, len(p.blob.Chunks))]
		clear(buf)
		for k, c := range part {
			rec := buf[k*chunkRecSize:]
			copy(rec, c.Digest[:])
			le.PutUint32(rec[40:], c.Len) // stored length
			le.PutUint32(rec[44:], c.Len)
			le.PutUint64(rec[48:], uint64(c.Off))
			le.PutUint64(rec[56:], uint64(c.DevOff))
			le.PutUint64(rec[64:], uint64(p.fileOffs[i+k]))
			le.PutUint32(rec[72:], uint32(i+k))
		}
		buf = buf[:len(part)*chunkRecSize]
		sum.Write(buf)
		if err := put(chunkArea, p.chunkTable+int64(i)*chunkRecSize, buf); err != nil {
			return err
		}
	}
	p.blob.ID = chunk.Digest(sum.Sum(nil))
	return nil
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

// nodeWriter writes one inode after the other. All its fields are scratch.
type nodeWriter struct {
	inode, blocks []byte // of the inode at hand
	dirents       []Dirent
	nids          []uint64
}

// zeroed returns b with length n and all zeros.
func zeroed(b []byte, n int64) []byte {
	b = slices.Grow(b[:0], int(n))[:n]
	clear(b)
	return b
}

func (w *nodeWriter) write(p *plan, i uint32, put func(area, int64, []byte) error) error {
	nd := &p.nodes[i]
	n, s := nd.inode, p.shapeOf(nd.inode)
	w.inode, w.blocks = zeroed(w.inode, inodeSize+s.xattrs+s.behind), zeroed(w.blocks, s.blocks*blockSize)
	h := w.inode
	le.PutUint16(h, 1|s.layout<<1)
	le.PutUint16(h[2:], xattrCount(s.xattrs))
	le.PutUint16(h[4:], uint16(n.Mode))
	le.PutUint64(h[8:], uint64(s.size))
	le.PutUint32(h[16:], p.inodeData(nd, s))
	le.PutUint32(h[20:], uint32(nidOf(nd.off())))
	le.PutUint32(h[24:], n.UID)
	le.PutUint32(h[28:], n.GID)
	le.PutUint64(h[32:], uint64(n.Mtime))
	le.PutUint32(h[40:], n.MtimeNsec)
	le.PutUint32(h[44:], nd.nlink)
	putXattrs(h[inodeSize:], n.Xattrs)
	switch n.Type() {
	case ModeDir:
		w.putDir(p, i, s)
	case ModeRegular:
		indexes := h[inodeSize+align(s.xattrs, indexSize):]
		for k := range n.Chunks {
			p.putIndex(indexes[k*indexSize:], p.numbers[int(nd.first)+k])
		}
	case ModeSymlink:
		copy(w.segment(s, 0), n.Target)
	}
	if err := put(nodeArea, nd.off(), h); err != nil || s.blocks == 0 {
		return err
	}
	start, _ := p.bounds(blockArea)
	return put(blockArea, start+int64(nd.block)*blockSize, w.blocks)
}

// inodeData is the field of an inode whose meaning depends on its type: device
// number, chunk format, or first block.
func (p *plan) inodeData(nd *node, s shape) uint32 {
	switch {
	case s.layout == layoutChunk:
		return chunkIndexed | uint32(bits.TrailingZeros32(p.tree.ChunkSize)-blockBits)
	case s.blocks > 0:
		start, _ := p.bounds(blockArea)
		return uint32(start/blockSize) + nd.block
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
// its blocks, or behind the inode.
func (w *nodeWriter) segment(s shape, i int64) []byte {
	if i < s.blocks {
		return w.blocks[i*blockSize:][:blockSize]
	}
	return w.inode[inodeSize+s.xattrs:][:s.behind]
}

func (w *nodeWriter) putDir(p *plan, number uint32, s shape) {
	nd := &p.nodes[number]
	w.dirents = withDots(w.dirents[:0], nd.inode, p.nodes[nd.parent].inode)
	w.nids = w.nids[:0]
	kids := p.kids[nd.first:]
	for _, d := range w.dirents {
		at := number
		switch d.Name {
		case ".":
		case "..":
			at = nd.parent
		default:
			at, kids = kids[0], kids[1:]
		}
		w.nids = append(w.nids, nidOf(p.nodes[at].off()))
	}
	ds, nids := w.dirents, w.nids
	for i := int64(0); len(ds) > 0; i++ {
		n, _ := dirBlock(ds)
		putDirents(w.segment(s, i), ds[:n], nids)
		ds, nids = ds[n:], nids[n:]
	}
}
