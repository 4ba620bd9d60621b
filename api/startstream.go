package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/klauspost/compress/zstd"

	"quarry/rafs"
	"quarry/signer"
	"quarry/store/pack"

	"quarry/store/image"
)

// The layout of a start stream; FORMAT.md draws it.
const (
	startMagic = "QRYSTART" // 8 bytes, then the version
	startVer   = 1          // all ends with the end part
	startVer2  = 2          // a trace stream, of package trace, has the place of the end part
	partLen    = 12         // header of a part
)

// PartType says what a part of a start stream holds.
type PartType uint8

// The parts in the order in which they come. 5 and 6 are those of a trace stream.
const (
	PartName      PartType = 1   // envelope of the name statement
	PartImage     PartType = 2   // envelope of the image statement
	PartConfig    PartType = 3   // OCI image config
	PartBootstrap PartType = 4   // raw or zstd
	partEnd       PartType = 255 // without it the stream was cut off
)

// partRules says what may follow each part, 0 being the beginning, and how long
// its plain bytes may be. All streams that the rules allow are: a name or none,
// an image, config and bootstrap or neither, the end.
var partRules = map[PartType]struct {
	next []PartType
	max  int64
}{
	0:             {next: []PartType{PartName, PartImage}},
	PartName:      {next: []PartType{PartImage}, max: signer.MaxEnvelope},
	PartImage:     {next: []PartType{PartConfig, partEnd}, max: signer.MaxEnvelope},
	PartConfig:    {next: []PartType{PartBootstrap}, max: image.MaxConfig},
	PartBootstrap: {next: []PartType{partEnd}, max: rafs.MaxBootstrap},
	partEnd:       {},
}

// StartPart is the header of one part.
type StartPart struct {
	Type  PartType
	Codec pack.Codec // raw, and for a bootstrap also zstd
	Size  int64      // of the payload as sent
	Plain int64      // of its content
}

// rawPart is the header of a part that is sent as it is.
func rawPart(t PartType, size int) StartPart {
	return StartPart{Type: t, Codec: pack.Raw, Size: int64(size), Plain: int64(size)}
}

// fault returns why p cannot follow the part before it, or "".
func (p StartPart) fault(before PartType) string {
	rule, known := partRules[p.Type]
	switch {
	case !known:
		return fmt.Sprintf("unknown part %d", p.Type)
	case !slices.Contains(partRules[before].next, p.Type):
		return fmt.Sprintf("part %d after part %d: it is repeated, out of order or another is missing", p.Type, before)
	case p.Type == partEnd:
		if p != (StartPart{Type: partEnd}) {
			return "end part with content"
		}
	case p.Plain < 1 || p.Plain > rule.max:
		return fmt.Sprintf("part %d of %d bytes, want 1 to %d", p.Type, p.Plain, rule.max)
	case p.Codec == pack.Raw && p.Size == p.Plain:
	case p.Codec == pack.Zstd && p.Type == PartBootstrap && p.Size >= 1 && p.Size < p.Plain:
	default:
		return fmt.Sprintf("part %d of %d bytes sent as %d bytes with codec %d", p.Type, p.Plain, p.Size, p.Codec)
	}
	return ""
}

// StartError says where and why a start stream breaks the format.
type StartError struct {
	Off    int64 // of the part in the stream
	Reason string
}

func (e *StartError) Error() string {
	return fmt.Sprintf("start stream is malformed at byte %d: %s", e.Off, e.Reason)
}

// StartWriter writes a start stream: for each part Begin and its payload, then
// Close, or Rest in version 2. It refuses to write what a reader would refuse. Not
// safe for concurrent use.
type StartWriter struct {
	w       io.Writer
	version uint32
	last    PartType
	left    int64 // bytes of the payload still to come
}

// NewStartWriter returns a writer of one stream of version 1 to w.
func NewStartWriter(w io.Writer) *StartWriter { return &StartWriter{w: w, version: startVer} }

// NewStartWriter2 returns a writer of one stream of version 2 to w.
func NewStartWriter2(w io.Writer) *StartWriter { return &StartWriter{w: w, version: startVer2} }

// Begin writes the header of the next part.
func (sw *StartWriter) Begin(p StartPart) error {
	if sw.left > 0 {
		return fmt.Errorf("start stream: part %d ends %d bytes early", sw.last, sw.left)
	}
	if reason := p.fault(sw.last); reason != "" {
		return fmt.Errorf("start stream: %s", reason)
	}
	if p.Type == partEnd && sw.version == startVer2 {
		return errors.New("start stream: version 2 has a trace stream in the place of the end part")
	}
	var head []byte
	if sw.last == 0 {
		head = append(head, startMagic...)
		head = binary.LittleEndian.AppendUint32(head, sw.version)
	}
	head = append(head, byte(p.Type), byte(p.Codec), 0, 0)
	head = binary.LittleEndian.AppendUint32(head, uint32(p.Size))
	head = binary.LittleEndian.AppendUint32(head, uint32(p.Plain))
	sw.last, sw.left = p.Type, p.Size
	_, err := sw.w.Write(head)
	return err
}

// Write writes bytes of the payload of the part begun last.
func (sw *StartWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > sw.left {
		return 0, fmt.Errorf("start stream: part %d has more bytes than its header says", sw.last)
	}
	n, err := sw.w.Write(p)
	sw.left -= int64(n)
	return n, err
}

// Close writes the end part of version 1.
func (sw *StartWriter) Close() error { return sw.Begin(StartPart{Type: partEnd}) }

// Rest returns where the trace stream of version 2 is written to, which follows
// the image or the bootstrap. Nothing can be written to sw after it.
func (sw *StartWriter) Rest() (io.Writer, error) {
	if sw.version != startVer2 || sw.left > 0 || sw.last != PartImage && sw.last != PartBootstrap {
		return nil, fmt.Errorf("start stream of version %d: no trace stream follows part %d with %d bytes left", sw.version, sw.last, sw.left)
	}
	sw.last = partEnd
	return sw.w, nil
}

// raw writes a whole part as it is.
func (sw *StartWriter) raw(t PartType, p []byte) error {
	if err := sw.Begin(rawPart(t, len(p))); err != nil {
		return err
	}
	_, err := sw.Write(p)
	return err
}

// StartReader reads a start stream and trusts nothing in it: parts come in
// their order or not at all, lengths are bounded, and memory grows only with
// bytes that came. It reads no byte ahead. Errors: *StartError for a stream that
// breaks the format, io.ErrUnexpectedEOF for one that just stops.
type StartReader struct {
	r       io.Reader
	version int
	off     int64
	part    StartPart
	left    int64 // bytes of the part's payload not read yet
	err     error // the stream's own, which a decompressor may have hidden
}

// NewStartReader reads a stream from r.
func NewStartReader(r io.Reader) *StartReader { return &StartReader{r: r} }

// Version returns the version of the stream, 1 or 2, and 0 before the first Next.
func (sr *StartReader) Version() int { return sr.version }

// Next returns the header of the next part. The payload of the one before must
// have been read to its end. After the last part it returns io.EOF: in version 1
// only when the end part was there and nothing followed it, in version 2 after the
// bootstrap, where the trace stream begins; where content was left out it begins
// after the image, for whoever knows that it was.
func (sr *StartReader) Next() (StartPart, error) {
	if sr.part.Type == partEnd || sr.version == startVer2 && sr.part.Type == PartBootstrap && sr.left == 0 {
		return StartPart{}, io.EOF
	}
	if sr.left > 0 {
		return StartPart{}, fmt.Errorf("part %d of the start stream was not read to its end", sr.part.Type)
	}
	if sr.part.Type == 0 {
		if err := sr.preamble(); err != nil {
			return StartPart{}, err
		}
	}
	start := sr.off
	head := make([]byte, partLen)
	if err := sr.fill(head); err != nil {
		return StartPart{}, err
	}
	p := StartPart{
		Type: PartType(head[0]), Codec: pack.Codec(head[1]),
		Size: int64(binary.LittleEndian.Uint32(head[4:])), Plain: int64(binary.LittleEndian.Uint32(head[8:])),
	}
	if head[2] != 0 || head[3] != 0 {
		return StartPart{}, &StartError{start, "part has reserved bytes set"}
	}
	if reason := p.fault(sr.part.Type); reason != "" {
		return StartPart{}, &StartError{start, reason}
	}
	if p.Type == partEnd && sr.version == startVer2 {
		return StartPart{}, &StartError{start, "end part in version 2, where a trace stream has its place"}
	}
	if p.Type == partEnd {
		switch n, err := io.ReadFull(sr.r, make([]byte, 1)); {
		case n != 0:
			return StartPart{}, &StartError{sr.off, "bytes after the end part"}
		case err != io.EOF:
			return StartPart{}, err
		}
	}
	sr.part, sr.left = p, p.Size
	if p.Type == partEnd {
		return StartPart{}, io.EOF
	}
	return p, nil
}

func (sr *StartReader) preamble() error {
	pre := make([]byte, preambleLen)
	if err := sr.fill(pre); err != nil {
		return err
	}
	if string(pre[:8]) != startMagic {
		return &StartError{0, fmt.Sprintf("magic is %q, want %q", pre[:8], startMagic)}
	}
	v := binary.LittleEndian.Uint32(pre[8:])
	if v != startVer && v != startVer2 {
		return &StartError{8, fmt.Sprintf("version %d, this program reads %d and %d", v, startVer, startVer2)}
	}
	sr.version = int(v)
	return nil
}

// Read reads the payload of the part, as sent, up to io.EOF at its end.
func (sr *StartReader) Read(p []byte) (int, error) {
	if sr.left == 0 {
		return 0, io.EOF
	}
	n, err := sr.r.Read(p[:min(int64(len(p)), sr.left)])
	sr.off += int64(n)
	sr.left -= int64(n)
	switch {
	case sr.left == 0 || err == nil:
		return n, nil
	case errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF
	}
	sr.err = fmt.Errorf("start stream at byte %d: %w", sr.off, err)
	return n, sr.err
}

// Bytes reads the payload of the part and returns its content, decompressed, of
// exactly the length that the header says. The caller verifies it.
func (sr *StartReader) Bytes() ([]byte, error) {
	start := sr.off
	plain := int(sr.part.Plain)
	if sr.part.Codec == pack.Raw {
		return readGrowing(nil, plain, sr.payload)
	}
	dec, err := zstd.NewReader(sr, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(BootstrapWindow))
	if err != nil {
		return nil, fmt.Errorf("zstd decoder: %w", err)
	}
	defer dec.Close()
	p, err := readGrowing(nil, plain, func(p []byte) error {
		_, err := io.ReadFull(dec, p)
		return err
	})
	if err == nil {
		// One read more: the content must end where the header says, and the
		// payload with it.
		if _, err = io.ReadFull(dec, make([]byte, 1)); err == io.EOF {
			return p, nil
		}
	}
	if sr.err != nil {
		return nil, sr.err
	}
	if err == nil {
		return nil, &StartError{start, fmt.Sprintf("part %d decompresses to more than its %d bytes", sr.part.Type, plain)}
	}
	return nil, &StartError{start, fmt.Sprintf("part %d does not decompress to its %d bytes: %v", sr.part.Type, plain, err)}
}

func (sr *StartReader) payload(p []byte) error {
	_, err := io.ReadFull(sr, p)
	return err
}

// fill reads len(p) bytes; a stream that stops before that was cut off.
func (sr *StartReader) fill(p []byte) error {
	n, err := io.ReadFull(sr.r, p)
	sr.off += int64(n)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("start stream at byte %d: %w", sr.off, err)
	}
	return nil
}
