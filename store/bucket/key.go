package bucket

import (
	"fmt"
	"slices"
	"strings"
)

// MaxElement bounds one element of a key: the longest file name of the Linux
// file systems, so that every key an implementation takes, a folder takes too.
const MaxElement = 255

// reserved are the first elements that no key has: implementations keep the
// journal and half-written objects there.
var reserved = []string{"log", "tmp"}

// ValidKey says whether key can name an object. Every implementation refuses
// the same keys with it before it touches its storage.
func ValidKey(key string) error {
	if len(key) > MaxKey {
		return fmt.Errorf("key %.32q… has %d bytes, at most %d are allowed", key, len(key), MaxKey)
	}
	elems := strings.Split(key, "/")
	for _, elem := range elems {
		if err := validElement(elem); err != nil {
			return fmt.Errorf("key %q: %w", key, err)
		}
	}
	if slices.Contains(reserved, elems[0]) {
		return fmt.Errorf("key %q: %q is reserved for the bucket itself", key, elems[0])
	}
	return nil
}

func validElement(elem string) error {
	switch {
	case elem == "":
		return fmt.Errorf("empty element")
	case elem == ".", elem == "..":
		return fmt.Errorf("element %q", elem)
	case len(elem) > MaxElement:
		return fmt.Errorf("element %.32q… has %d bytes, at most %d are allowed", elem, len(elem), MaxElement)
	}
	for i := range len(elem) {
		if !validByte(elem[i]) {
			return fmt.Errorf("byte %q, want only [A-Za-z0-9._+@:=-]", elem[i])
		}
	}
	return nil
}

func validByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		strings.IndexByte("._+@:=-", c) >= 0
}

// ValidEntry says whether entry can be journal entry n, for what is appended
// and for what is read back.
func ValidEntry(n uint64, entry []byte) error {
	switch {
	case n == 0:
		return fmt.Errorf("journal entry 0: numbers start at 1")
	case len(entry) == 0:
		return fmt.Errorf("journal entry %d is empty", n)
	case len(entry) > MaxEntry:
		return fmt.Errorf("journal entry %d is longer than %d bytes", n, MaxEntry)
	}
	return nil
}
