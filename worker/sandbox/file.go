package sandbox

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"time"
	"unicode/utf8"
)

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

// FileInfo is one file of a guest. Names are bytes that need not be UTF-8: in JSON,
// which cannot say all of them, Path and Target are base64 where one of them is not,
// see Encoded.
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

// Encoded returns the file as JSON can say it.
func (i FileInfo) Encoded() FileInfo {
	if !i.NameEncoded && (!utf8.ValidString(i.Path) || !utf8.ValidString(i.Target)) {
		i.NameEncoded = true
		i.Path = base64.StdEncoding.EncodeToString([]byte(i.Path))
		i.Target = base64.StdEncoding.EncodeToString([]byte(i.Target))
	}
	return i
}

// Decoded undoes Encoded.
func (i FileInfo) Decoded() (FileInfo, error) {
	if !i.NameEncoded {
		return i, nil
	}
	path, err := base64.StdEncoding.DecodeString(i.Path)
	target, terr := base64.StdEncoding.DecodeString(i.Target)
	if err = cmp.Or(err, terr); err != nil {
		return i, fmt.Errorf("name of a file: %w", err)
	}
	i.Path, i.Target, i.NameEncoded = string(path), string(target), false
	return i, nil
}

// What one call takes of a guest's files, or gives it.
const (
	MaxFiles   = 200_000  // files of a list or a tar
	MaxContent = 64 << 30 // bytes of a file, or of all files of a tar, holes included
)

// ReadOptions choose a part of a file.
type ReadOptions struct {
	Offset int64 // a negative one counts from the end, with a Length of -1
	Length int64 // -1 is all
}

// Valid reports whether the options can be of a file.
func (o ReadOptions) Valid() bool { return o.Length >= -1 && (o.Offset >= 0 || o.Length == -1) }

// Part is what the options choose of a file of so many bytes.
func (o ReadOptions) Part(size int64) (offset, n int64) {
	offset = o.Offset
	if offset < 0 {
		offset = max(size+offset, 0)
	}
	n = max(size-offset, 0)
	if o.Length >= 0 {
		n = min(n, o.Length)
	}
	return offset, n
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
	Path string
	// MaxBytes bounds the content of all files, holes included; 0 is MaxContent.
	MaxBytes int64
	Exclude  []string // patterns of path.Match on the path below Path, or on one element of it
}
