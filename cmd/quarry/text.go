package main

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// printable makes text that may be of an image, a registry or a store fit for a
// terminal, to which control characters are commands: they are escaped as in a
// Go string, and so is what is not UTF-8. Line breaks and tabs stay.
func printable(s string) string { return escape(s, "\n\t") }

// oneLine is printable for what must not begin a new line.
func oneLine(s string) string { return escape(s, "") }

func escape(s, keep string) string {
	if strings.IndexFunc(s, isControl) < 0 && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case isControl(r) && !strings.ContainsRune(keep, r):
			q := fmt.Sprintf("%+q", r)
			b.WriteString(q[1 : len(q)-1])
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// isControl reports whether r is of C0, DEL or C1.
func isControl(r rune) bool { return r < 0x20 || r >= 0x7f && r < 0xa0 }

// printableJSON escapes in a JSON document what encoding/json leaves: the
// controls above ASCII, which stand in strings only. The document stays the same.
func printableJSON(doc []byte) []byte {
	var b strings.Builder
	for _, r := range string(doc) {
		if r >= 0x7f && r < 0xa0 {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return []byte(b.String())
}
