package image

import (
	"fmt"
	"strconv"

	"quarry/rafs"
	"quarry/store/chunk"
)

// Types of an Entry: tar's type flags, where old and contiguous regular files
// are already TypeReg.
const (
	TypeReg     = '0'
	TypeLink    = '1' // hard link to the path in Link
	TypeSymlink = '2'
	TypeChar    = '3'
	TypeBlock   = '4'
	TypeDir     = '5'
	TypeFIFO    = '6'
)

// The largest device numbers that Linux has.
const (
	MaxMajor = 1<<12 - 1
	MaxMinor = 1<<20 - 1
)

// Entry is one entry of a layer's tar with its content replaced by chunk
// digests. It says what the tar said and interprets nothing: a whiteout is a
// plain regular file named .wh.*, and what that means to lower layers is for
// converter/tree to decide.
type Entry struct {
	Name      string // raw path bytes without leading /, ./ parts and trailing slash; "" is the root
	Type      byte   // TypeReg … TypeFIFO
	Mode      uint32 // permission bits with setuid, setgid and sticky: the low 12 bits
	UID, GID  uint32
	Mtime     int64  // seconds since 1970, may be negative
	MtimeNsec uint32 // 0 … 999 999 999
	Major     uint32 // devices only
	Minor     uint32
	Link      string         // TypeLink: path of the file linked to, as in the tar; TypeSymlink: the target
	Size      int64          // TypeReg: length in bytes
	Xattrs    []rafs.Xattr   // in tar order, full names, no policy applied
	Chunks    []chunk.Digest // TypeReg: chunk.Count(Size, S) digests
}

// EntryError says which entry of a layer an error is about.
type EntryError struct {
	Entry string // its name, as in Entry
	Err   error
}

func (e *EntryError) Error() string { return "entry " + Quote(e.Entry) + ": " + e.Err.Error() }

// Unwrap returns what is wrong with the entry.
func (e *EntryError) Unwrap() error { return e.Err }

// longestQuote is how much of a name a message shows. Every path that a program
// can open is shown whole.
const longestQuote = 4096

// Quote returns a name of an entry for a message, its middle left out when a
// hostile layer made it a megabyte long.
func Quote(name string) string {
	if len(name) <= longestQuote {
		return strconv.Quote(name)
	}
	return fmt.Sprintf("%q…%q (%d bytes)", name[:longestQuote/2], name[len(name)-longestQuote/2:], len(name))
}
