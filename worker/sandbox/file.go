package sandbox

import "time"

// Types of a file.
const (
	TypeFile    = "file"
	TypeFolder  = "directory"
	TypeSymlink = "symlink"
	TypeFIFO    = "fifo"
	TypeSocket  = "socket"
	TypeChar    = "char_device"
	TypeBlock   = "block_device"
)

// FileInfo is one file of a guest. Names are bytes that need not be UTF-8: Name and
// Path are base64 in JSON where they are not, see NameEncoded.
type FileInfo struct {
	Path        string    `json:"path"`
	Type        string    `json:"type"`
	Size        int64     `json:"size"`
	Mode        uint32    `json:"mode"` // permission bits with setuid, setgid and sticky
	UID         uint32    `json:"uid"`
	GID         uint32    `json:"gid"`
	ModTime     time.Time `json:"mtime"`
	Target      string    `json:"target,omitempty"` // of a symlink
	NameEncoded bool      `json:"name_base64,omitempty"`
}

// ReadOptions choose a part of a file.
type ReadOptions struct {
	Offset int64
	Length int64 // -1 is all
}

// WriteOptions say what a written file is to be.
type WriteOptions struct {
	Size   int64   // bytes that follow; -1 when not known
	SHA256 string  // hex of the content, "" when not known; another content leaves the file as it was
	Mode   *uint32 // nil keeps the mode of what is there, else 0644
	User   string  // who owns a new file; "" is the sandbox's user
	MkDirs bool    // make missing folders
}

// TarOptions choose what goes into a tar.
type TarOptions struct {
	Path    string
	Exclude []string // patterns of path.Match on the path below Path, or on one element of it
}
