package flat

import (
	"encoding/binary"
	"hash/crc32"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Numbers of EROFS, https://docs.kernel.org/filesystems/erofs.html and the kernel's
// erofs_fs.h.
const (
	magic          = 0xe0f5e1e2
	superOffset    = 1024
	featureSum     = 1 // compatible: the superblock has a checksum
	formatExtended = 1 // an inode of 64 bytes, data in blocks of its own
	metaBlock      = 1 // where inodes begin
	direntSize     = 12
)

var le = binary.LittleEndian

// nid is the number of an inode: where it stands, in units of 32 bytes.
func (n *node) nid() uint64 { return uint64(n.index) * inodeSize / 32 }

func (t *tree) superblock() []byte {
	b := make([]byte, block)
	s := b[superOffset:]
	le.PutUint32(s[0:], magic)
	le.PutUint32(s[8:], featureSum)
	s[12] = 12 // blocks of 1<<12 bytes
	le.PutUint16(s[14:], uint16(t.nodes[0].nid()))
	le.PutUint64(s[16:], uint64(len(t.nodes)))
	le.PutUint64(s[24:], uint64(t.nodes[0].sec))
	le.PutUint32(s[32:], t.nodes[0].nsec)
	le.PutUint32(s[36:], uint32(t.blocks))
	le.PutUint32(s[40:], metaBlock)
	// The checksum covers the rest of the block, with zeros in its own place.
	le.PutUint32(s[4:], ^crc32.Checksum(s, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

func (n *node) appendInode(b []byte) []byte {
	b = le.AppendUint16(b, formatExtended)
	b = le.AppendUint16(b, 0) // no extended attributes
	b = le.AppendUint16(b, uint16(n.mode))
	b = le.AppendUint16(b, 0)
	b = le.AppendUint64(b, uint64(n.size))
	b = le.AppendUint32(b, n.addr)
	b = le.AppendUint32(b, n.index+1)
	b = le.AppendUint32(b, n.uid)
	b = le.AppendUint32(b, n.gid)
	b = le.AppendUint64(b, uint64(n.sec))
	b = le.AppendUint32(b, n.nsec)
	b = le.AppendUint32(b, n.nlink)
	return append(b, make([]byte, 16)...)
}

// dirent is a name of a folder.
type dirent struct {
	name string
	n    *node
}

// encodeDirents makes the blocks of a folder: in each the entries and then their
// names, in bytewise order over all blocks. The last one ends with its last name.
func (n *node) encodeDirents() []byte {
	up := n.parent
	if up == nil {
		up = n
	}
	all := []dirent{{".", n}, {"..", up}}
	for _, c := range n.children {
		all = append(all, dirent{path.Base(c.path), c})
	}
	slices.SortFunc(all, func(a, b dirent) int { return strings.Compare(a.name, b.name) })
	var out []byte
	for len(all) > 0 {
		count, used := 0, 0
		for count < len(all) && used+direntSize+len(all[count].name) <= block {
			used += direntSize + len(all[count].name)
			count++
		}
		out = appendBlock(out, all[:count])
		all = all[count:]
		if len(all) > 0 {
			out = append(out, make([]byte, -len(out)&(block-1))...)
		}
	}
	return out
}

func appendBlock(out []byte, all []dirent) []byte {
	at := len(all) * direntSize
	for _, d := range all {
		out = le.AppendUint64(out, d.n.nid())
		out = le.AppendUint16(out, uint16(at))
		out = append(out, fileType(d.n), 0)
		at += len(d.name)
	}
	for _, d := range all {
		out = append(out, d.name...)
	}
	return out
}

func fileType(n *node) byte {
	switch {
	case n.is(syscall.S_IFDIR):
		return 2
	case n.is(syscall.S_IFLNK):
		return 7
	}
	return 1
}
