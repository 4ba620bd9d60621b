package rafs

import (
	"bytes"
	"errors"
	"fmt"

	"quarry/store/chunk"
)

// Image is a decoded bootstrap.
type Image struct {
	Tree      *Tree // most of the memory: who does not need it sets it to nil
	ChunkSize uint32
	Blob      *Blob // nil when no file has data
	Size      int64 // length of the bootstrap in bytes, a multiple of 4096

	fileBytes int64
}

// DeviceSize is the length of the flattened device that the kernel mounts: the
// bootstrap, zeros up to Blob.MappedOff, the data device. Without data it is the
// bootstrap alone.
func (m *Image) DeviceSize() int64 {
	if m.Blob == nil {
		return m.Size
	}
	return m.Blob.MappedOff + m.Blob.DevSize()
}

// FileBytes is the length of all regular files, each hard link counted once.
func (m *Image) FileBytes() int64 { return m.fileBytes }

// Walk is m.Tree.Walk; m.Tree must still be there.
func (m *Image) Walk(fn func(path string, n *Inode) error) error { return m.Tree.Walk(fn) }

// Decode reads a bootstrap of our profile and refuses every other byte sequence
// with a *FormatError: what it accepts, Encode writes. b may come from anybody;
// the memory used is proportional to its length. The image does not keep b.
func Decode(b []byte) (*Image, error) {
	if size := len(b); size < inodeArea+blockSize || size > MaxBootstrap || size%blockSize != 0 {
		return nil, formatErrorf(0, "length %d is not a multiple of %d from %d to %d", size, blockSize, inodeArea+blockSize, MaxBootstrap)
	}
	if err := checkFixed(b); err != nil {
		return nil, err
	}
	d := decoder{b: b, chunkSize: le.Uint32(b[extSuperOff+20:]), next: inodeArea, linked: map[uint64]*Inode{}}
	if !chunk.ValidSize(int64(d.chunkSize)) {
		return nil, formatErrorf(extSuperOff+20, "chunk size is %d", d.chunkSize)
	}
	if err := d.readChunkTable(); err != nil {
		return nil, err
	}
	root, err := d.inode(rootNid, rootNid, 0)
	if err != nil {
		return nil, err
	}
	if !root.IsDir() {
		return nil, formatErrorf(inodeArea, "the root is no directory")
	}
	return canonical(b, &Tree{ChunkSize: d.chunkSize, Root: root}, d.knowledge())
}

// canonical ends the decoding of b into t: t's bootstrap must be b, which checks
// every byte that the decoder did not need to look at.
func canonical(b []byte, t *Tree, c knowledge) (*Image, error) {
	p, err := newPlan(t, c)
	if err != nil {
		return nil, &FormatError{Off: inodeArea, Err: err}
	}
	if p.size != int64(len(b)) {
		return nil, formatErrorf(min(p.size, int64(len(b))), "length is %d, want %d for this tree", len(b), p.size)
	}
	if err := p.compare(b); err != nil {
		return nil, err
	}
	m := &Image{Tree: t, ChunkSize: t.ChunkSize, Size: p.size}
	for i := range p.nodes {
		m.fileBytes += p.nodes[i].inode.Size // which only files have
	}
	if p.hasBlob() {
		blob := p.blob // by itself, so that the plan can go
		m.Blob = &blob
	}
	return m, nil
}

// compare holds b against the bootstrap that p describes, part by part: a second
// whole one would double what decoding a large image takes.
func (p *plan) compare(b []byte) error {
	var at [areas]int64 // up to where each area was compared
	for a := range areas {
		at[a], _ = p.bounds(a)
	}
	zeros := func(a area, end int64) error {
		for i, c := range b[at[a]:end] {
			if c != 0 {
				return formatErrorf(at[a]+int64(i), "byte is %#02x, want 0 for this tree", c)
			}
		}
		return nil
	}
	err := p.parts(func(a area, off int64, part []byte) error {
		if err := zeros(a, off); err != nil {
			return err
		}
		at[a] = off + int64(len(part))
		if got := b[off:at[a]]; !bytes.Equal(got, part) {
			i := 0
			for got[i] == part[i] {
				i++
			}
			return formatErrorf(off+int64(i), "byte is %#02x, want %#02x for this tree", got[i], part[i])
		}
		return nil
	})
	for a := area(0); a < areas && err == nil; a++ {
		_, end := p.bounds(a)
		err = zeros(a, end)
	}
	return err
}

// checkFixed looks at the fields in which another EROFS or RAFS file would
// differ, for a message that says what the file is not.
func checkFixed(b []byte) error {
	for _, f := range [...]struct {
		off, size int64
		want      uint64
		name      string
	}{
		{superOff, 4, superMagic, "EROFS magic"},
		{superOff + 4, 4, 0, "superblock checksum"},
		{superOff + 8, 4, featureCompat, "feature_compat"},
		{superOff + 12, 1, blockBits, "block size bits"},
		{superOff + 14, 2, rootNid, "root nid"},
		{superOff + 40, 4, metaBlock, "meta block address"},
		{superOff + 80, 4, featureIncompat, "feature_incompat"},
	} {
		var field [8]byte
		copy(field[:], b[f.off:f.off+f.size])
		if got := le.Uint64(field[:]); got != f.want {
			return formatErrorf(f.off, "%s is %#x, want %#x", f.name, got, f.want)
		}
	}
	if flags := le.Uint64(b[extSuperOff:]); flags&^superFlagXattr != superFlags {
		return formatErrorf(extSuperOff, "RAFS flags are %#x, want %#x and no other but %#x", flags, superFlags, superFlagXattr)
	}
	return nil
}

type decoder struct {
	b         []byte
	chunkSize uint32
	table     []byte // chunk-info records

	// Inodes and blocks must lie where Encode would put them, one behind the
	// other. So none is read twice, nothing is bigger than its bytes in the file,
	// and no directory can contain itself.
	next      int64 // the inode area is taken up to here
	nextBlock int64 // the block area is taken up to this block; 0: its start is not known yet
	linked    map[uint64]*Inode
	inodes    int // read so far
}

// knowledge is what newPlan need not find out. No inode but those linked was
// returned twice: each must lie behind the one before.
func (d *decoder) knowledge() knowledge {
	linked := make(map[*Inode]struct{}, len(d.linked))
	for _, n := range d.linked {
		linked[n] = struct{}{}
	}
	return knowledge{
		inodes: d.inodes, chunks: len(d.table) / chunkRecSize,
		linked: func(n *Inode) bool { _, ok := linked[n]; return ok },
	}
}

func (d *decoder) readChunkTable() error {
	const field = extSuperOff + 24
	off, size := le.Uint64(d.b[field:]), le.Uint64(d.b[field+8:])
	if limit := uint64(len(d.b)); off > limit || size > limit-off || size%chunkRecSize != 0 {
		return formatErrorf(field, "chunk table of %d bytes at %d is outside the file or not of whole records", size, off)
	}
	d.table = d.b[off : off+size]
	return nil
}

// inode reads the inode nid of the directory parent, depth directories deep.
func (d *decoder) inode(nid, parent uint64, depth int) (*Inode, error) {
	if n := d.linked[nid]; n != nil {
		return n, nil
	}
	if nid > nidOf(int64(len(d.b)-inodeSize)) {
		return nil, formatErrorf(d.next, "inode %d is outside the file", nid)
	}
	off := int64(nid)*slotSize + metaBlock*blockSize
	n, s, err := d.header(off)
	if err != nil {
		return nil, err
	}
	want, next := place(d.next, s)
	if off != want || next > int64(len(d.b)) {
		return nil, formatErrorf(off, "inode of %d bytes is here, want it at %d and within the file", next-want, want)
	}
	d.next = next
	d.inodes++
	if err := d.body(n, off, s); err != nil {
		return nil, err
	}
	if n.IsDir() {
		err = d.dir(n, off, s, [2]uint64{nid, parent}, depth)
	} else if le.Uint32(d.b[off+44:]) > 1 {
		d.linked[nid] = n
	}
	if err == nil {
		err = checkInode(n, d.chunkSize)
	}
	return n, located(off, err)
}

// located gives err the place off, unless it has one.
func located(off int64, err error) error {
	var placed *FormatError
	if err == nil || errors.As(err, &placed) {
		return err
	}
	return &FormatError{Off: off, Err: err}
}

// header reads the fixed part of the inode at off and works out its shape.
func (d *decoder) header(off int64) (*Inode, shape, error) {
	h := d.b[off:]
	n := &Inode{
		Mode: uint32(le.Uint16(h[4:])), UID: le.Uint32(h[24:]), GID: le.Uint32(h[28:]),
		Mtime: int64(le.Uint64(h[32:])), MtimeNsec: le.Uint32(h[40:]),
	}
	var xattrs int64
	if count := int64(le.Uint16(h[2:])); count > 0 {
		xattrs = xattrHeader + 4*(count-1)
	}
	size, limit := le.Uint64(h[8:]), uint64(len(d.b))
	if n.IsRegular() {
		// Every chunk has an index in the file.
		limit = limit / indexSize * uint64(d.chunkSize)
	}
	if size > limit {
		return nil, shape{}, formatErrorf(off+8, "size is %d, the file has room for %d", size, limit)
	}
	var s shape
	switch n.Type() {
	case ModeRegular:
		n.Size = int64(size)
		s = fileShape(n.Size, xattrs, d.chunkSize)
	case ModeDir, ModeSymlink:
		s = flatShape(int64(size), xattrs)
	case ModeChar, ModeBlock:
		n.Rdev = le.Uint32(h[16:])
		s = flatShape(0, xattrs)
	default:
		s = flatShape(0, xattrs)
	}
	if got, want := le.Uint16(h), 1|s.layout<<1; got != want {
		return nil, shape{}, formatErrorf(off, "inode format is %#x, want %#x", got, want)
	}
	return n, s, nil
}

// body reads what lies behind the inode at off, or in its blocks, but for
// directory entries. The inode's own bytes are known to be inside the file.
func (d *decoder) body(n *Inode, off int64, s shape) (err error) {
	behind := off + inodeSize
	if s.xattrs > 0 {
		if n.Xattrs, err = readXattrs(d.b[behind : behind+s.xattrs]); err != nil {
			return located(behind, err)
		}
	}
	if err := d.takeBlocks(off, s.blocks); err != nil {
		return err
	}
	switch n.Type() {
	case ModeRegular:
		n.Chunks, err = d.chunks(n, off+inodeSize+align(s.xattrs, indexSize))
	case ModeSymlink:
		if s.size > MaxTarget {
			return formatErrorf(off+8, "symlink target has %d bytes, over the limit of %d", s.size, MaxTarget)
		}
		n.Target = string(d.segment(off, s, 0))
	}
	return err
}

// takeBlocks checks that the inode at off has the next blocks of the block area.
func (d *decoder) takeBlocks(off, blocks int64) error {
	if blocks == 0 {
		return nil
	}
	first := int64(le.Uint32(d.b[off+16:]))
	if d.nextBlock != 0 && first != d.nextBlock || first <= inodeArea/blockSize {
		return formatErrorf(off+16, "first block is %d, not the next of the block area", first)
	}
	if d.nextBlock = first + blocks; d.nextBlock > int64(len(d.b))/blockSize {
		return formatErrorf(off+16, "%d blocks from %d on are outside the file", blocks, first)
	}
	return nil
}

// segment is the reading counterpart of plan.segment.
func (d *decoder) segment(off int64, s shape, i int64) []byte {
	if i < s.blocks {
		start := (int64(le.Uint32(d.b[off+16:])) + i) * blockSize
		return d.b[start : start+min(blockSize, s.size-i*blockSize)]
	}
	start := off + inodeSize + s.xattrs
	return d.b[start : start+s.behind]
}

func (d *decoder) chunks(n *Inode, off int64) ([]chunk.Digest, error) {
	count := chunk.Count(n.Size, int64(d.chunkSize))
	if count == 0 {
		return nil, nil
	}
	digests := make([]chunk.Digest, count)
	for k := range digests {
		index := d.b[off+int64(k)*indexSize:]
		number := int64(le.Uint16(index)) | int64(index[3])<<16
		if number >= int64(len(d.table)/chunkRecSize) {
			return nil, formatErrorf(off+int64(k)*indexSize, "chunk number is %d, the chunk table has %d", number, len(d.table)/chunkRecSize)
		}
		rec := d.table[number*chunkRecSize:]
		// The kernel goes by the block, all others by the number.
		if block := uint64(le.Uint32(index[4:])); block<<blockBits != le.Uint64(rec[56:]) {
			return nil, formatErrorf(off+int64(k)*indexSize+4, "chunk %d is in block %d, the chunk table has it at byte %d", number, block, le.Uint64(rec[56:]))
		}
		copy(digests[k][:], rec)
	}
	return digests, nil
}

// dir reads the entries of the directory n at off. dots are the nids that "."
// and ".." must have.
func (d *decoder) dir(n *Inode, off int64, s shape, dots [2]uint64, depth int) error {
	if depth >= MaxDepth {
		return formatErrorf(off, "directory is nested deeper than the limit of %d", MaxDepth)
	}
	entries, err := d.entries(off, s, dots)
	if err != nil {
		return err
	}
	n.Entries = make([]Dirent, len(entries))
	for i, e := range entries {
		child, err := d.inode(e.nid, dots[0], depth+1)
		if err != nil {
			return err
		}
		n.Entries[i] = Dirent{Name: e.name, Inode: child}
	}
	return nil
}

// entries reads the directory's blocks and takes out the dots.
func (d *decoder) entries(off int64, s shape, dots [2]uint64) ([]rawDirent, error) {
	var all []rawDirent
	var err error
	for i := int64(0); i*blockSize < s.size; i++ {
		if all, err = readDirents(all, d.segment(off, s, i)); err != nil {
			return nil, located(off, fmt.Errorf("block %d: %w", i, err))
		}
	}
	kept, found := all[:0], 0
	for _, e := range all {
		if e.name != "." && e.name != ".." {
			kept = append(kept, e)
			continue
		}
		if want := dots[len(e.name)-1]; e.nid != want {
			return nil, formatErrorf(off, "entry %q has nid %d, want %d", e.name, e.nid, want)
		}
		found++
	}
	if found != len(dots) {
		return nil, formatErrorf(off, "directory has %d entries . and .., want 2", found)
	}
	return kept, nil
}
