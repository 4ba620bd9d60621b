package wire

import "encoding/binary"

// Sizes of the fixed parts of payloads, see FORMAT.md.
const (
	requestFixed = 1 + 1 + 4 + 4 + 4 + 4 + 8 + 8 + 4 + 8 + 8
	entryFixed   = 1 + 1 + 4 + 4 + 4 + 8 + 8 + 4 + 4 + 4
	sumSize      = 8 + 32
)

var be = binary.BigEndian

func appendString(b []byte, s string) []byte {
	return append(be.AppendUint16(b, uint16(len(s))), s...)
}

// cursor takes a payload apart; bad is set when it is shorter than what is asked for.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) take(n int) []byte {
	if len(c.b) < n {
		c.bad, c.b = true, nil
		return make([]byte, n)
	}
	p := c.b[:n]
	c.b = c.b[n:]
	return p
}

func (c *cursor) u8() byte    { return c.take(1)[0] }
func (c *cursor) u16() int    { return int(be.Uint16(c.take(2))) }
func (c *cursor) u32() uint32 { return be.Uint32(c.take(4)) }
func (c *cursor) u64() uint64 { return be.Uint64(c.take(8)) }

// text takes a string of at most limit bytes without a zero byte, which no path has.
func (c *cursor) text(limit int) string {
	n := c.u16()
	if n > limit || n > len(c.b) {
		c.bad = true
		return ""
	}
	p := c.take(n)
	for _, x := range p {
		if x == 0 {
			c.bad = true
			return ""
		}
	}
	return string(p)
}

// end reports whether all was there, and nothing more.
func (c *cursor) end() error {
	if c.bad || len(c.b) != 0 {
		return ErrFrame
	}
	return nil
}

// Encode returns the payload of a request.
func (q Request) Encode() []byte {
	b := make([]byte, 0, requestFixed+4+len(q.Path))
	b = append(b, Version, byte(q.Op))
	b = be.AppendUint32(b, q.Flags)
	b = be.AppendUint32(b, q.Mode)
	b = be.AppendUint32(b, q.UID)
	b = be.AppendUint32(b, q.GID)
	b = be.AppendUint64(b, uint64(q.Offset))
	b = be.AppendUint64(b, uint64(q.Length))
	b = be.AppendUint32(b, q.Depth)
	b = be.AppendUint64(b, q.MaxCount)
	b = be.AppendUint64(b, uint64(q.MaxBytes))
	b = appendString(b, q.Path)
	b = be.AppendUint16(b, uint16(len(q.Exclude)))
	for _, x := range q.Exclude {
		b = appendString(b, x)
	}
	return b
}

// DecodeRequest takes the payload of a request apart.
func DecodeRequest(p []byte) (Request, error) {
	c := cursor{b: p}
	if c.u8() != Version {
		return Request{}, ErrFrame
	}
	q := Request{Op: Op(c.u8()), Flags: c.u32(), Mode: c.u32(), UID: c.u32(), GID: c.u32(), Offset: int64(c.u64()),
		Length: int64(c.u64()), Depth: c.u32(), MaxCount: c.u64(), MaxBytes: int64(c.u64()), Path: c.text(MaxPath)}
	n := c.u16()
	if n > MaxExclude {
		return Request{}, ErrFrame
	}
	for range n {
		q.Exclude = append(q.Exclude, c.text(MaxPath))
	}
	if err := c.end(); err != nil {
		return Request{}, err
	}
	if q.Op < OpStat || q.Op > lastOp || q.Flags&^allFlags != 0 || q.Mode&^0o7777 != 0 || q.Length < -1 ||
		q.Offset < 0 && (q.Op != OpRead || q.Length != -1) ||
		q.MaxBytes < 0 || q.Path == "" || q.Path[0] != '/' {
		return Request{}, ErrFrame
	}
	return q, nil
}

// Encode returns the payload of an entry.
func (e Entry) Encode() []byte {
	b := make([]byte, 0, entryFixed+4+len(e.Path)+len(e.Target))
	shared := byte(0)
	if e.Shared {
		shared = 1
	}
	b = append(b, byte(e.Type), shared)
	b = be.AppendUint32(b, e.Mode)
	b = be.AppendUint32(b, e.UID)
	b = be.AppendUint32(b, e.GID)
	b = be.AppendUint64(b, uint64(e.Size))
	b = be.AppendUint64(b, uint64(e.Sec))
	b = be.AppendUint32(b, e.Nsec)
	b = be.AppendUint32(b, e.Major)
	b = be.AppendUint32(b, e.Minor)
	b = appendString(b, e.Path)
	return appendString(b, e.Target)
}

// DecodeEntry takes the payload of an entry apart.
func DecodeEntry(p []byte) (Entry, error) {
	c := cursor{b: p}
	e := Entry{Type: Type(c.u8())}
	shared := c.u8()
	e.Shared, e.Mode, e.UID, e.GID = shared == 1, c.u32(), c.u32(), c.u32()
	e.Size, e.Sec, e.Nsec, e.Major, e.Minor = int64(c.u64()), int64(c.u64()), c.u32(), c.u32(), c.u32()
	e.Path, e.Target = c.text(MaxPath), c.text(MaxPath)
	if err := c.end(); err != nil {
		return Entry{}, err
	}
	linked := e.Type == TypeSymlink || e.Type == TypeHardLink
	device := e.Type == TypeChar || e.Type == TypeBlock
	if !e.Type.known() || shared > 1 || e.Shared && e.Type != TypeFile || e.Mode&^0o7777 != 0 || e.Size < 0 || e.Nsec >= 1e9 ||
		linked != (e.Target != "") || !device && (e.Major != 0 || e.Minor != 0) || e.Size != 0 && e.Type != TypeFile {
		return Entry{}, ErrFrame
	}
	return e, nil
}

func (t Type) known() bool {
	switch t {
	case TypeFile, TypeFolder, TypeSymlink, TypeFIFO, TypeSocket, TypeChar, TypeBlock, TypeHardLink:
		return true
	}
	return false
}

// Encode returns the payload of a sum.
func (s Sum) Encode() []byte {
	return append(be.AppendUint64(make([]byte, 0, sumSize), uint64(s.Size)), s.SHA256[:]...)
}

// DecodeSum takes the payload of a sum apart.
func DecodeSum(p []byte) (Sum, error) {
	c := cursor{b: p}
	s := Sum{Size: int64(c.u64())}
	copy(s.SHA256[:], c.take(32))
	if err := c.end(); err != nil || s.Size < 0 {
		return Sum{}, ErrFrame
	}
	return s, nil
}

// Encode returns the payload of an error; a message that is too long is cut.
func (e Error) Encode() []byte {
	m := e.Message
	if len(m) > MaxMessage {
		m = m[:MaxMessage]
	}
	return appendString(be.AppendUint32(nil, e.Errno), m)
}

// DecodeError takes the payload of an error apart.
func DecodeError(p []byte) (Error, error) {
	c := cursor{b: p}
	e := Error{Errno: c.u32()}
	n := c.u16()
	if n > MaxMessage || n > len(c.b) {
		return Error{}, ErrFrame
	}
	e.Message = string(c.take(n))
	if err := c.end(); err != nil || e.Errno == 0 || e.Errno > lastCode || e.Errno > 4095 && e.Errno < CodeChanged {
		return Error{}, ErrFrame
	}
	return e, nil
}
