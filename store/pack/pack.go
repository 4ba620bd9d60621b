// Package pack is the format of a pack: an immutable object that holds many
// stored chunks one after another and a footer that lists them. Chunks are
// small and objects are dear, so a store keeps thousands of chunks in one
// object; every record describes itself, so what a damaged footer listed can
// still be found. FORMAT.md beside this file has the bytes.
package pack

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"quarry/store/chunk"
)

const (
	// Version is the only version this package reads and writes.
	Version = 1
	// MaxPack bounds a pack in bytes. It is four times TargetSize, so that a
	// store may choose larger packs, and keeps every offset in 32 bits.
	MaxPack = 256 << 20
	// TargetSize is the size at which a store closes a pack: large enough that
	// an upload is a few S3 parts, small enough that gc can afford to copy one.
	TargetSize = 64 << 20
	// MaxCount bounds the chunks of one pack. 65 536 entries of 48 bytes make a
	// footer of 3 MiB, which is read whole.
	MaxCount = 1 << 16

	// HeaderSize, RecordHeaderSize, EntrySize and TrailerSize are the sizes of
	// the fixed parts, in bytes.
	HeaderSize       = 12
	RecordHeaderSize = 56
	EntrySize        = 48
	TrailerSize      = 20
	// Overhead is what a pack has beside its chunks: each takes RecordHeaderSize, its
	// stored bytes and EntrySize.
	Overhead = HeaderSize + int64(len(footerTag)) + TrailerSize

	headerMagic  = "quarrypk"
	trailerMagic = "quarryft"
	recordTag    = "CHNK"
	footerTag    = "FOOT"
)

// Codec says how the stored bytes of a chunk make its plain bytes.
type Codec uint8

const (
	// Raw stores the plain bytes.
	Raw Codec = 0
	// Zstd stores one zstd frame, always shorter than the plain bytes.
	Zstd Codec = 1
)

// String returns the codec's name in messages and metrics.
func (c Codec) String() string {
	switch c {
	case Raw:
		return "raw"
	case Zstd:
		return "zstd"
	}
	return fmt.Sprintf("codec(%d)", uint8(c))
}

// Entry describes one stored chunk of a pack.
type Entry struct {
	Digest chunk.Digest
	Off    int64  // of the stored bytes in the pack
	Stored uint32 // length of the stored bytes
	Len    uint32 // length of the plain bytes
	Codec  Codec
	CRC    uint32 // Checksum of the stored bytes
}

// Validate refuses an entry that no Writer writes, wherever it was read from:
// once it is nil, both lengths are safe to allocate.
func (e Entry) Validate() error {
	return validateLengths(e.Codec, int64(e.Stored), e.Len)
}

func validateLengths(c Codec, stored int64, plainLen uint32) error {
	switch {
	case plainLen == 0 || plainLen > chunk.MaxSize:
		return fmt.Errorf("plain length %d is not 1 to %d", plainLen, chunk.MaxSize)
	case c == Raw && stored != int64(plainLen):
		return fmt.Errorf("raw chunk of %d bytes is stored as %d", plainLen, stored)
	case c == Zstd && (stored == 0 || stored >= int64(plainLen)):
		return fmt.Errorf("zstd chunk of %d bytes is stored as %d, want fewer", plainLen, stored)
	case c > Zstd:
		return fmt.Errorf("unknown codec %d", uint8(c))
	}
	return nil
}

// FormatError says that bytes are not those of a pack, and where.
type FormatError struct {
	Part string // "header", "record" or "footer"
	Off  int64  // offset of that part in the pack
	Err  error
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("pack %s at %d: %v", e.Part, e.Off, e.Err)
}

// Unwrap returns the reason.
func (e *FormatError) Unwrap() error { return e.Err }

// Key returns the object key of a pack. Its id is the digest of all its bytes.
func Key(id chunk.Digest) string { return KeyPrefix + id.Hex() }

// KeyPrefix starts the key of every pack.
const KeyPrefix = "packs/"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum returns the CRC32C of stored bytes. It finds accidents on disks and
// wires without decompression; only the digest proves content.
func Checksum(stored []byte) uint32 { return crc32.Checksum(stored, castagnoli) }

var le = binary.LittleEndian

func appendHeader(b []byte) []byte {
	b = append(b, headerMagic...)
	return le.AppendUint32(b, Version)
}

// CheckHeader checks the first HeaderSize bytes of a pack.
func CheckHeader(b []byte) error {
	switch {
	case len(b) != HeaderSize:
		return &FormatError{"header", 0, fmt.Errorf("%d bytes, want %d", len(b), HeaderSize)}
	case string(b[:8]) != headerMagic:
		return &FormatError{"header", 0, fmt.Errorf("magic %q, want %q", b[:8], headerMagic)}
	case le.Uint32(b[8:]) != Version:
		return &FormatError{"header", 0, fmt.Errorf("version %d, this program reads %d", le.Uint32(b[8:]), Version)}
	}
	return nil
}

func appendRecordHeader(b []byte, e Entry) []byte {
	start := len(b)
	b = append(b, recordTag...)
	b = append(b, byte(e.Codec), 0, 0, 0)
	b = le.AppendUint32(b, e.Stored)
	b = le.AppendUint32(b, e.Len)
	b = le.AppendUint32(b, e.CRC)
	b = append(b, e.Digest[:]...)
	return le.AppendUint32(b, Checksum(b[start:]))
}

// DecodeRecordHeader decodes the RecordHeaderSize bytes that stand at offset
// off of a pack; the stored bytes follow them.
func DecodeRecordHeader(b []byte, off int64) (Entry, error) {
	bad := func(format string, args ...any) (Entry, error) {
		return Entry{}, &FormatError{"record", off, fmt.Errorf(format, args...)}
	}
	if len(b) != RecordHeaderSize {
		return bad("%d header bytes, want %d", len(b), RecordHeaderSize)
	}
	if string(b[:4]) != recordTag {
		return bad("tag %q, want %q", b[:4], recordTag)
	}
	if got, want := Checksum(b[:52]), le.Uint32(b[52:]); got != want {
		return bad("header checksum %08x, want %08x", got, want)
	}
	e := Entry{
		Digest: chunk.Digest(b[20:52]), Off: off + RecordHeaderSize,
		Stored: le.Uint32(b[8:]), Len: le.Uint32(b[12:]), Codec: Codec(b[4]), CRC: le.Uint32(b[16:]),
	}
	if b[5]|b[6]|b[7] != 0 {
		return bad("reserved bytes are not zero")
	}
	if err := e.Validate(); err != nil {
		return bad("%w", err)
	}
	return e, nil
}
