// Package rafs encodes file trees as RAFS v6 bootstraps and decodes them. It
// writes one strict profile of the format, described in FORMAT.md, and reads
// nothing else, so equal trees have equal bytes and every accepted bootstrap
// encodes back to itself.
package rafs

import (
	"quarry/store/chunk"
)

// File types in Inode.Mode, as in stat(2).
const (
	ModeType    = 0o170000
	ModeSocket  = 0o140000
	ModeSymlink = 0o120000
	ModeRegular = 0o100000
	ModeBlock   = 0o060000
	ModeDir     = 0o040000
	ModeChar    = 0o020000
	ModeFIFO    = 0o010000
	ModePerm    = 0o007777 // permission bits with setuid, setgid and sticky
)

// Tree is the root file system of one image.
type Tree struct {
	ChunkSize uint32 // S, in bytes
	Root      *Inode // a directory
}

// Inode is one file of a tree. Hard links are several directory entries with
// the same *Inode; directories have exactly one. Immutable once in a Tree.
type Inode struct {
	Mode      uint32 // type and permission bits
	UID, GID  uint32
	Mtime     int64          // seconds since 1970, may be negative
	MtimeNsec uint32         // 0 … 999 999 999
	Rdev      uint32         // devices: Linux's new encoding, see Makedev
	Size      int64          // regular files: length in bytes
	Chunks    []chunk.Digest // regular files: chunk.Count(Size, ChunkSize) digests
	Target    string         // symlinks
	Xattrs    []Xattr        // sorted bytewise by Name, no name twice
	Entries   []Dirent       // directories: sorted bytewise by Name, no name twice, without . and ..
}

// Xattr is one extended attribute, with its full name such as "user.mime_type".
type Xattr struct {
	Name  string
	Value []byte
}

// Dirent is one name in a directory. Names are byte strings of 1 to 255 bytes
// without '/' or NUL, and not "." or "..".
type Dirent struct {
	Name  string
	Inode *Inode
}

// Type returns the file type bits of the mode.
func (n *Inode) Type() uint32 { return n.Mode & ModeType }

// IsDir reports whether n is a directory.
func (n *Inode) IsDir() bool { return n.Type() == ModeDir }

// IsRegular reports whether n is a regular file.
func (n *Inode) IsRegular() bool { return n.Type() == ModeRegular }

// Makedev packs a device number as the kernel's new_encode_dev does.
func Makedev(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | (minor&^0xff)<<12
}

// Major and Minor unpack Rdev.
func (n *Inode) Major() uint32 { return n.Rdev & 0xfff00 >> 8 }

// Minor returns the minor device number.
func (n *Inode) Minor() uint32 { return n.Rdev&0xff | n.Rdev>>12&0xfff00 }
