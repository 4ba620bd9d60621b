package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"quarry/store/chunk"
	"quarry/store/pack"
)

// MaxComing bounds the plain bytes of the chunks of a stream: all that
// `pip --version` touches, 25 MB, which is 12 MB as stored and 0.1 s at 1 Gbit/s,
// and no more than a reader keeps in memory of what nobody has read yet.
const MaxComing = 32 << 20

const (
	streamMagic   = "QRYHINTS"
	streamVersion = 1
	partLen       = 12

	partList  = 5
	partChunk = 6
	partEnd   = 255

	// readStep is how much is allocated ahead of what has come.
	readStep = 256 << 10
)

// Chunk is one chunk of a stream, as it is stored.
type Chunk struct {
	Number uint32
	Codec  pack.Codec
	Len    uint32 // plain length
	Stored []byte
}

// Plain returns the plain bytes in the memory of dst[:0], grown when needed. The
// caller verifies them.
func (c Chunk) Plain(dst []byte) ([]byte, error) {
	return pack.Decode(dst, c.Codec, c.Stored, c.Len)
}

// Writer writes a stream: List once or not at all, then Chunk for some of those
// that List said are coming, then Close. Not safe for concurrent use.
type Writer struct {
	w     io.Writer
	begun bool
	open  map[uint32]bool // coming, and not written yet
	left  int64           // of MaxComing
}

// NewWriter returns a writer of one stream to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w, left: MaxComing} }

// List writes the list, and that chunks of its first coming numbers follow.
func (w *Writer) List(list []uint32, coming int) error {
	if reason := numbersFault(list); reason != "" {
		return fmt.Errorf("trace stream: %s", reason)
	}
	if w.begun || coming < 0 || coming > len(list) {
		return fmt.Errorf("trace stream: a list of %d numbers, %d coming, cannot be written here", len(list), coming)
	}
	w.open = make(map[uint32]bool, coming)
	for _, n := range list[:coming] {
		w.open[n] = true
	}
	size := uint32(4 + 4*len(list))
	b := w.head(partList, pack.Raw, size, size)
	b = binary.LittleEndian.AppendUint32(b, uint32(coming))
	_, err := w.w.Write(appendNumbers(b, list))
	return err
}

// Chunk writes one chunk that is coming.
func (w *Writer) Chunk(c Chunk) error {
	if !w.open[c.Number] {
		return fmt.Errorf("trace stream: chunk %d is not coming, or was written", c.Number)
	}
	if w.left -= int64(c.Len); w.left < 0 {
		return fmt.Errorf("trace stream: more than %d bytes of chunks", int64(MaxComing))
	}
	if reason := chunkFault(c.Codec, int64(len(c.Stored)), c.Len); reason != "" {
		return fmt.Errorf("trace stream: chunk %d: %s", c.Number, reason)
	}
	delete(w.open, c.Number)
	b := w.head(partChunk, c.Codec, uint32(4+len(c.Stored)), c.Len)
	b = binary.LittleEndian.AppendUint32(b, c.Number)
	if _, err := w.w.Write(b); err != nil {
		return err
	}
	_, err := w.w.Write(c.Stored)
	return err
}

// Close writes the end, without which the stream was cut off.
func (w *Writer) Close() error {
	_, err := w.w.Write(w.head(partEnd, 0, 0, 0))
	return err
}

// head returns the header of a part, behind the preamble when it is the first.
func (w *Writer) head(kind byte, c pack.Codec, size, plain uint32) []byte {
	var b []byte
	if !w.begun {
		w.begun = true
		b = append(b, streamMagic...)
		b = binary.LittleEndian.AppendUint32(b, streamVersion)
	}
	b = append(b, kind, byte(c), 0, 0)
	b = binary.LittleEndian.AppendUint32(b, size)
	return binary.LittleEndian.AppendUint32(b, plain)
}

// chunkFault returns why a chunk cannot be stored like that, or "".
func chunkFault(c pack.Codec, stored int64, plain uint32) string {
	switch {
	case plain < 1 || plain > chunk.MaxSize:
		return fmt.Sprintf("plain length %d, want 1 to %d", plain, chunk.MaxSize)
	case c == pack.Raw && stored == int64(plain), c == pack.Zstd && stored >= 1 && stored < int64(plain):
		return ""
	}
	return fmt.Sprintf("%d bytes stored as %d bytes with codec %d", plain, stored, c)
}

// Reader reads a stream and trusts nothing in it: lengths and sums are bounded,
// chunks are those that were said to come, each once, and memory grows only with
// bytes that came. Errors: ErrMalformed, ErrVersion, io.ErrUnexpectedEOF for a
// stream that just stops, and those of the reader below. Not safe for concurrent
// use.
type Reader struct {
	r    io.Reader
	open map[uint32]bool // coming, and not read yet
	left int64           // of MaxComing
	next part            // read by List
	held bool            // next was
	buf  []byte
}

// NewReader reads a stream from r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r, left: MaxComing} }

// part is the header of one part.
type part struct {
	kind  byte
	codec pack.Codec
	size  uint32
	plain uint32
}

// List returns the list, and how many of its first numbers chunks may follow of.
// Both are empty when the stream has no list. It is called once, before Next.
func (r *Reader) List() (list []uint32, coming int, err error) {
	pre := make([]byte, len(streamMagic)+4)
	if err := r.fill(pre); err != nil {
		return nil, 0, err
	}
	if string(pre[:8]) != streamMagic {
		return nil, 0, malformed("trace stream begins with %q", pre[:8])
	}
	if v := binary.LittleEndian.Uint32(pre[8:]); v != streamVersion {
		return nil, 0, fmt.Errorf("trace stream: %w %d, this program reads %d", ErrVersion, v, streamVersion)
	}
	p, err := r.part()
	if err != nil {
		return nil, 0, err
	}
	if p.kind != partList {
		r.next, r.held = p, true
		return nil, 0, nil
	}
	if p.codec != pack.Raw || p.size != p.plain || p.size%4 != 0 || p.size < 8 || p.size > 4+4*MaxNumbers {
		return nil, 0, malformed("trace stream: list of %d bytes, %d plain, codec %d", p.size, p.plain, p.codec)
	}
	b := make([]byte, p.size)
	if err := r.fill(b); err != nil {
		return nil, 0, err
	}
	n := binary.LittleEndian.Uint32(b)
	list = numbers(b[4:])
	if reason := numbersFault(list); reason != "" {
		return nil, 0, malformed("trace stream: %s", reason)
	}
	if int64(n) > int64(len(list)) {
		return nil, 0, malformed("trace stream: %d of %d chunks are coming", n, len(list))
	}
	r.open = make(map[uint32]bool, n)
	for _, k := range list[:n] {
		r.open[k] = true
	}
	return list, int(n), nil
}

// Next returns the next chunk, whose Stored is valid until the next call, and
// io.EOF behind the last one, when the end was there and nothing after it.
func (r *Reader) Next() (Chunk, error) {
	p, err := r.next, error(nil)
	if !r.held {
		p, err = r.part()
	}
	r.held = false
	switch {
	case err != nil:
		return Chunk{}, err
	case p.kind == partEnd:
		return Chunk{}, r.end(p)
	case p.kind != partChunk:
		return Chunk{}, malformed("trace stream: part %d is unknown, or out of order", p.kind)
	}
	if p.size < 4 {
		return Chunk{}, malformed("trace stream: chunk of %d bytes", p.size)
	}
	if reason := chunkFault(p.codec, int64(p.size)-4, p.plain); reason != "" {
		return Chunk{}, malformed("trace stream: %s", reason)
	}
	if r.left -= int64(p.plain); r.left < 0 {
		return Chunk{}, malformed("trace stream: more than %d bytes of chunks", int64(MaxComing))
	}
	var head [4]byte
	if err := r.fill(head[:]); err != nil {
		return Chunk{}, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if !r.open[n] {
		return Chunk{}, malformed("trace stream: chunk %d was not coming, or came before", n)
	}
	delete(r.open, n)
	if err := r.payload(int(p.size) - 4); err != nil {
		return Chunk{}, err
	}
	return Chunk{Number: n, Codec: p.codec, Len: p.plain, Stored: r.buf}, nil
}

func (r *Reader) end(p part) error {
	if p != (part{kind: partEnd}) {
		return malformed("trace stream: end with content")
	}
	switch n, err := io.ReadFull(r.r, make([]byte, 1)); {
	case n != 0:
		return malformed("trace stream: bytes after the end")
	case err != io.EOF:
		return err
	}
	r.next, r.held = p, true // the next call finds the end again
	return io.EOF
}

func (r *Reader) part() (part, error) {
	b := make([]byte, partLen)
	if err := r.fill(b); err != nil {
		return part{}, err
	}
	if b[2] != 0 || b[3] != 0 {
		return part{}, malformed("trace stream: part has reserved bytes set")
	}
	return part{
		kind: b[0], codec: pack.Codec(b[1]),
		size: binary.LittleEndian.Uint32(b[4:]), plain: binary.LittleEndian.Uint32(b[8:]),
	}, nil
}

// payload reads n bytes into the reader's buffer, which it grows only as bytes
// come.
func (r *Reader) payload(n int) error {
	r.buf = r.buf[:0]
	for len(r.buf) < n {
		old := len(r.buf)
		step := min(n-old, max(readStep, cap(r.buf)-old))
		r.buf = slices.Grow(r.buf, step)[:old+step]
		if err := r.fill(r.buf[old:]); err != nil {
			return err
		}
	}
	return nil
}

// fill reads len(p) bytes; a stream that stops before that was cut off.
func (r *Reader) fill(p []byte) error {
	_, err := io.ReadFull(r.r, p)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("trace stream: %w", err)
	}
	return nil
}
