// Package trace is what is known of which chunks a run of an image touches first:
// the record of one run, the list that several runs agree on, what that list is in
// another image, and the stream that brings a list and its chunks to a worker.
// Whoever reads images may send records, so all of it is a hint: it can make a
// worker fetch too much, within bounds, and never makes a byte right.
package trace

import (
	"encoding/binary"
	"errors"
	"fmt"

	"quarry/store/chunk"
	"quarry/store/image"
)

const (
	// MaxNumbers bounds the chunk numbers of a record and of a list. `pip --version`
	// touches 504 chunks of 49 KiB on average; files a sixth of that reach MaxPlain
	// with 8192 of them, which are 32 KiB as numbers.
	MaxNumbers = 8192
	// MaxPlain bounds the plain bytes of a list's chunks, and of those of one
	// record: two and a half times what `pip --version` touches, and as much as a
	// reader keeps in memory.
	MaxPlain = 64 << 20
	// MaxRecord bounds an encoded record.
	MaxRecord = fixedLen + maxPlatform + 4*MaxNumbers

	// maxPlatform is three parts of 32 bytes with two slashes.
	maxPlatform = 98

	magic    = "QRYTRACE"
	version  = 1
	fixedLen = 8 + 4 + 32 + 32 + 4 + 1 // all before the platform
)

var (
	// ErrMalformed says that bytes are no record or no stream.
	ErrMalformed = errors.New("malformed")
	// ErrVersion says that another version of quarry wrote them.
	ErrVersion = errors.New("unknown version")
)

// Record is which chunks one run of an image touched, in the order of the first
// touch. Numbers are those of the image's chunk table, each at most once.
type Record struct {
	Image    chunk.Digest // image id
	Source   chunk.Digest // source digest, which leads to the image statement
	Platform image.Platform
	Numbers  []uint32
}

// Encode returns the bytes of a record.
func (r Record) Encode() ([]byte, error) {
	p := r.Platform.String()
	if parsed, err := image.ParsePlatform(p); err != nil || parsed != r.Platform {
		return nil, fmt.Errorf("trace record: platform %q is none", p)
	}
	if reason := numbersFault(r.Numbers); reason != "" {
		return nil, fmt.Errorf("trace record: %s", reason)
	}
	b := make([]byte, 0, fixedLen+len(p)+4*len(r.Numbers))
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = append(b, r.Image[:]...)
	b = append(b, r.Source[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.Numbers)))
	b = append(b, byte(len(p)))
	b = append(b, p...)
	return appendNumbers(b, r.Numbers), nil
}

// Decode reads a record. It accepts what Encode writes and nothing else. Errors:
// ErrMalformed, ErrVersion.
func Decode(b []byte) (Record, error) {
	if len(b) < fixedLen || string(b[:8]) != magic {
		return Record{}, malformed("trace record of %d bytes does not begin as one", len(b))
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != version {
		return Record{}, fmt.Errorf("trace record: %w %d, this program reads %d", ErrVersion, v, version)
	}
	r := Record{Image: chunk.Digest(b[12:44]), Source: chunk.Digest(b[44:76])}
	count, size := int64(binary.LittleEndian.Uint32(b[76:])), int(b[80])
	if count > MaxNumbers || int64(len(b)) != fixedLen+int64(size)+4*count {
		return Record{}, malformed("trace record of %d bytes says %d numbers, at most %d, and %d bytes of platform", len(b), count, MaxNumbers, size)
	}
	text := string(b[fixedLen : fixedLen+size])
	p, err := image.ParsePlatform(text)
	if err != nil || p.String() != text {
		return Record{}, malformed("trace record: platform %q is not in its one form", text)
	}
	r.Platform, r.Numbers = p, numbers(b[fixedLen+size:])
	if reason := numbersFault(r.Numbers); reason != "" {
		return Record{}, malformed("trace record: %s", reason)
	}
	return r, nil
}

func malformed(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, ErrMalformed)...)
}

// numbersFault returns why numbers cannot be those of a record or list, or "".
func numbersFault(list []uint32) string {
	if len(list) < 1 || len(list) > MaxNumbers {
		return fmt.Sprintf("%d numbers, want 1 to %d", len(list), MaxNumbers)
	}
	seen := make(map[uint32]struct{}, len(list))
	for _, n := range list {
		if _, again := seen[n]; again {
			return fmt.Sprintf("number %d is there twice", n)
		}
		seen[n] = struct{}{}
	}
	return ""
}

func appendNumbers(b []byte, list []uint32) []byte {
	for _, n := range list {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	return b
}

func numbers(b []byte) []uint32 {
	list := make([]uint32, len(b)/4)
	for i := range list {
		list[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return list
}
