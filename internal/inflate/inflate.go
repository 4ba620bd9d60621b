// Package inflate decompresses DEFLATE streams (RFC 1951). It exists because
// gunzip is the largest part of reading a layer: it takes half the time of the
// general readers, since it decodes from the caller's buffer with 64 bits in hand
// into one large buffer of its own.
package inflate

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
)

// ErrCorrupt says that the bytes are no DEFLATE stream.
var ErrCorrupt = errors.New("deflate stream is damaged")

const (
	windowSize = 32 << 10 // how far back a match may reach
	maxMatch   = 258
	// slack is what one turn of the fast loop may write: three literals, or a match
	// that is copied eight bytes at a time.
	slack = maxMatch + 16
	// outSize is the window and 128 KiB of new bytes: both stay in the cache of a
	// processor while they are copied to the reader.
	outSize = windowSize + 128<<10 + slack
	outStop = outSize - slack

	// fastInput is how many bytes the fast loop needs before each turn: it loads
	// eight at most twice, and moves on by at most seven each time.
	fastInput = 16
)

// state is what comes next in the stream.
type state uint8

const (
	header  state = iota // a block's header
	stored               // bytes of a stored block
	symbols              // codes of a compressed block
	ended                // nothing: the last block was read
)

// Reader decompresses one stream. It takes no byte after the stream's end from
// its source, so what follows can be read from there.
type Reader struct {
	src *bufio.Reader
	in  []byte // what src has buffered
	pos int    // in in
	eof error  // why src has no more than in

	bits uint64 // the next bits; those above have are not to be used
	have uint   // how many

	state state
	final bool // the block is the last one
	left  int  // of a stored block

	out  [outSize]byte
	w, r int // what was written to out, and read from it
	err  error

	lit, dist *table
	own       [2]table // of a block with codes of its own
	lengths   [maxLit + maxDist]uint8
}

// NewReader returns a Reader of the stream that src is at. src needs a buffer of
// at least 16 bytes, as every bufio.Reader has.
func NewReader(src *bufio.Reader) *Reader {
	r := new(Reader)
	r.Reset(src)
	return r
}

// Reset makes r read another stream.
func (r *Reader) Reset(src *bufio.Reader) {
	r.src, r.in, r.pos, r.eof = src, nil, 0, nil
	r.bits, r.have = 0, 0
	r.state, r.final, r.left = header, false, 0
	r.w, r.r, r.err = 0, 0, nil
}

// Read implements io.Reader. Errors: ErrCorrupt, io.ErrUnexpectedEOF when the
// source ends within the stream, and those of the source.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for r.r == r.w {
		if r.err != nil {
			return 0, r.err
		}
		if r.w >= outStop {
			r.r = copy(r.out[:], r.out[r.w-windowSize:r.w])
			r.w = r.r
		}
		if r.err = r.run(); r.err != nil {
			r.release()
		}
	}
	n := copy(p, r.out[r.r:r.w])
	r.r += n
	return n, nil
}

// run decodes until the buffer is full; the end of the stream is io.EOF.
func (r *Reader) run() error {
	for r.w < outStop {
		var err error
		switch r.state {
		case header:
			err = r.header()
		case stored:
			err = r.copyStored()
		case symbols:
			err = r.symbols()
		case ended:
			return io.EOF
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// release gives the source back what was not used of it.
func (r *Reader) release() {
	r.unread()
	r.src.Discard(r.pos) // not more than it has buffered
	r.in, r.pos = nil, 0
}

// unread takes whole bytes back from bits.
func (r *Reader) unread() {
	r.pos -= int(r.have >> 3)
	r.have &= 7
	r.bits &= 1<<r.have - 1
}

// more gets at least fastInput bytes into in, or all there are.
func (r *Reader) more() {
	r.unread()
	if len(r.in)-r.pos >= fastInput || r.eof != nil {
		return
	}
	r.src.Discard(r.pos) // not more than it has buffered
	r.pos = 0
	if _, err := r.src.Peek(fastInput); err != nil {
		r.eof = err
	}
	r.in, _ = r.src.Peek(r.src.Buffered()) // they are there
}

// fill gets at least n bits, at most 48, unless the source ends before.
func (r *Reader) fill(n uint) {
	for r.have < n {
		if r.pos == len(r.in) {
			if r.eof == nil {
				r.more()
			}
			if r.pos == len(r.in) {
				return
			}
			continue
		}
		r.bits |= uint64(r.in[r.pos]) << r.have
		r.pos++
		r.have += 8
	}
}

// need is fill, with an error when there are fewer.
func (r *Reader) need(n uint) error {
	r.fill(n)
	if r.have < n {
		return r.short()
	}
	return nil
}

// short is the error of a source that ends within the stream.
func (r *Reader) short() error {
	if r.eof == nil || errors.Is(r.eof, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return r.eof
}

// take returns the next n bits, which are there.
func (r *Reader) take(n uint) int {
	v := int(r.bits & (1<<n - 1))
	r.bits >>= n
	r.have -= n
	return v
}

// header reads what a block begins with.
func (r *Reader) header() error {
	if err := r.need(3); err != nil {
		return err
	}
	r.final = r.take(1) == 1
	switch r.take(2) {
	case 0:
		return r.storedHeader()
	case 1:
		r.lit, r.dist = fixedTables()
		r.state = symbols
		return nil
	case 2:
		return r.dynamicHeader()
	}
	return ErrCorrupt
}

// next goes on after a block.
func (r *Reader) next() {
	r.state = header
	if r.final {
		r.state = ended
	}
}

func (r *Reader) storedHeader() error {
	r.take(r.have & 7)
	if err := r.need(32); err != nil {
		return err
	}
	n, complement := r.take(16), r.take(16)
	if n != ^complement&0xffff {
		return ErrCorrupt
	}
	r.unread() // none is left in bits
	r.left, r.state = n, stored
	return nil
}

func (r *Reader) copyStored() error {
	for r.left > 0 {
		if r.w >= outStop {
			return nil
		}
		if r.pos == len(r.in) {
			if r.more(); r.pos == len(r.in) {
				return r.short()
			}
		}
		n := copy(r.out[r.w:outStop], r.in[r.pos:min(len(r.in), r.pos+r.left)])
		r.w += n
		r.pos += n
		r.left -= n
	}
	r.next()
	return nil
}

// symbols decodes a compressed block to its end or until out is full.
func (r *Reader) symbols() error {
	for r.state == symbols && r.w < outStop {
		if len(r.in)-r.pos < fastInput {
			r.more()
		}
		r.fast()
		if r.w >= outStop {
			break
		}
		if err := r.slow(); err != nil {
			return err
		}
	}
	return nil
}

// slow decodes one symbol or match, wherever the source ends.
func (r *Reader) slow() error {
	e, err := r.symbol(r.lit, litBits, litLink)
	switch {
	case err != nil:
		return err
	case e&isLiteral != 0:
		r.out[r.w] = byte(e >> valueShift)
		r.w++
		return nil
	case e&isSpecial != 0: // the end: symbol returns no other
		r.next()
		return nil
	}
	length := r.value(e)
	if e, err = r.symbol(r.dist, distBits, distLink); err != nil {
		return err
	}
	d := r.value(e)
	if d > r.w {
		return ErrCorrupt
	}
	for range length {
		r.out[r.w] = r.out[r.w-d]
		r.w++
	}
	return nil
}

// symbol returns the entry of the next symbol of t, which looks size bits up at
// once and link behind them. Its code has been taken, its extra bits are there.
func (r *Reader) symbol(t *table, size, link uint) (uint32, error) {
	r.fill(maxCode + maxExtra)
	e := t[r.bits&(1<<size-1)]
	if e&isLink != 0 {
		if r.have < size {
			return 0, r.short()
		}
		r.take(size)
		e = t[uint64(e>>valueShift)+r.bits&(1<<link-1)]
	}
	if r.have == 0 || r.have < uint(e&totalMask) {
		return 0, r.short()
	}
	if e&isSpecial != 0 && e&isEnd == 0 {
		return 0, ErrCorrupt
	}
	r.take(uint(e >> codeShift & codeMask))
	return e, nil
}

// value returns the length or distance of e, whose code has been taken.
func (r *Reader) value(e uint32) int {
	return int(e>>valueShift) + r.take(uint(e&totalMask)-uint(e>>codeShift&codeMask))
}

// fast decodes while there is enough input and room for a whole turn. It leaves
// the end of the block, codes longer than one look and what is damaged to slow.
func (r *Reader) fast() {
	in, pos, bits, have := r.in, r.pos, r.bits, r.have
	out, w := &r.out, r.w
	lit, dist := r.lit, r.dist
	for len(in)-pos >= fastInput && w < outStop {
		// 56 bits or more; those above have are bits of in[pos] already, and loading
		// them again changes nothing.
		bits |= binary.LittleEndian.Uint64(in[pos:]) << (have & 63)
		pos += int((63 - have) >> 3)
		have |= 56
		e := lit[bits&(1<<litBits-1)]
		if e&isLiteral != 0 { // up to three, of at most litBits each
			bits >>= e & totalMask
			have -= uint(e & totalMask)
			out[w] = byte(e >> valueShift)
			w++
			if e = lit[bits&(1<<litBits-1)]; e&isLiteral != 0 {
				bits >>= e & totalMask
				have -= uint(e & totalMask)
				out[w] = byte(e >> valueShift)
				w++
				if e = lit[bits&(1<<litBits-1)]; e&isLiteral != 0 {
					bits >>= e & totalMask
					have -= uint(e & totalMask)
					out[w] = byte(e >> valueShift)
					w++
					continue
				}
			}
			bits |= binary.LittleEndian.Uint64(in[pos:]) << (have & 63)
			pos += int((63 - have) >> 3)
			have |= 56
		}
		// Now a length and a distance, 48 bits at most.
		ahead := bits >> (e & totalMask)
		f := dist[ahead&(1<<distBits-1)]
		if (e|f)&isSpecial != 0 {
			break
		}
		length := int(e>>valueShift) + int(bits&(1<<(e&totalMask)-1)>>(e>>codeShift&codeMask))
		d := int(f>>valueShift) + int(ahead&(1<<(f&totalMask)-1)>>(f>>codeShift&codeMask))
		from, end := w-d, w+length
		if from < 0 {
			break
		}
		bits = ahead >> (f & totalMask)
		have -= uint(e&totalMask + f&totalMask)
		switch {
		case d >= 8 && length <= 32: // up to seven bytes more than it has
			for ; w < end; w, from = w+8, from+8 {
				binary.LittleEndian.PutUint64(out[w:w+8], binary.LittleEndian.Uint64(out[from:from+8]))
			}
		case d >= length:
			copy(out[w:end], out[from:from+length])
		default:
			repeat(out[from:end], d)
		}
		w = end
	}
	r.pos, r.bits, r.have, r.w = pos, bits&(1<<have-1), have, w
}

// repeat fills p with repetitions of its first n bytes.
func repeat(p []byte, n int) {
	for n < len(p) {
		n += copy(p[n:], p[:n])
	}
}
