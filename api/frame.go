package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"quarry/store/chunk"
	"quarry/store/pack"
)

// The layout of a batchGet answer; FORMAT.md draws it.
const (
	frameMagic  = "QRYBATCH" // 8 bytes, then the version
	maxFrameVer = 2
	preambleLen = 12
	headerLen   = 48

	kindChunk   = 1
	kindEnd     = 2
	kindRecords = 3 // of version 2

	// maxReason bounds the text of a frame that carries no chunk.
	maxReason = 512
	// readStep is how much is allocated ahead of what has arrived: a frame that
	// lies about its length costs one step, not the length.
	readStep = 256 << 10
)

// Status says what a chunk frame answers.
type Status uint8

// The statuses of a chunk frame.
const (
	StatusOK       Status = 0
	StatusNotFound Status = 1 // the store has no such chunk
	StatusCorrupt  Status = 2 // the store's copy is damaged; asking again does not help
	StatusError    Status = 3 // it could not be read now; asking again may help
)

// Frame answers for one digest.
type Frame struct {
	Digest chunk.Digest
	Status Status
	Codec  pack.Codec // StatusOK: how Stored is compressed
	Len    uint32     // StatusOK: plain length
	CRC    uint32     // StatusOK: CRC32C of Stored as the sender knows it
	Stored []byte     // StatusOK: the chunk as stored
	Reason string     // other statuses: a sentence for people

	// Records is, of the first record of a records frame, how many that has. A reader
	// sets it, a writer does not look.
	Records int
}

// FrameError says where and why an answer of batchGet breaks the format.
type FrameError struct {
	Off    int64 // of the frame in the answer
	Reason string
	Chunk  chunk.Digest // whose frame it says it is; zero where it says nothing yet
}

func (e *FrameError) Error() string {
	return fmt.Sprintf("batch answer is malformed at byte %d: %s", e.Off, e.Reason)
}

// FrameWriter writes a batchGet answer. Not safe for concurrent use.
type FrameWriter struct {
	w     io.Writer
	ver   uint32
	count uint32
	begun bool
	head  [preambleLen + headerLen]byte // of the frame that is written
}

// NewFrameWriter returns a writer of one answer of version 1 to w.
func NewFrameWriter(w io.Writer) *FrameWriter { return &FrameWriter{w: w, ver: 1} }

// NewFrameWriter2 returns a writer of one answer of version 2 to w.
func NewFrameWriter2(w io.Writer) *FrameWriter { return &FrameWriter{w: w, ver: 2} }

// Write writes one chunk frame; a Reason too long for a frame is cut.
func (fw *FrameWriter) Write(f Frame) error {
	payload, crc := f.Stored, f.CRC
	if f.Status != StatusOK {
		payload = []byte(cutReason(f.Reason))
		crc = pack.Checksum(payload)
	}
	head := fw.header()
	head[0], head[1] = kindChunk, byte(f.Status)
	if f.Status == StatusOK {
		head[2] = byte(f.Codec)
		binary.LittleEndian.PutUint32(head[8:], f.Len)
	}
	binary.LittleEndian.PutUint32(head[4:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(head[12:], crc)
	copy(head[16:], f.Digest[:])
	if err := fw.writeHeader(); err != nil {
		return err
	}
	fw.count++
	_, err := fw.w.Write(payload)
	return err
}

// Records begins a records frame of version 2: the caller writes count records of packs
// that have size bytes together to the underlying writer before it writes anything else.
func (fw *FrameWriter) Records(count uint32, size uint64) error {
	head := fw.header()
	head[0] = kindRecords
	binary.LittleEndian.PutUint32(head[4:], count)
	binary.LittleEndian.PutUint64(head[8:], size)
	fw.count += count
	return fw.writeHeader()
}

// Close writes the end frame. Without it the answer counts as cut off.
func (fw *FrameWriter) Close() error {
	head := fw.header()
	head[0] = kindEnd
	binary.LittleEndian.PutUint32(head[4:], fw.count)
	return fw.writeHeader()
}

// header returns where the next header goes, all zero.
func (fw *FrameWriter) header() []byte {
	head := fw.head[preambleLen:]
	clear(head)
	return head
}

// writeHeader writes that header, the first time with the preamble before it.
func (fw *FrameWriter) writeHeader() error {
	p := fw.head[preambleLen:]
	if !fw.begun {
		fw.begun = true
		p = fw.head[:]
		copy(p, frameMagic)
		binary.LittleEndian.PutUint32(p[len(frameMagic):], fw.ver)
	}
	_, err := fw.w.Write(p)
	return err
}

// cutReason makes a text fit a frame: valid UTF-8 of at most maxReason bytes.
func cutReason(s string) string {
	if len(s) > maxReason {
		s = s[:maxReason]
		for len(s) > 0 && !utf8.ValidString(s) {
			s = s[:len(s)-1]
		}
	}
	if !utf8.ValidString(s) {
		return ""
	}
	return s
}

// FrameReader reads a batchGet answer and trusts nothing in it: lengths are
// bounded, and memory grows only with bytes that came.
type FrameReader struct {
	r     io.Reader
	ver   uint32 // of the answer, once it has begun
	off   int64
	limit int // chunks allowed
	count int
	run   run // of records that is being read
	head  [pack.RecordHeaderSize]byte
	begun bool
	done  bool
	buf   []byte
}

// run is the rest of a records frame.
type run struct {
	left int
	size int64 // of what is left
}

// NewFrameReader reads from r an answer of at most limit chunks, of either version.
func NewFrameReader(r io.Reader, limit int) *FrameReader {
	return &FrameReader{r: r, limit: limit}
}

// Version returns the version of the answer, once Next was called.
func (fr *FrameReader) Version() int { return int(fr.ver) }

// Next returns the next chunk; Stored is valid until the next call. After
// the last one it returns io.EOF, but only when the end frame was there with
// the right count and nothing followed it. An answer that just stops is
// io.ErrUnexpectedEOF, one that breaks the format a *FrameError. Whether the
// bytes are the chunk's is for the caller to verify, frame by frame, so that one
// damaged chunk holds up no other.
func (fr *FrameReader) Next() (Frame, error) {
	if fr.done {
		return Frame{}, io.EOF
	}
	if !fr.begun {
		if err := fr.preamble(); err != nil {
			return Frame{}, err
		}
		fr.begun = true
	}
	if fr.run.left > 0 {
		return fr.record()
	}
	start := fr.off
	head := fr.head[:headerLen]
	if err := fr.fill(head); err != nil {
		return Frame{}, err
	}
	switch {
	case head[0] == kindEnd:
		return Frame{}, fr.end(start, head)
	case head[0] == kindRecords && fr.ver > 1:
		if err := fr.records(start, head); err != nil {
			return Frame{}, err
		}
		f, err := fr.record()
		f.Records = fr.run.left + 1
		return f, err
	}
	return fr.chunk(start, head)
}

// Offset returns where in the answer the next frame starts.
func (fr *FrameReader) Offset() int64 { return fr.off }

func (fr *FrameReader) preamble() error {
	pre := make([]byte, preambleLen)
	if err := fr.fill(pre); err != nil {
		return err
	}
	if string(pre[:8]) != frameMagic {
		return &FrameError{Off: 0, Reason: fmt.Sprintf("magic is %q, want %q", pre[:8], frameMagic)}
	}
	if fr.ver = binary.LittleEndian.Uint32(pre[8:]); fr.ver == 0 || fr.ver > maxFrameVer {
		return &FrameError{Off: 8, Reason: fmt.Sprintf("version %d, this program reads 1 to %d", fr.ver, maxFrameVer)}
	}
	return nil
}

// records reads the header of a records frame.
func (fr *FrameReader) records(start int64, head []byte) error {
	count, size := binary.LittleEndian.Uint32(head[4:]), binary.LittleEndian.Uint64(head[8:])
	for i, c := range head {
		if c != 0 && i != 0 && (i < 4 || i >= 16) {
			return &FrameError{Off: start, Reason: "records frame has reserved bytes set"}
		}
	}
	if count == 0 || int64(count) > int64(fr.limit-fr.count) {
		return &FrameError{Off: start, Reason: fmt.Sprintf("a frame of %d records after %d chunks, %d were asked for", count, fr.count, fr.limit)}
	}
	if n := uint64(count); size < n*(pack.RecordHeaderSize+1) || size > n*(pack.RecordHeaderSize+chunk.MaxSize) {
		return &FrameError{Off: start, Reason: fmt.Sprintf("%d records of %d bytes together", count, size)}
	}
	fr.run = run{int(count), int64(size)}
	return nil
}

// record reads one record of the frame that is being read.
func (fr *FrameReader) record() (Frame, error) {
	start := fr.off
	bad := func(format string, args ...any) (Frame, error) {
		return Frame{}, &FrameError{Off: start, Reason: fmt.Sprintf(format, args...)}
	}
	head := fr.head[:]
	if fr.run.size < int64(len(head)) {
		return bad("%d bytes left for %d records", fr.run.size, fr.run.left)
	}
	if err := fr.fill(head); err != nil {
		return Frame{}, err
	}
	e, err := pack.DecodeRecordHeader(head, start)
	if err != nil {
		return bad("%v", err)
	}
	fr.count++
	fr.run.left--
	fr.run.size -= int64(len(head)) + int64(e.Stored)
	if fr.run.size < 0 || (fr.run.left == 0) != (fr.run.size == 0) {
		return bad("records frame has other records than its lengths say: %d bytes left for %d", fr.run.size, fr.run.left)
	}
	stored, err := fr.payload(int(e.Stored))
	if err != nil {
		return Frame{}, err
	}
	return Frame{Digest: e.Digest, Codec: e.Codec, Len: e.Len, CRC: e.CRC, Stored: stored}, nil
}

func (fr *FrameReader) end(start int64, head []byte) error {
	count := binary.LittleEndian.Uint32(head[4:])
	if int64(count) != int64(fr.count) {
		return &FrameError{Off: start, Reason: fmt.Sprintf("end frame counts %d frames, %d came", count, fr.count)}
	}
	for i, c := range head {
		if c != 0 && i != 0 && (i < 4 || i >= 8) {
			return &FrameError{Off: start, Reason: "end frame has reserved bytes set"}
		}
	}
	switch n, err := io.ReadFull(fr.r, make([]byte, 1)); {
	case n != 0:
		return &FrameError{Off: fr.off, Reason: "bytes after the end frame"}
	case err != io.EOF:
		return err
	}
	fr.done = true
	return io.EOF
}

func (fr *FrameReader) chunk(start int64, head []byte) (Frame, error) {
	size := binary.LittleEndian.Uint32(head[4:])
	f := Frame{
		Status: Status(head[1]),
		Codec:  pack.Codec(head[2]),
		Len:    binary.LittleEndian.Uint32(head[8:]),
		CRC:    binary.LittleEndian.Uint32(head[12:]),
	}
	copy(f.Digest[:], head[16:])
	if fr.count++; fr.count > fr.limit {
		return Frame{}, &FrameError{Off: start, Reason: fmt.Sprintf("more than the %d frames asked for", fr.limit)}
	}
	if reason := checkHeader(head, f, size); reason != "" {
		return Frame{}, &FrameError{Off: start, Reason: reason, Chunk: f.Digest}
	}
	payload, err := fr.payload(int(size))
	if err != nil {
		return Frame{}, err
	}
	if f.Status == StatusOK {
		f.Stored = payload
		return f, nil
	}
	if !utf8.Valid(payload) || pack.Checksum(payload) != f.CRC {
		return Frame{}, &FrameError{Off: start, Reason: "reason is not UTF-8 or has another checksum", Chunk: f.Digest}
	}
	f.Reason, f.CRC = string(payload), 0
	return f, nil
}

// checkHeader returns why a chunk frame's header cannot be, or "".
func checkHeader(head []byte, f Frame, size uint32) string {
	if head[0] != kindChunk || head[3] != 0 {
		return fmt.Sprintf("unknown frame kind %d or reserved byte %d", head[0], head[3])
	}
	switch f.Status {
	case StatusOK:
		switch {
		case f.Codec != pack.Raw && f.Codec != pack.Zstd:
			return fmt.Sprintf("chunk %s: unknown codec %d", f.Digest, f.Codec)
		case f.Len == 0 || f.Len > chunk.MaxSize:
			return fmt.Sprintf("chunk %s: plain length %d, want 1 to %d", f.Digest, f.Len, chunk.MaxSize)
		case size == 0 || (f.Codec == pack.Raw && size != f.Len) || (f.Codec == pack.Zstd && size >= f.Len):
			return fmt.Sprintf("chunk %s: stored length %d does not fit plain length %d", f.Digest, size, f.Len)
		}
	case StatusNotFound, StatusCorrupt, StatusError:
		if f.Codec != 0 || f.Len != 0 || size > maxReason {
			return fmt.Sprintf("chunk %s: a frame of status %d with content", f.Digest, f.Status)
		}
	default:
		return fmt.Sprintf("unknown status %d", f.Status)
	}
	return ""
}

// payload reads size bytes into the reader's buffer, which it grows only as
// bytes arrive.
func (fr *FrameReader) payload(size int) ([]byte, error) {
	buf, err := readGrowing(fr.buf[:0], size, fr.fill)
	if err != nil {
		return nil, err
	}
	fr.buf = buf
	return buf, nil
}

// readGrowing reads size bytes with fill and appends them to buf, whose memory
// grows only as bytes arrive.
func readGrowing(buf []byte, size int, fill func([]byte) error) ([]byte, error) {
	for len(buf) < size {
		n := min(size-len(buf), max(readStep, cap(buf)-len(buf)))
		old := len(buf)
		if cap(buf)-old < n {
			grown := make([]byte, old, min(size, max(old+n, 2*cap(buf))))
			copy(grown, buf)
			buf = grown
		}
		buf = buf[:old+n]
		if err := fill(buf[old:]); err != nil {
			return nil, err
		}
	}
	return buf, nil
}

// fill reads len(p) bytes; an answer that stops before that was cut off.
func (fr *FrameReader) fill(p []byte) error {
	n, err := io.ReadFull(fr.r, p)
	fr.off += int64(n)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("batch answer at byte %d: %w", fr.off, err)
	}
	return nil
}
