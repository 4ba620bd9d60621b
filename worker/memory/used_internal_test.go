package memory

import "testing"

func TestMappingsOfAFileAreFound(t *testing.T) {
	const file = "00:01 1045"
	for line, ok := range map[string]bool{
		"7f00-8f00 rw-s 00010000 00:01 1045 /memfd:runsc-memory (deleted)": true,
		"7f00-8f00 rw-s 00010000 00:01 1045":                               true,
		"7f00-8f00 rw-s 00010000 00:01 10450 /memfd:x":                     false,
		"7f00-8f00 rw-s 00010000 00:02 1045 /memfd:x":                      false,
		"7f00-7f00 rw-s 00010000 00:01 1045 /memfd:x":                      false,
		"7f00 rw-s 00010000 00:01 1045 /memfd:x":                           false,
		"xx-8f00 rw-s 00010000 00:01 1045 /memfd:x":                        false,
		"7f00-8f00 rw-s": false,
		"":               false,
	} {
		start, end, off, got := parseMapping(line, file)
		if got != ok || ok && (start != 0x7f00 || end != 0x8f00 || off != 0x10000) {
			t.Errorf("%q: got %x %x %x %v", line, start, end, off, got)
		}
	}
}
