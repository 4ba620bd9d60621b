package layer

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Keys of GNU's sparse files in PAX records. archive/tar makes 0.1's map of
// 0.0's many records.
const (
	sparseMajor = "GNU.sparse.major"
	sparseMinor = "GNU.sparse.minor"
	sparseList  = "GNU.sparse.map"
)

// Fields of a file's header, by their offsets.
const (
	tarSize         = 124
	tarSizeLen      = 12
	tarTypeflag     = 156
	tarSparse       = 386 // four entries of sparseEntry bytes
	tarSparseIsMore = 482 // whether an extension block follows
)

// An entry of an old sparse map is two numbers.
const (
	sparseNumber = 12
	sparseEntry  = 2 * sparseNumber
	sparseInMore = 21 // entries of an extension block
)

// sparsePAX reports whether archive/tar takes the entry for a sparse file. A
// version that it does not know is refused: it would hand out the sparse map as
// the file's content.
func sparsePAX(records map[string]string) (bool, error) {
	major, minor := records[sparseMajor], records[sparseMinor]
	switch major + "." + minor {
	case "0.0", "0.1", "1.0":
		return true, nil
	case ".":
		return records[sparseList] != "", nil
	}
	return false, fmt.Errorf("sparse format %s.%s is not supported", major, minor)
}

// sparseMap returns the extents of a sparse file, whose header archive/tar has
// accepted, from the blocks that it has read. What is left of the entry in the
// archive must be exactly these extents, as archive/tar wants it too: a reader
// that goes by the size would otherwise see another next entry.
func sparseMap(h *tar.Header, blocks []byte) ([]extent, error) {
	header, rest, err := fileHeader(blocks)
	if err != nil {
		return nil, err
	}
	stored, err := tarNumber(header[tarSize : tarSize+tarSizeLen])
	if err != nil {
		return nil, err
	}
	if size := h.PAXRecords["size"]; size != "" {
		if stored, err = strconv.ParseInt(size, 10, 64); err != nil {
			return nil, tar.ErrHeader
		}
	}
	var data []extent
	switch {
	case h.Typeflag == tar.TypeGNUSparse:
		data, err = oldSparseMap(header, rest)
	case h.PAXRecords[sparseMajor] == "1":
		stored -= int64(len(rest))
		data, err = textSparseMap(strings.Split(string(rest), "\n"), true)
	default:
		data, err = textSparseMap(strings.Split(h.PAXRecords[sparseList], ","), false)
	}
	if err != nil {
		return nil, err
	}
	return checkExtents(data, h.Size, stored)
}

// checkExtents drops empty extents and checks order, bounds and sum.
func checkExtents(data []extent, size, stored int64) ([]extent, error) {
	var end, sum int64
	list := data[:0]
	for _, e := range data {
		if e.off < end || e.size < 0 || e.size > size-e.off {
			return nil, fmt.Errorf("sparse map: %d bytes at %d are out of order or beyond the file's %d bytes", e.size, e.off, size)
		}
		if end = e.end(); e.size > 0 {
			sum += e.size
			list = append(list, e)
		}
	}
	if sum != stored {
		return nil, fmt.Errorf("sparse map: it speaks of %d bytes, the entry has %d", sum, stored)
	}
	return list, nil
}

// fileHeader finds the header of the file itself behind those of long names and
// PAX records, and what follows it.
func fileHeader(blocks []byte) (header, rest []byte, err error) {
	for len(blocks) >= tarBlock {
		header, rest = blocks[:tarBlock], blocks[tarBlock:]
		switch header[tarTypeflag] {
		case tar.TypeXHeader, tar.TypeGNULongName, tar.TypeGNULongLink:
			n, err := tarNumber(header[tarSize : tarSize+tarSizeLen])
			if err != nil || n < 0 || n > int64(len(rest)) {
				return nil, nil, tar.ErrHeader
			}
			blocks = rest[min(n+(-n&(tarBlock-1)), int64(len(rest))):]
		default:
			return header, rest, nil
		}
	}
	return nil, nil, tar.ErrHeader
}

// tarNumber reads a number field, octal or base-256.
func tarNumber(b []byte) (int64, error) {
	if b[0]&0x80 != 0 {
		// Bit 6 is the sign; sizes have none, and more than 63 bits are no size.
		for _, c := range b[1 : len(b)-8] {
			if c != 0 {
				return 0, tar.ErrHeader
			}
		}
		n := binary.BigEndian.Uint64(b[len(b)-8:])
		if b[0] != 0x80 || n > math.MaxInt64 {
			return 0, tar.ErrHeader
		}
		return int64(n), nil
	}
	s := strings.Trim(string(b), " \x00")
	if s, _, _ = strings.Cut(s, "\x00"); s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 8, 64)
	if err != nil {
		return 0, tar.ErrHeader
	}
	return n, nil
}

// oldSparseMap reads the map of typeflag S: four entries in the header, 21 in
// each extension block.
func oldSparseMap(header, rest []byte) ([]extent, error) {
	var data []extent
	entries, more := header[tarSparse:tarSparseIsMore], header[tarSparseIsMore]
	for {
		for ; len(entries) >= sparseEntry && entries[0] != 0; entries = entries[sparseEntry:] {
			off, err := tarNumber(entries[:sparseNumber])
			if err != nil {
				return nil, err
			}
			size, err := tarNumber(entries[sparseNumber:sparseEntry])
			if err != nil {
				return nil, err
			}
			data = append(data, extent{off, size})
		}
		if more == 0 {
			return data, nil
		}
		if len(rest) < tarBlock {
			return nil, tar.ErrHeader
		}
		const end = sparseInMore * sparseEntry
		entries, more, rest = rest[:end], rest[end], rest[tarBlock:]
	}
}

// textSparseMap reads pairs of decimal numbers; counted says that their number
// stands before them, and that more may stand after.
func textSparseMap(words []string, counted bool) ([]extent, error) {
	if counted {
		n, err := strconv.ParseInt(words[0], 10, 32)
		if err != nil || n < 0 || 2*n+1 > int64(len(words)) {
			return nil, tar.ErrHeader
		}
		words = words[1 : 2*n+1]
	} else if len(words) == 1 && words[0] == "" {
		return nil, nil
	}
	data := make([]extent, 0, len(words)/2)
	for i := 0; i+1 < len(words); i += 2 {
		off, err1 := strconv.ParseInt(words[i], 10, 64)
		size, err2 := strconv.ParseInt(words[i+1], 10, 64)
		if err1 != nil || err2 != nil {
			return nil, tar.ErrHeader
		}
		data = append(data, extent{off, size})
	}
	return data, nil
}
