package attach

import (
	"encoding/binary"
	"fmt"
	"syscall"
)

// Request kinds of the kernel's FUSE protocol that the server tells apart.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opSymlink     = 6
	opMknod       = 8
	opMkdir       = 9
	opUnlink      = 10
	opRmdir       = 11
	opRename      = 12
	opLink        = 13
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatfs      = 17
	opRelease     = 18
	opSetxattr    = 21
	opRemovexattr = 24
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opCreate      = 35
	opBatchForget = 42
	opFallocate   = 43
	opRename2     = 45
)

// What INIT agrees on.
const (
	fuseMajor = 7
	// fuseMinor 31 (Linux 5.4) has everything asked for; a lower one keeps the
	// kernel from sending newer kinds of requests.
	fuseMinor       = 31
	fuseMinMinor    = 28 // MAX_PAGES
	flagAsyncRead   = 1 << 0
	flagParallelDir = 1 << 18
	flagAsyncDIO    = 1 << 15
	flagMaxPages    = 1 << 22
	// openDirectIO keeps the file out of the page cache: EROFS caches what it
	// read from the loop device, and a page must not be held twice.
	openDirectIO = 1 << 0

	// maxBackground is far beyond the 128 requests a loop device keeps open; the
	// kernel's default of 12 lets a dozen stalled reads stop all others.
	maxBackground = 1024
	// congestion is where the kernel would slow down writers: never.
	congestion = maxBackground
	// maxReadPages is the longest read in 4 KiB pages: 256 KiB, twice the
	// default read-ahead. The server needs one buffer of this size.
	maxReadPages = 64
	// maxWrite is the smallest value allowed: nothing is ever written, and the
	// buffer for requests has to hold a write of this size.
	maxWrite = 4096
	// requestBuffer is the kernel's minimum; it holds maxWrite with its headers.
	requestBuffer = 8192
)

// The two inodes of the file system.
const (
	rootID  = 1
	imageID = 2
)

// imageName is the one file's name.
const imageName = "image"

const (
	inHeaderSize  = 40
	outHeaderSize = 16
	initInMin     = 16 // up to and with the flags
	readInSize    = 40
	// forever is how long the kernel may remember names and attributes: nothing
	// ever changes.
	forever = 1 << 31 // seconds
)

// inHeader begins every request. FUSE numbers have the machine's byte order.
type inHeader struct {
	opcode uint32
	unique uint64
	nodeID uint64
}

// decodeRequest splits a request into header and body.
func decodeRequest(b []byte) (inHeader, []byte, error) {
	ne := binary.NativeEndian
	if len(b) < inHeaderSize || int64(ne.Uint32(b)) != int64(len(b)) {
		return inHeader{}, nil, fmt.Errorf("malformed fuse request of %d bytes", len(b))
	}
	return inHeader{opcode: ne.Uint32(b[4:]), unique: ne.Uint64(b[8:]), nodeID: ne.Uint64(b[16:])}, b[inHeaderSize:], nil
}

// outHeader begins the reply to request unique, before n bytes of body.
func outHeader(unique uint64, errno syscall.Errno, n int) []byte {
	ne := binary.NativeEndian
	b := ne.AppendUint32(make([]byte, 0, outHeaderSize), uint32(outHeaderSize+n))
	b = ne.AppendUint32(b, uint32(-int32(errno)))
	return ne.AppendUint64(b, unique)
}

// readIn is the body of READ, as much as matters.
type readIn struct {
	off  uint64
	size uint32
}

func decodeRead(b []byte) (readIn, bool) {
	if len(b) < readInSize {
		return readIn{}, false
	}
	return readIn{off: binary.NativeEndian.Uint64(b[8:]), size: binary.NativeEndian.Uint32(b[16:])}, true
}

// initReply answers INIT, or says why this kernel will not do.
func initReply(b []byte) ([]byte, error) {
	ne := binary.NativeEndian
	if len(b) < initInMin {
		return nil, fmt.Errorf("fuse init of %d bytes", len(b))
	}
	major, minor, flags := ne.Uint32(b), ne.Uint32(b[4:]), ne.Uint32(b[12:])
	const want = flagAsyncRead | flagAsyncDIO | flagMaxPages
	if major != fuseMajor || minor < fuseMinMinor || flags&want != want {
		return nil, fmt.Errorf("kernel speaks fuse %d.%d with flags %#x: need 7.%d with asynchronous direct reads (Linux 4.20)", major, minor, flags, fuseMinMinor)
	}
	out := ne.AppendUint32(nil, fuseMajor)
	out = ne.AppendUint32(out, min(minor, fuseMinor))
	out = ne.AppendUint32(out, 0) // read-ahead of the file: none, it is not cached
	out = ne.AppendUint32(out, flags&(want|flagParallelDir))
	out = ne.AppendUint16(out, maxBackground)
	out = ne.AppendUint16(out, congestion)
	out = ne.AppendUint32(out, maxWrite)
	out = ne.AppendUint32(out, 1) // time granularity in ns
	out = ne.AppendUint16(out, maxReadPages)
	return append(out, make([]byte, 64-len(out))...), nil
}

// appendAttr appends the attributes of an inode.
func appendAttr(b []byte, id uint64, size int64) []byte {
	ne := binary.NativeEndian
	mode, nlink := uint32(syscall.S_IFREG|0o400), uint32(1)
	if id == rootID {
		mode, nlink, size = syscall.S_IFDIR|0o500, 2, 0
	}
	b = ne.AppendUint64(b, id)
	b = ne.AppendUint64(b, uint64(size))
	b = ne.AppendUint64(b, uint64(size+511)/512)
	b = append(b, make([]byte, 3*8+3*4)...) // times: 1970
	b = ne.AppendUint32(b, mode)
	b = ne.AppendUint32(b, nlink)
	b = append(b, make([]byte, 3*4)...)  // root's, no device number
	b = ne.AppendUint32(b, maxWrite)     // block size
	return append(b, make([]byte, 4)...) // flags
}

func attrReply(id uint64, size int64) []byte {
	b := binary.NativeEndian.AppendUint64(nil, forever)
	return appendAttr(append(b, make([]byte, 8)...), id, size)
}

func entryReply(id uint64, size int64) []byte {
	ne := binary.NativeEndian
	b := ne.AppendUint64(nil, id)
	b = ne.AppendUint64(b, 0) // generation
	b = ne.AppendUint64(b, forever)
	b = ne.AppendUint64(b, forever)
	return appendAttr(append(b, make([]byte, 8)...), id, size)
}

func openReply(flags uint32) []byte {
	ne := binary.NativeEndian
	b := ne.AppendUint64(nil, 0) // file handle
	b = ne.AppendUint32(b, flags)
	return ne.AppendUint32(b, 0)
}

// direntsReply lists the root from entry number off on.
func direntsReply(off uint64) []byte {
	ne := binary.NativeEndian
	var b []byte
	for i, e := range []struct {
		id   uint64
		typ  uint32
		name string
	}{{rootID, syscall.DT_DIR, "."}, {rootID, syscall.DT_DIR, ".."}, {imageID, syscall.DT_REG, imageName}} {
		if uint64(i) < off {
			continue
		}
		b = ne.AppendUint64(b, e.id)
		b = ne.AppendUint64(b, uint64(i+1))
		b = ne.AppendUint32(b, uint32(len(e.name)))
		b = ne.AppendUint32(b, e.typ)
		b = append(b, e.name...)
		b = append(b, make([]byte, -len(b)&7)...)
	}
	return b
}
