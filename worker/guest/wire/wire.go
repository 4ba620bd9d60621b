// Package wire is what the host and the helper program in a guest say to each other:
// frames over two pipes, specified in FORMAT.md. It stands apart from package guest
// because the helper links it, and must stay small and quick to start.
package wire

import (
	"encoding/binary"
	"errors"
	"io"
)

// Version is the first byte of every request. Host and helper are installed together,
// so there is one.
const Version = 2

// Bounds. A frame with more is refused before it is read.
const (
	MaxPath    = 4096     // of a path or a link's target: Linux has PATH_MAX, with a zero byte
	MaxExclude = 256      // patterns of a request
	MaxMessage = 1024     // of an error
	MaxFolders = 1023     // on the way to a file of a tar, the file too when it is a folder: what a tar down takes
	MaxData    = 64 << 10 // of one data frame: what a pipe holds
	// maxFrame fits the largest frame, a request with all its patterns.
	maxFrame = 64 + (MaxPath+2)*(1+MaxExclude)
	header   = 5
)

// Kind of a frame.
type Kind byte

// Kinds of frames. Requests, items and commits go to the helper; the rest comes from it.
const (
	KindRequest Kind = 'Q' // the first frame to the helper, exactly one
	KindEntry   Kind = 'E' // a file: one that is listed, taken out or to be unpacked
	KindData    Kind = 'D' // bytes of the entry before it
	KindSum     Kind = 'S' // length and SHA-256 of the data before it; to the helper: commit
	KindReady   Kind = 'R' // the helper has begun and wants data
	KindEnd     Kind = 'Z' // no more entries
	KindError   Kind = 'X' // the helper gave up; nothing follows
)

// ErrFrame is what a broken frame is. A guest that has root can send anything.
var ErrFrame = errors.New("broken frame")

// Op is what a request asks for.
type Op byte

// Ops.
const (
	OpStat    Op = 1 + iota // Entry
	OpList                  // Entry…, End
	OpRead                  // Entry, Data…, Sum
	OpWrite                 // Ready; Data…, Sum → Entry
	OpRemove                // End
	OpTarDown               // Entry (Data…, Sum)…, End
	OpTarUp                 // Ready; Entry (Data…, Sum)…, End → End
	OpTarget                // makes a mount point: Entry
	OpUnmount               // End
	OpUnblock               // lets go who waits to read a fifo: End
	lastOp    = OpUnblock
)

// Flags of a request.
const (
	FlagMkDirs uint32 = 1 << iota // OpWrite: make missing folders
	FlagMode                      // OpWrite: Mode is set, also of what is there
	FlagFolder                    // OpTarget: a folder, not a file
	FlagLinks                     // OpTarget: symlinks are followed
	allFlags   = FlagMkDirs | FlagMode | FlagFolder | FlagLinks
)

// Request is the first frame. Fields that an op does not use are zero.
type Request struct {
	Op       Op
	Flags    uint32
	Mode     uint32 // permission bits
	UID, GID uint32 // of what is made
	Offset   int64  // of OpRead: negative from the end, with a Length of -1
	Length   int64  // -1 is to the end
	Depth    uint32 // of a list
	MaxCount uint64 // entries at most
	MaxBytes int64  // bytes of content at most
	Path     string // absolute
	Exclude  []string
}

// Type of an entry: the letter that find -type uses, and 'h' for a second name of a
// file that came before.
type Type byte

// Types.
const (
	TypeFile     Type = 'f'
	TypeFolder   Type = 'd'
	TypeSymlink  Type = 'l'
	TypeFIFO     Type = 'p'
	TypeSocket   Type = 's'
	TypeChar     Type = 'c'
	TypeBlock    Type = 'b'
	TypeHardLink Type = 'h'
)

// Entry is one file. Path is absolute, or relative in a tar, where "" is the top.
type Entry struct {
	Type     Type
	Shared   bool   // a file with other names, of which a TypeHardLink may come
	Mode     uint32 // permission bits with setuid, setgid and sticky
	UID, GID uint32
	Size     int64
	Sec      int64 // of the mtime
	Nsec     uint32
	Major    uint32 // of a device
	Minor    uint32
	Path     string
	Target   string // of a symlink, or the first name of a TypeHardLink
}

// Sum is length and digest of the data of an entry.
type Sum struct {
	Size   int64
	SHA256 [32]byte
}

// Error is why a helper gave up. Errno is Linux's number, or one of the codes below.
type Error struct {
	Errno   uint32
	Message string // what was being done, for people; may hold any bytes
}

// Codes beyond errno: what has no number there.
const (
	CodeChanged  uint32 = 0x10000 + iota // the file changed while it was read
	CodeType                             // not of the type that the op needs
	CodeMany                             // more entries or bytes than allowed
	CodeDeep                             // folders too deep, or the path too long
	CodeEscape                           // a link leads out of the target
	CodeSum                              // the content is not what the commit says
	CodeProtocol                         // the host sent what cannot be
	CodeLink                             // a symlink is on the way, and none is followed
	lastCode     = CodeLink
)

// AppendFrame appends a frame to b.
func AppendFrame(b []byte, k Kind, payload []byte) []byte {
	b = append(b, byte(k))
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// Reader reads frames.
type Reader struct {
	r   io.Reader
	buf []byte
}

// NewReader reads frames from r, which need not be buffered: a frame is two reads.
func NewReader(r io.Reader) *Reader {
	return &Reader{r: r, buf: make([]byte, 4096)}
}

// Next returns the next frame. The payload is valid until the next call. At the end of
// the stream between two frames the error is io.EOF.
func (r *Reader) Next() (Kind, []byte, error) {
	var h [header]byte
	if _, err := io.ReadFull(r.r, h[:]); err != nil {
		if err == io.ErrUnexpectedEOF {
			err = ErrFrame
		}
		return 0, nil, err
	}
	k, n := Kind(h[0]), int64(binary.BigEndian.Uint32(h[1:]))
	if n > maxPayload(k) {
		return 0, nil, ErrFrame
	}
	if int64(cap(r.buf)) < n {
		r.buf = make([]byte, n)
	}
	p := r.buf[:n]
	if _, err := io.ReadFull(r.r, p); err != nil {
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = ErrFrame
		}
		return 0, nil, err
	}
	return k, p, nil
}

// maxPayload is how long a frame of a kind may be; -1 is no such kind.
func maxPayload(k Kind) int64 {
	switch k {
	case KindRequest:
		return maxFrame - header
	case KindEntry:
		return entryFixed + 2*(2+MaxPath)
	case KindData:
		return MaxData
	case KindSum:
		return sumSize
	case KindReady, KindEnd:
		return 0
	case KindError:
		return 4 + 2 + MaxMessage
	}
	return -1
}
