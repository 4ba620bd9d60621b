package cache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strconv"

	"quarry/store/chunk"
)

const (
	// pageSize is the unit of placement: what O_DIRECT needs of every disk, and
	// the block that a reader's keyed hashes cover.
	pageSize = 4 << 10
	// maxSegment bounds a segment's data: what one eviction takes away.
	maxSegment = 64 << 20

	indexVersion = 1
	headerSize   = 64
	entrySize    = 48
	// maxIndex is the sidecar of a full segment of one-page chunks:
	// 64 + 48 * 64 MiB / 4 KiB = 768 KiB and 64 bytes.
	maxIndex = headerSize + entrySize*(maxSegment/pageSize)

	pinVersion    = 1
	pinHeaderSize = 48
	pinEntrySize  = 36
	// maxPinChunks bounds one image's pin list: 36 MiB of list, and 64 GiB of
	// content when chunks are 64 KiB on average.
	maxPinChunks = 1 << 20

	maxPin = pinHeaderSize + pinEntrySize*maxPinChunks + 4
)

var (
	indexMagic = []byte("quarrych")
	pinMagic   = []byte("quarrypn")
	crcTable   = crc32.MakeTable(crc32.Castagnoli)
)

// class says why the chunks of a segment were written.
type class uint32

const (
	demand      class = iota // somebody read them
	speculative              // somebody may read them
	classes
)

// state is the one byte of an entry that changes after it was written.
type state uint8

const (
	unused  state = iota // not read since it was written
	used                 // read since: it gets a second chance
	dropped              // a reader found it bad
	states
)

// header is the beginning of a sidecar.
type header struct {
	seq   uint64
	class class
}

// entry is one chunk in a segment.
type entry struct {
	digest chunk.Digest
	page   uint32 // offset in the segment, in pages
	length uint32
	state  state
}

func (e *entry) off() int64 { return int64(e.page) * pageSize }

// space is what the chunk takes of its segment.
func (e *entry) space() int64 { return align(int64(e.length)) }

func (e *entry) end() int64 { return e.off() + e.space() }

// align rounds up to whole pages.
func align(n int64) int64 { return (n + pageSize - 1) &^ (pageSize - 1) }

func appendHeader(b []byte, h header) []byte {
	start := len(b)
	b = append(b, indexMagic...)
	b = binary.LittleEndian.AppendUint32(b, indexVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.class))
	b = binary.LittleEndian.AppendUint64(b, h.seq)
	b = append(b, make([]byte, headerSize-4-24)...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], crcTable))
}

// appendEntry writes e for the sidecar of segment seq. The checksum covers seq,
// so that the remains of a deleted sidecar that a power cut leaves in this one's
// place are not taken for its entries.
func appendEntry(b []byte, seq uint64, e *entry) []byte {
	start := len(b)
	b = append(b, e.digest[:]...)
	b = binary.LittleEndian.AppendUint32(b, e.page)
	b = binary.LittleEndian.AppendUint32(b, e.length)
	b = binary.LittleEndian.AppendUint32(b, entryChecksum(seqChecksum(seq), b[start:]))
	return append(b, byte(e.state), 0, 0, 0)
}

func seqChecksum(seq uint64) uint32 {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], seq)
	return crc32.Checksum(b[:], crcTable)
}

func entryChecksum(seqSum uint32, fields []byte) uint32 {
	return crc32.Update(seqSum, crcTable, fields)
}

// decodeIndex reads the sidecar of segment seq, whose data has dataSize bytes.
// Entries end at the first that is not whole, not valid, or not behind the one
// before it: what a torn append or a power cut leaves is no entry. An error means
// that nothing of the segment can be used.
func decodeIndex(b []byte, seq uint64, dataSize int64) (class, []entry, error) {
	if len(b) < headerSize {
		return 0, nil, fmt.Errorf("the header is torn: %d bytes", len(b))
	}
	h := header{seq: seq, class: class(binary.LittleEndian.Uint32(b[12:]))}
	if v := binary.LittleEndian.Uint32(b[8:]); bytes.Equal(b[:8], indexMagic) && v != indexVersion {
		return 0, nil, fmt.Errorf("version %d, not %d", v, indexVersion)
	}
	if h.class >= classes || !bytes.Equal(b[:headerSize], appendHeader(nil, h)) {
		return 0, nil, fmt.Errorf("the header is damaged")
	}
	b = b[headerSize:]
	entries := make([]entry, 0, len(b)/entrySize)
	seqSum, end := seqChecksum(seq), int64(0)
	for ; len(b) >= entrySize; b = b[entrySize:] {
		e, ok := decodeEntry(b[:entrySize], seqSum)
		if !ok || e.off() < end || e.off()+int64(e.length) > min(dataSize, maxSegment) {
			break
		}
		entries, end = append(entries, e), e.end()
	}
	return h.class, entries, nil
}

func decodeEntry(b []byte, seqSum uint32) (entry, bool) {
	e := entry{
		digest: chunk.Digest(b[:32]),
		page:   binary.LittleEndian.Uint32(b[32:]),
		length: binary.LittleEndian.Uint32(b[36:]),
		state:  state(b[44]),
	}
	ok := e.length > 0 && e.length <= chunk.MaxSize && e.state < states && b[45]|b[46]|b[47] == 0 &&
		binary.LittleEndian.Uint32(b[40:]) == entryChecksum(seqSum, b[:40])
	return e, ok
}

// encodePin writes the list of one pinned image.
func encodePin(id chunk.Digest, chunks []Chunk) []byte {
	b := make([]byte, 0, pinHeaderSize+pinEntrySize*len(chunks)+4)
	b = append(b, pinMagic...)
	b = binary.LittleEndian.AppendUint32(b, pinVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(chunks)))
	b = append(b, id[:]...)
	for _, c := range chunks {
		b = append(b, c.Digest[:]...)
		b = binary.LittleEndian.AppendUint32(b, c.Len)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, crcTable))
}

// decodePin reads the list of image id, strictly.
func decodePin(b []byte, id chunk.Digest) ([]Chunk, error) {
	if len(b) < pinHeaderSize+4 || !bytes.Equal(b[:8], pinMagic) {
		return nil, fmt.Errorf("not a pin list")
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != pinVersion {
		return nil, fmt.Errorf("version %d, not %d", v, pinVersion)
	}
	n := binary.LittleEndian.Uint32(b[12:])
	body := b[:len(b)-4]
	if n > maxPinChunks || len(body) != pinHeaderSize+int(n)*pinEntrySize || chunk.Digest(b[16:48]) != id ||
		binary.LittleEndian.Uint32(b[len(body):]) != crc32.Checksum(body, crcTable) {
		return nil, fmt.Errorf("the list is damaged")
	}
	chunks := make([]Chunk, n)
	for i := range chunks {
		e := body[pinHeaderSize+i*pinEntrySize:]
		chunks[i] = Chunk{Digest: chunk.Digest(e[:32]), Len: binary.LittleEndian.Uint32(e[32:])}
	}
	return chunks, validChunks(chunks)
}

// validChunks refuses what cannot be the list of an image, whose digests rise.
func validChunks(chunks []Chunk) error {
	if len(chunks) > maxPinChunks {
		return fmt.Errorf("%d chunks, at most %d can be pinned for one image", len(chunks), maxPinChunks)
	}
	for i, c := range chunks {
		if c.Len == 0 || c.Len > chunk.MaxSize {
			return fmt.Errorf("chunk %s has %d bytes", c.Digest, c.Len)
		}
		if i > 0 && bytes.Compare(chunks[i-1].Digest[:], c.Digest[:]) >= 0 {
			return fmt.Errorf("chunk %s is out of order", c.Digest)
		}
	}
	return nil
}

// The names in the folder.
const (
	dataExt  = ".chunks"
	indexExt = ".index"
	pinExt   = ".pin"
	lockName = "lock"
)

func dataName(seq uint64) string     { return fmt.Sprintf("%016x%s", seq, dataExt) }
func indexName(seq uint64) string    { return fmt.Sprintf("%016x%s", seq, indexExt) }
func pinName(id chunk.Digest) string { return id.Hex() + pinExt }
func parseSeq(hex string) (uint64, bool) {
	seq, err := strconv.ParseUint(hex, 16, 63) // so that there is always a next
	return seq, err == nil && hex == fmt.Sprintf("%016x", seq)
}
