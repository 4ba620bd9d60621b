package nbd

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Magic numbers of the protocol.
const (
	magicInit        = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption      = 0x49484156454f5054 // "IHAVEOPT"
	magicOptionReply = 0x0003e889045565a9
	magicRequest     = 0x25609513
	magicSimple      = 0x67446698
	magicStructured  = 0x668e33ef
)

// Handshake flags, the same bits from server and client.
const (
	flagFixedNewstyle = 1 << 0
	flagNoZeroes      = 1 << 1
)

// Transmission flags of an export.
const (
	flagHasFlags  = 1 << 0
	flagReadOnly  = 1 << 1
	flagSendDF    = 1 << 7
	flagMultiConn = 1 << 8
	flagSendCache = 1 << 10
)

// exportFlags is what every export of this server says. FLUSH is left out:
// nothing can be written, so nothing can be flushed.
const exportFlags = flagHasFlags | flagReadOnly | flagMultiConn | flagSendCache

// Options.
const (
	optExportName      = 1
	optAbort           = 2
	optList            = 3
	optInfo            = 6
	optGo              = 7
	optStructuredReply = 8
)

// Option reply types; errors have bit 31 set.
const (
	repAck         = 1
	repServer      = 2
	repInfo        = 3
	repErr         = 1 << 31
	repErrUnsup    = repErr | 1
	repErrInvalid  = repErr | 3
	repErrPlatform = repErr | 4
	repErrUnknown  = repErr | 6
	repErrTooBig   = repErr | 9
)

// Information types of INFO and GO.
const (
	infoExport    = 0
	infoName      = 1
	infoBlockSize = 3
)

// Commands.
const (
	cmdRead        = 0
	cmdWrite       = 1
	cmdDisc        = 2
	cmdFlush       = 3
	cmdTrim        = 4
	cmdCache       = 5
	cmdWriteZeroes = 6
)

// cmdFlagDF asks for a read reply in one piece.
const cmdFlagDF = 1 << 2

// Structured reply types and flags.
const (
	replyNone       = 0
	replyOffsetData = 1
	replyError      = 1<<15 | 1
	replyFlagDone   = 1 << 0
)

// Error numbers of the protocol, Linux's values.
const (
	errnoPerm  = 1
	errnoIO    = 5
	errnoInval = 22
)

// Limits.
const (
	// MaxPayload is the longest read one request may ask for, the protocol's
	// own default maximum.
	MaxPayload = 32 << 20
	// MaxName is the longest export name, as the protocol says.
	MaxName = 4096
	// preferredBlock is the block size that serves EROFS best: its own.
	preferredBlock = 4096
	// maxOptionLen holds a name and every information request there could be.
	maxOptionLen = 8 << 10
	// maxOptions ends a client that only haggles.
	maxOptions = 64
	// maxMessage bounds the text of an error reply, in both directions.
	maxMessage = 1024
)

// ErrUnknownExport says that a server has no export of that name.
var ErrUnknownExport = errors.New("unknown export")

const (
	requestSize     = 28
	simpleSize      = 16
	structuredSize  = 20
	optionSize      = 16
	optionReplySize = 20
)

// request is one command of the transmission phase.
type request struct {
	flags  uint16
	typ    uint16
	cookie uint64
	off    uint64
	length uint32
}

// decodeRequest reads a request header; it validates the magic only, because
// what an answer may say depends on the export.
func decodeRequest(b *[requestSize]byte) (request, error) {
	if m := binary.BigEndian.Uint32(b[0:]); m != magicRequest {
		return request{}, fmt.Errorf("request has magic %#x, want %#x", m, uint32(magicRequest))
	}
	return request{
		flags:  binary.BigEndian.Uint16(b[4:]),
		typ:    binary.BigEndian.Uint16(b[6:]),
		cookie: binary.BigEndian.Uint64(b[8:]),
		off:    binary.BigEndian.Uint64(b[16:]),
		length: binary.BigEndian.Uint32(b[24:]),
	}, nil
}

// encode writes the request header.
func (q request) encode(b *[requestSize]byte) {
	binary.BigEndian.PutUint32(b[0:], magicRequest)
	binary.BigEndian.PutUint16(b[4:], q.flags)
	binary.BigEndian.PutUint16(b[6:], q.typ)
	binary.BigEndian.PutUint64(b[8:], q.cookie)
	binary.BigEndian.PutUint64(b[16:], q.off)
	binary.BigEndian.PutUint32(b[24:], q.length)
}

// validate returns the error number that answers q on an export of the given
// size, 0 when it can be served.
func (q request) validate(size int64, structured bool) uint32 {
	var allowed uint16
	switch q.typ {
	case cmdWrite, cmdTrim, cmdWriteZeroes:
		return errnoPerm
	case cmdRead:
		if q.length > MaxPayload {
			return errnoInval
		}
		if structured {
			allowed = cmdFlagDF
		}
	case cmdCache:
	default:
		return errnoInval
	}
	if q.flags&^allowed != 0 || q.off > uint64(size) || uint64(q.length) > uint64(size)-q.off {
		return errnoInval
	}
	return 0
}

// truncate cuts a message for the wire.
func truncate(msg string) string { return msg[:min(len(msg), maxMessage)] }
