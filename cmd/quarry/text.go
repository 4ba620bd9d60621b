package main

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// printable makes text that may be of an image, a registry or a store fit for a
// terminal, to which control characters are commands: they and others that are not
// printable are escaped as in a Go string, and so is what is not UTF-8. Line breaks and tabs stay.
func printable(s string) string { return escape(s, "\n\t") }

// oneLine is printable for what must not begin a new line.
func oneLine(s string) string { return escape(s, "") }

func escape(s, keep string) string {
	if strings.IndexFunc(s, isUnprintable) < 0 && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case isUnprintable(r) && !strings.ContainsRune(keep, r):
			q := fmt.Sprintf("%+q", r)
			b.WriteString(q[1 : len(q)-1])
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// isUnprintable reports whether r moves, hides or reorders what a terminal shows:
// controls, and all that Go escapes, such as marks of direction, spaces of no
// width, and separators of lines.
func isUnprintable(r rune) bool { return !strconv.IsPrint(r) }

// printableJSON escapes in a JSON document what encoding/json leaves, which stands
// in strings only but for the document's line breaks. The document stays the same.
func printableJSON(doc []byte) []byte {
	var b strings.Builder
	for _, r := range string(doc) {
		if r == '\n' || !isUnprintable(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return []byte(b.String())
}
