// Package chunk names and splits file content: a chunk is the bytes
// [k·S, (k+1)·S) of one regular file, named by the SHA-256 of its plain bytes.
// It is the bottom of the import graph, so every layer above agrees on one
// identity for content.
package chunk

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

const (
	// DefaultSize is the chunk size S of a new store, in bytes.
	DefaultSize = 256 << 10
	// MinSize and MaxSize bound S; both ends come from RAFS v6: a chunk is a
	// power of two of at least one 4 KiB block, and a raw chunk of 16 MiB no
	// longer fits a chunk-info record, so 8 MiB is the largest safe power.
	MinSize = 4 << 10
	MaxSize = 8 << 20
)

// Digest is the SHA-256 of content.
type Digest [sha256.Size]byte

// Sum returns the digest of p.
func Sum(p []byte) Digest { return sha256.Sum256(p) }

// Parse reads a digest in the text form "sha256:<64 lower-case hex digits>".
func Parse(s string) (Digest, error) {
	hexDigits, ok := strings.CutPrefix(s, "sha256:")
	if !ok {
		return Digest{}, fmt.Errorf("digest %q: want sha256:<64 hex digits>", s)
	}
	return ParseHex(hexDigits)
}

// ParseHex reads the 64 lower-case hex digits of a digest.
func ParseHex(s string) (Digest, error) {
	var d Digest
	if len(s) != 2*len(d) || s != strings.ToLower(s) {
		return Digest{}, fmt.Errorf("digest %q: want 64 lower-case hex digits", s)
	}
	if _, err := hex.Decode(d[:], []byte(s)); err != nil {
		return Digest{}, fmt.Errorf("digest %q: %w", s, err)
	}
	return d, nil
}

// String returns the text form "sha256:<hex>".
func (d Digest) String() string { return "sha256:" + d.Hex() }

// Hex returns the 64 hex digits alone, as object keys use them.
func (d Digest) Hex() string { return hex.EncodeToString(d[:]) }

// IsZero reports whether d is the zero value, which names no content.
func (d Digest) IsZero() bool { return d == Digest{} }

// MarshalText implements encoding.TextMarshaler with the text form.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler, strictly.
func (d *Digest) UnmarshalText(p []byte) error {
	v, err := Parse(string(p))
	if err != nil {
		return err
	}
	*d = v
	return nil
}

// ValidSize reports whether size can be a store's chunk size.
func ValidSize(size int64) bool {
	return size >= MinSize && size <= MaxSize && size&(size-1) == 0
}

// Count returns how many chunks a file of the given length has; any length can
// be asked about.
func Count(fileSize, chunkSize int64) int64 {
	if fileSize <= 0 {
		return 0
	}
	return (fileSize-1)/chunkSize + 1
}

// Len returns the length of chunk k of a file: chunkSize, or less for the last.
func Len(k, fileSize, chunkSize int64) int64 {
	return min(chunkSize, fileSize-k*chunkSize)
}
