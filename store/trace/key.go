package trace

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"quarry/store/chunk"
	"quarry/store/image"
)

// Prefix starts the keys of all records.
const Prefix = "traces/"

// Key says which image a record is of and when it came. Keys of one image sort by
// that time.
type Key struct {
	Image    chunk.Digest
	Source   chunk.Digest
	Platform image.Platform
	Time     time.Time // to the nanosecond, from 1970 on
	Sum      uint32    // of the record, so that two of one moment have two keys
}

// KeyOf returns the key of an encoded record that came at that time.
func KeyOf(r Record, encoded []byte, at time.Time) Key {
	d := chunk.Sum(encoded)
	return Key{
		Image: r.Image, Source: r.Source, Platform: r.Platform, Time: time.Unix(0, at.UnixNano()).UTC(),
		Sum: uint32(d[0])<<24 | uint32(d[1])<<16 | uint32(d[2])<<8 | uint32(d[3]),
	}
}

// String returns the key in the bucket:
// traces/<source>/<platform>/<image id>/<nanoseconds, 16 hex digits>-<8 hex digits>.
func (k Key) String() string {
	return fmt.Sprintf("%s%s/%s/%s/%016x-%08x", Prefix, k.Source.Hex(), k.Platform.Key(), k.Image.Hex(), uint64(k.Time.UnixNano()), k.Sum)
}

// ParseKey is the inverse of String.
func ParseKey(s string) (Key, bool) {
	parts := strings.Split(strings.TrimPrefix(s, Prefix), "/")
	if len(parts) != 4 {
		return Key{}, false
	}
	at, sum, _ := strings.Cut(parts[3], "-")
	source, err1 := chunk.ParseHex(parts[0])
	p, err2 := image.ParsePlatform(strings.ReplaceAll(parts[1], "-", "/"))
	id, err3 := chunk.ParseHex(parts[2])
	ns, err4 := strconv.ParseInt(at, 16, 64)
	n, err5 := strconv.ParseUint(sum, 16, 32)
	for _, err := range []error{err1, err2, err3, err4, err5} {
		if err != nil {
			return Key{}, false
		}
	}
	k := Key{Image: id, Source: source, Platform: p, Time: time.Unix(0, ns).UTC(), Sum: uint32(n)}
	return k, k.String() == s
}
