package inflate

import (
	"math/bits"
	"sync"
)

const (
	maxLit      = 286 // literals, the end and lengths
	maxDist     = 30
	maxCode     = 15 // bits of a code
	maxExtra    = 13 // bits after it
	endOfBlock  = 256
	lengthCodes = 19 // codes of code lengths

	// litBits and distBits are how many bits are looked up at once. A longer code
	// goes on in a second part of the table, which has room for the longest.
	litBits  = 11
	distBits = 9
	litLink  = maxCode - litBits
	distLink = maxCode - distBits
	// tableSize has room for a first part and every second one: each has at least
	// two of the symbols, so there are at most 143 × 2⁴ entries behind 2¹¹, and
	// 15 × 2⁶ behind 2⁹.
	tableSize = 1 << 13
)

// table finds the symbol of the next bits. An entry has
//
//	bits 0–5    bits of code and extra together
//	bits 8–11   bits of the code
//	bits 12–15  the flags
//	bits 16–31  literal, smallest length or distance, or place of a second part
type table [tableSize]uint32

const (
	totalMask  = 63
	codeShift  = 8
	codeMask   = 15
	isLiteral  = 1 << 15
	isSpecial  = 1 << 14 // the end, a second part, or no symbol
	isLink     = 1 << 13
	isEnd      = 1 << 12
	valueShift = 16

	invalid = isSpecial // for bits that begin no code
)

// kind returns the entry of a symbol without its code's length.
type kind func(symbol int) uint32

func literal(s int) uint32 {
	switch {
	case s < endOfBlock:
		return uint32(s)<<valueShift | isLiteral
	case s == endOfBlock:
		return isSpecial | isEnd
	case s < 265:
		return uint32(s-257+3) << valueShift
	case s < 285:
		extra := uint32(s-261) >> 2
		return (uint32(4+(s-261)&3)<<extra+3)<<valueShift | extra
	case s == 285:
		return maxMatch << valueShift
	}
	return invalid
}

func distance(s int) uint32 {
	switch {
	case s < 4:
		return uint32(s+1) << valueShift
	case s < maxDist:
		extra := uint32(s-2) >> 1
		return (uint32(2+s&1)<<extra+1)<<valueShift | extra
	}
	return invalid
}

func codeLength(s int) uint32 { return uint32(s) << valueShift }

// build makes the table of the code with these lengths, and reports whether it
// is one: complete, or of one symbol with one bit, or empty.
func (t *table) build(lengths []uint8, size uint, kind kind) bool {
	var count [maxCode + 1]int
	for _, n := range lengths {
		count[n]++
	}
	count[0] = 0
	var next [maxCode + 1]int // code
	longest, code := 0, 0
	for n := 1; n <= maxCode; n++ {
		code <<= 1
		next[n] = code
		code += count[n]
		if count[n] > 0 {
			longest = n
		}
	}
	if longest > 0 && code != 1<<maxCode && !(longest == 1 && count[1] == 1) {
		return false
	}
	first := t[:1<<size]
	if code != 1<<maxCode {
		for i := range first {
			first[i] = invalid
		}
	}
	t.fill(lengths, &next, size, kind)
	return true
}

func (t *table) fill(lengths []uint8, next *[maxCode + 1]int, size uint, kind kind) {
	end := uint32(1) << size // of the table so far
	links := [1 << litBits]uint16{}
	for s, n8 := range lengths {
		n := uint(n8)
		if n == 0 {
			continue
		}
		code := uint(bits.Reverse16(uint16(next[n])) >> (16 - n))
		next[n]++
		e := kind(s)
		if n <= size {
			e += uint32(n)<<codeShift | uint32(n)
			for i := code; i < 1<<size; i += 1 << n {
				t[i] = e
			}
			continue
		}
		prefix := code & (1<<size - 1)
		if links[prefix] == 0 {
			links[prefix] = uint16(end)
			t[prefix] = end<<valueShift | isSpecial | isLink | uint32(size)<<codeShift | uint32(size)
			end += 1 << (maxCode - size)
		}
		e += uint32(n-size)<<codeShift | uint32(n-size)
		for i := code >> size; i < 1<<(maxCode-size); i += 1 << (n - size) {
			t[uint(links[prefix])+i] = e
		}
	}
}

// fixedTables returns the tables of blocks that bring none.
var fixedTables = sync.OnceValues(func() (lit, dist *table) {
	var lengths [288]uint8
	for s := range lengths {
		switch {
		case s < 144, s >= 280:
			lengths[s] = 8
		case s < 256:
			lengths[s] = 9
		default:
			lengths[s] = 7
		}
	}
	lit, dist = new(table), new(table)
	lit.build(lengths[:], litBits, literal) // a complete code
	for s := range 32 {
		lengths[s] = 5
	}
	dist.build(lengths[:32], distBits, distance) // another
	return lit, dist
})

// lengthOrder is the order in which a block has the lengths of the codes of code
// lengths.
var lengthOrder = [lengthCodes]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}

const (
	maxLengthCode = 7 // bits of a code of code lengths

	repeatLast   = 16
	repeatZero   = 17
	repeatZeroes = 18
)

// dynamicHeader reads the codes that a block brings.
func (r *Reader) dynamicHeader() error {
	if err := r.need(14); err != nil {
		return err
	}
	nlit, ndist, n := 257+r.take(5), 1+r.take(5), 4+r.take(4)
	if nlit > maxLit || ndist > maxDist {
		return ErrCorrupt
	}
	var lengths [lengthCodes]uint8
	for _, s := range lengthOrder[:n] {
		if err := r.need(3); err != nil {
			return err
		}
		lengths[s] = uint8(r.take(3))
	}
	codes := &r.own[0] // until the lengths are read
	if !codes.build(lengths[:], maxLengthCode, codeLength) {
		return ErrCorrupt
	}
	if err := r.readLengths(codes, r.lengths[:nlit+ndist]); err != nil {
		return err
	}
	r.lit, r.dist = &r.own[0], &r.own[1]
	if !r.lit.build(r.lengths[:nlit], litBits, literal) || !r.dist.build(r.lengths[nlit:nlit+ndist], distBits, distance) {
		return ErrCorrupt
	}
	r.state = symbols
	return nil
}

// readLengths reads the code lengths of a block.
func (r *Reader) readLengths(codes *table, lengths []uint8) error {
	for i := 0; i < len(lengths); {
		e, err := r.symbol(codes, maxLengthCode, 0)
		if err != nil {
			return err
		}
		s := uint8(e >> valueShift)
		if s < repeatLast {
			lengths[i] = s
			i++
			continue
		}
		if err := r.need(7); err != nil && r.have < repeatBits[s-repeatLast] {
			return err
		}
		n := repeatLeast[s-repeatLast] + r.take(repeatBits[s-repeatLast])
		value := uint8(0)
		if s == repeatLast {
			if i == 0 {
				return ErrCorrupt
			}
			value = lengths[i-1]
		}
		if i+n > len(lengths) {
			return ErrCorrupt
		}
		for range n {
			lengths[i] = value
			i++
		}
	}
	return nil
}

// repeatBits and repeatLeast are of the symbols repeatLast to repeatZeroes.
var (
	repeatBits  = [3]uint{2, 3, 7}
	repeatLeast = [3]int{3, 3, 11}
)
