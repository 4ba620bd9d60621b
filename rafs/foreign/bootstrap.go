// Package foreign reads RAFS v6 bootstraps and data blobs as stock nydus-image
// writes them. It exists for tests: our own encoder is held against a reader
// that shares no code with it, and that stock files prove right.
package foreign

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"quarry/rafs"
	"quarry/store/chunk"
)

// ErrBounds is the error for anything that lies outside the file.
var ErrBounds = errors.New("outside the file")

// maxDepth bounds nested directories; a directory that contains itself ends there.
const maxDepth = 4096

var le = binary.LittleEndian

// Image is a parsed bootstrap.
type Image struct {
	Flags uint64 // RAFS flags of the extended superblock
	Tree  *rafs.Tree
	Blobs []Blob
	Table []Chunk // chunk-info table, in its own order
	// Indexes are the chunk indexes of every regular file.
	Indexes map[*rafs.Inode][]Index

	b        []byte
	blockLen uint64
	meta     uint64 // offset of nid 0
	byIndex  map[Index]int
	inodes   map[uint64]*rafs.Inode // by nid
}

// Blob is a record of the blob table with its device slot.
type Blob struct {
	ID                                    string
	Index, ChunkSize, ChunkCount          uint32
	Compressor, Digester, Features        uint32
	CompressedSize, UncompressedSize      uint64
	TOCSize, MetaCompressor               uint32
	MetaOff, MetaCompressedSize, MetaSize uint64
	TOCDigest                             [32]byte
	SlotTag                               string
	SlotBlocks, SlotMappedBlock           uint32
}

// Chunk is a record of the chunk-info table.
type Chunk struct {
	Digest                     [32]byte
	BlobIndex, Flags           uint32
	StoredLen, Len             uint32
	StoredOff, DevOff, FileOff uint64
	Number, CRC                uint32
}

// Index is a chunk index of an inode.
type Index struct {
	BlobIndex, Number, Block uint32
}

// Open parses a whole bootstrap.
func Open(b []byte) (*Image, error) {
	m := &Image{b: b, Indexes: map[*rafs.Inode][]Index{}, byIndex: map[Index]int{}, inodes: map[uint64]*rafs.Inode{}}
	super, err := m.at(1024, 128+256)
	if err != nil {
		return nil, err
	}
	if magic := le.Uint32(super); magic != 0xE0F5E1E2 {
		return nil, fmt.Errorf("magic is %#x", magic)
	}
	if features := le.Uint32(super[80:]); features != 0x0C {
		return nil, fmt.Errorf("feature_incompat is %#x, want 0xc", features)
	}
	m.blockLen = 1 << (super[12] & 31)
	m.meta = uint64(le.Uint32(super[40:])) * m.blockLen
	ext := super[128:]
	m.Flags = le.Uint64(ext)
	m.Tree = &rafs.Tree{ChunkSize: le.Uint32(ext[20:])}
	if !chunk.ValidSize(int64(m.Tree.ChunkSize)) {
		return nil, fmt.Errorf("chunk size is %d", m.Tree.ChunkSize)
	}
	slots := uint64(le.Uint16(super[88:])) * 128
	if err := m.readBlobs(le.Uint64(ext[8:]), uint64(le.Uint32(ext[16:])), slots, int(le.Uint16(super[86:]))); err != nil {
		return nil, fmt.Errorf("blob table: %w", err)
	}
	if err := m.readTable(le.Uint64(ext[24:]), le.Uint64(ext[32:])); err != nil {
		return nil, fmt.Errorf("chunk-info table: %w", err)
	}
	m.Tree.Root, err = m.inode(uint64(le.Uint16(super[14:])), 0)
	return m, err
}

// at returns n bytes of the file.
func (m *Image) at(off, n uint64) ([]byte, error) {
	if size := uint64(len(m.b)); off > size || n > size-off {
		return nil, fmt.Errorf("%d bytes at %d: %w", n, off, ErrBounds)
	}
	return m.b[off : off+n], nil
}

func (m *Image) readBlobs(off, size, slots uint64, devices int) error {
	table, err := m.at(off, size)
	if err != nil {
		return err
	}
	if len(table) != devices*256 {
		return fmt.Errorf("has %d bytes for %d devices", len(table), devices)
	}
	for i := range devices {
		rec := table[i*256:]
		slot, err := m.at(slots+uint64(i)*128, 128)
		if err != nil {
			return err
		}
		b := Blob{
			ID: text(rec[:64]), Index: le.Uint32(rec[64:]), ChunkSize: le.Uint32(rec[68:]), ChunkCount: le.Uint32(rec[72:]),
			Compressor: le.Uint32(rec[76:]), Digester: le.Uint32(rec[80:]), Features: le.Uint32(rec[84:]),
			CompressedSize: le.Uint64(rec[88:]), UncompressedSize: le.Uint64(rec[96:]),
			TOCSize: le.Uint32(rec[104:]), MetaCompressor: le.Uint32(rec[108:]),
			MetaOff: le.Uint64(rec[112:]), MetaCompressedSize: le.Uint64(rec[120:]), MetaSize: le.Uint64(rec[128:]),
			SlotTag: text(slot[:64]), SlotBlocks: le.Uint32(slot[64:]), SlotMappedBlock: le.Uint32(slot[68:]),
		}
		copy(b.TOCDigest[:], rec[136:])
		m.Blobs = append(m.Blobs, b)
	}
	return nil
}

func text(b []byte) string { return string(bytes.TrimRight(b, "\x00")) }

func (m *Image) readTable(off, size uint64) error {
	table, err := m.at(off, size)
	if err != nil {
		return err
	}
	for ; len(table) >= 80; table = table[80:] {
		c := Chunk{
			BlobIndex: le.Uint32(table[32:]), Flags: le.Uint32(table[36:]),
			StoredLen: le.Uint32(table[40:]), Len: le.Uint32(table[44:]),
			StoredOff: le.Uint64(table[48:]), DevOff: le.Uint64(table[56:]), FileOff: le.Uint64(table[64:]),
			Number: le.Uint32(table[72:]), CRC: le.Uint32(table[76:]),
		}
		copy(c.Digest[:], table)
		m.byIndex[Index{c.BlobIndex, c.Number, uint32(c.DevOff / m.blockLen)}] = len(m.Table)
		m.Table = append(m.Table, c)
	}
	return nil
}

// Chunk returns the table's record for a chunk index.
func (m *Image) Chunk(x Index) (Chunk, bool) {
	i, ok := m.byIndex[x]
	if !ok {
		return Chunk{}, false
	}
	return m.Table[i], true
}

// inode reads the inode nid and all below it, depth directories deep.
func (m *Image) inode(nid uint64, depth int) (*rafs.Inode, error) {
	if n, seen := m.inodes[nid]; seen {
		if n.IsDir() {
			return nil, fmt.Errorf("inode %d: directory has two names", nid)
		}
		return n, nil
	}
	if depth > maxDepth || nid > uint64(len(m.b))/32 {
		return nil, fmt.Errorf("inode %d: %w", nid, ErrBounds)
	}
	n, err := m.readInode(nid, m.meta+32*nid, depth)
	if err != nil {
		return nil, fmt.Errorf("inode %d: %w", nid, err)
	}
	return n, nil
}

func (m *Image) readInode(nid, off uint64, depth int) (*rafs.Inode, error) {
	h, err := m.at(off, 32)
	if err != nil {
		return nil, err
	}
	format := le.Uint16(h)
	n := &rafs.Inode{Mode: uint32(le.Uint16(h[4:]))}
	m.inodes[nid] = n
	size, behind := uint64(le.Uint32(h[8:])), off+32
	n.UID, n.GID = uint32(le.Uint16(h[24:])), uint32(le.Uint16(h[26:]))
	if format&1 != 0 {
		if h, err = m.at(off, 64); err != nil {
			return nil, err
		}
		size, behind = le.Uint64(h[8:]), off+64
		n.UID, n.GID = le.Uint32(h[24:]), le.Uint32(h[28:])
		n.Mtime, n.MtimeNsec = int64(le.Uint64(h[32:])), le.Uint32(h[40:])
	}
	if count := uint64(le.Uint16(h[2:])); count > 0 {
		area, err := m.at(behind, 12+4*(count-1))
		if err != nil {
			return nil, err
		}
		behind += uint64(len(area))
		if n.Xattrs, err = readXattrs(area[12:]); err != nil {
			return nil, err
		}
	}
	switch n.Type() {
	case rafs.ModeChar, rafs.ModeBlock:
		n.Rdev = le.Uint32(h[16:])
	case rafs.ModeRegular:
		n.Size = int64(size)
		err = m.readIndexes(n, le.Uint32(h[16:]), format>>1, (behind+7)&^7)
	case rafs.ModeSymlink, rafs.ModeDir:
		var data []byte
		if data, err = m.flat(uint64(le.Uint32(h[16:]))*m.blockLen, behind, size, format>>1); err != nil {
			return nil, err
		}
		if n.IsDir() {
			err = m.readDir(n, data, depth)
		} else {
			n.Target = string(data)
		}
	}
	return n, err
}

// flat returns the data of an inode in layout 0 or 2: blocks, then maybe a tail
// behind the inode.
func (m *Image) flat(blocks, tail, size uint64, layout uint16) ([]byte, error) {
	if layout == 0 {
		return m.at(blocks, size)
	}
	if layout != 2 {
		return nil, fmt.Errorf("data layout is %d", layout)
	}
	full := size / m.blockLen * m.blockLen
	if full == 0 {
		blocks = 0 // says nothing
	}
	head, err := m.at(blocks, full)
	if err != nil {
		return nil, err
	}
	if tail%m.blockLen+size-full > m.blockLen {
		return nil, errors.New("inline tail crosses a block boundary")
	}
	rest, err := m.at(tail, size-full)
	return append(bytes.Clone(head), rest...), err
}

func (m *Image) readIndexes(n *rafs.Inode, format uint32, layout uint16, off uint64) error {
	if layout != 4 || format&0x20 == 0 {
		return fmt.Errorf("regular file has data layout %d, chunk format %#x", layout, format)
	}
	size := uint64(m.Tree.ChunkSize)
	count := (uint64(n.Size) + size - 1) / size
	b, err := m.at(off, 8*count)
	if err != nil {
		return err
	}
	for ; len(b) > 0; b = b[8:] {
		x := Index{uint32(b[2]) - 1, uint32(le.Uint16(b)) | uint32(b[3])<<16, le.Uint32(b[4:])}
		c, ok := m.Chunk(x)
		if !ok {
			return fmt.Errorf("chunk %+v is not in the chunk-info table", x)
		}
		n.Chunks = append(n.Chunks, c.Digest)
		m.Indexes[n] = append(m.Indexes[n], x)
	}
	return nil
}

func (m *Image) readDir(n *rafs.Inode, data []byte, depth int) error {
	for len(data) > 0 {
		block := data[:min(uint64(len(data)), m.blockLen)]
		data = data[len(block):]
		for at := 0; at == 0 || at < int(le.Uint16(block[8:])); at += 12 {
			if at+12 > len(block) {
				return fmt.Errorf("entry: %w", ErrBounds)
			}
			name, err := direntName(block, at)
			if err != nil {
				return err
			}
			if name == "." || name == ".." {
				continue
			}
			child, err := m.inode(le.Uint64(block[at:]), depth+1)
			if err != nil {
				return fmt.Errorf("%q: %w", name, err)
			}
			n.Entries = append(n.Entries, rafs.Dirent{Name: name, Inode: child})
		}
	}
	return nil
}

func direntName(block []byte, at int) (string, error) {
	start, end := int(le.Uint16(block[at+8:])), len(block)
	if next := at + 12; next < int(le.Uint16(block[8:])) && next+12 <= len(block) {
		end = int(le.Uint16(block[next+8:]))
	}
	if start > end || end > len(block) {
		return "", fmt.Errorf("entry name: %w", ErrBounds)
	}
	name, _, _ := bytes.Cut(block[start:end], []byte{0})
	return string(name), nil
}

func readXattrs(b []byte) ([]rafs.Xattr, error) {
	prefixes := map[byte]string{1: "user.", 2: "system.posix_acl_access", 3: "system.posix_acl_default", 4: "trusted.", 6: "security."}
	var xs []rafs.Xattr
	for len(b) >= 4 {
		nameLen, valueLen := int(b[0]), int(le.Uint16(b[2:]))
		end := 4 + nameLen + valueLen
		if end > len(b) {
			return nil, fmt.Errorf("xattr: %w", ErrBounds)
		}
		name := prefixes[b[1]] + string(b[4:4+nameLen])
		xs = append(xs, rafs.Xattr{Name: name, Value: bytes.Clone(b[4+nameLen : end])})
		b = b[min(len(b), (end+3)&^3):]
	}
	return xs, nil
}
