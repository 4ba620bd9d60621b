package rafs

import (
	"errors"
	"fmt"
	"strings"
)

const (
	xattrHeader = 12 // name filter, shared count and padding, all zero here
	xattrEntry  = 4  // suffix length, prefix index, value length
)

// xattrPrefixes are the name prefixes that have an index in EROFS. The kernel
// looks a name up by index and suffix, so no other name can be stored.
var xattrPrefixes = [...]struct {
	prefix string
	index  byte
	whole  bool // the prefix is the whole name
}{
	{"user.", 1, false},
	{"system.posix_acl_access", 2, true},
	{"system.posix_acl_default", 3, true},
	{"trusted.", 4, false},
	{"security.", 6, false},
}

// CanStoreXattr reports whether the format has a place for an xattr's name.
// Encode fails on the others; whoever builds a tree decides what to do with them.
func CanStoreXattr(name string) bool {
	_, _, ok := splitXattr(name)
	return ok && len(name) <= MaxXattrName && strings.IndexByte(name, 0) < 0
}

func splitXattr(name string) (index byte, suffix string, ok bool) {
	for _, p := range xattrPrefixes {
		suffix, found := strings.CutPrefix(name, p.prefix)
		if found && p.whole == (suffix == "") {
			return p.index, suffix, true
		}
	}
	return 0, "", false
}

func joinXattr(index byte, suffix string) (name string, ok bool) {
	for _, p := range xattrPrefixes {
		if p.index == index {
			return p.prefix + suffix, p.whole == (suffix == "")
		}
	}
	return "", false
}

func checkXattrs(xs []Xattr) error {
	names, size := 0, int64(xattrHeader)
	for i, x := range xs {
		if !CanStoreXattr(x.Name) {
			return fmt.Errorf("xattr %q cannot be stored in RAFS v6, which has names of at most %d bytes in user., trusted. and security. and the two POSIX ACLs",
				shorten(x.Name), MaxXattrName)
		}
		if len(x.Value) > MaxXattrValue {
			return fmt.Errorf("xattr %q has a value of %d bytes, over the limit of %d", x.Name, len(x.Value), MaxXattrValue)
		}
		if i > 0 && xs[i-1].Name >= x.Name {
			return fmt.Errorf("xattr %q does not sort after %q", x.Name, xs[i-1].Name)
		}
		if names += len(x.Name) + 1; names > MaxXattrNames {
			return fmt.Errorf("xattr %q brings the list of xattr names to %d bytes, over the limit of %d", x.Name, names, MaxXattrNames)
		}
		if size += xattrSize(x); size > MaxXattrs {
			return fmt.Errorf("xattr %q brings the xattrs to %d bytes, over the limit of %d", x.Name, size, MaxXattrs)
		}
	}
	return nil
}

// xattrsSize is the length of the xattr area behind an inode.
func xattrsSize(xs []Xattr) int64 {
	if len(xs) == 0 {
		return 0
	}
	size := int64(xattrHeader)
	for _, x := range xs {
		size += xattrSize(x)
	}
	return size
}

func xattrSize(x Xattr) int64 {
	_, suffix, _ := splitXattr(x.Name)
	return align(xattrEntry+int64(len(suffix)+len(x.Value)), 4)
}

// xattrCount is the inode field that says how long the xattr area is.
func xattrCount(size int64) uint16 {
	if size == 0 {
		return 0
	}
	return uint16(1 + (size-xattrHeader)/4)
}

// putXattrs writes the xattr area to b, which is zero.
func putXattrs(b []byte, xs []Xattr) {
	if len(xs) == 0 {
		return
	}
	b = b[xattrHeader:]
	for _, x := range xs {
		index, suffix, _ := splitXattr(x.Name)
		b[0], b[1] = byte(len(suffix)), index
		le.PutUint16(b[2:], uint16(len(x.Value)))
		copy(b[xattrEntry:], suffix)
		copy(b[xattrEntry+len(suffix):], x.Value)
		b = b[xattrSize(x):]
	}
}

// readXattrs reads a whole, non-empty xattr area.
func readXattrs(b []byte) ([]Xattr, error) {
	var xs []Xattr
	for b = b[xattrHeader:]; len(b) > 0; {
		suffixLen, valueLen := int(b[0]), int(le.Uint16(b[2:]))
		size := align(int64(xattrEntry+suffixLen+valueLen), 4)
		if size > int64(len(b)) {
			return nil, errors.New("xattr ends behind the xattr area")
		}
		name, ok := joinXattr(b[1], string(b[xattrEntry:xattrEntry+suffixLen]))
		if !ok {
			return nil, fmt.Errorf("xattr with prefix index %d and a suffix of %d bytes has no name", b[1], suffixLen)
		}
		value := append([]byte(nil), b[xattrEntry+suffixLen:xattrEntry+suffixLen+valueLen]...)
		xs = append(xs, Xattr{Name: name, Value: value})
		b = b[size:]
	}
	return xs, nil
}
