package tree

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"

	"quarry/rafs"
	"quarry/store/chunk"
)

// digestDomain begins every serialisation, so that no other kind of data has
// the digest of a tree. A change of the serialisation changes its number.
const digestDomain = "quarry tree v1\n"

// Kinds of records in the serialisation; see FORMAT.md.
const (
	recordFile = 'F'
	recordLink = 'L'
)

// Digest returns the digest of a tree: two trees have the same one exactly
// when every name, attribute, hard link and byte of content is the same.
func Digest(t *rafs.Tree) chunk.Digest {
	h := sha256.New()
	// 32 KiB: the serialisation is many short fields, a hash wants long writes.
	s := serialiser{w: bufio.NewWriterSize(h, 32<<10)}
	s.raw(digestDomain)
	s.u32(t.ChunkSize)
	links := linked(t.Root)
	first := make(map[*rafs.Inode]string, len(links))
	for path, n := range paths(t.Root) {
		if target, ok := first[n]; ok {
			s.raw(string(recordLink))
			s.bytes(path)
			s.bytes(target)
			continue
		}
		if links[n] {
			first[n] = path
		}
		s.raw(string(recordFile))
		s.bytes(path)
		s.inode(n)
	}
	s.w.Flush() // a hash takes every write
	return chunk.Digest(h.Sum(nil))
}

// serialiser writes fields, little-endian, strings with their length before.
type serialiser struct{ w *bufio.Writer }

func (s serialiser) inode(n *rafs.Inode) {
	s.u32(n.Mode)
	s.u32(n.UID)
	s.u32(n.GID)
	s.u64(uint64(n.Mtime))
	s.u32(n.MtimeNsec)
	s.u32(n.Rdev)
	s.u64(uint64(n.Size))
	s.bytes(n.Target)
	s.u32(uint32(len(n.Xattrs)))
	for _, x := range n.Xattrs {
		s.bytes(x.Name)
		s.bytes(string(x.Value))
	}
	s.u64(uint64(len(n.Chunks)))
	for i := range n.Chunks {
		s.w.Write(n.Chunks[i][:])
	}
}

func (s serialiser) raw(v string) { s.w.WriteString(v) }

func (s serialiser) bytes(v string) {
	s.u32(uint32(len(v)))
	s.raw(v)
}

func (s serialiser) u32(v uint32) {
	s.w.Write(binary.LittleEndian.AppendUint32(s.w.AvailableBuffer(), v))
}
func (s serialiser) u64(v uint64) {
	s.w.Write(binary.LittleEndian.AppendUint64(s.w.AvailableBuffer(), v))
}
