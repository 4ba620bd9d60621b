package chunk_test

import (
	"math"
	"strings"
	"testing"

	"quarry/store/chunk"
)

func TestDigestText(t *testing.T) {
	const text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" // of no bytes
	d, err := chunk.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if d != chunk.Sum(nil) || d.String() != text {
		t.Errorf("got %s, want %s", d, text)
	}
	for name, bad := range map[string]string{
		"no algorithm":      text[len("sha256:"):],
		"another algorithm": "sha512:" + text[len("sha256:"):],
		"upper case":        strings.ToUpper(text),
		"upper-case digits": "sha256:" + strings.ToUpper(text[len("sha256:"):]),
		"too short":         text[:len(text)-1],
		"too long":          text + "0",
		"no hex":            text[:len(text)-1] + "g",
	} {
		if _, err := chunk.Parse(bad); err == nil {
			t.Errorf("%s: Parse(%q) succeeded", name, bad)
		}
	}
}

func TestSplitOfAFile(t *testing.T) {
	const size = 4096
	for _, c := range []struct{ file, count, last int64 }{
		{0, 0, 0}, {1, 1, 1}, {size - 1, 1, size - 1}, {size, 1, size}, {size + 1, 2, 1}, {math.MaxInt64, 1 << 51, size - 1}, {math.MaxInt64 - size + 1, 1<<51 - 1, size}, {1 << 40, 1 << 28, size},
	} {
		if got := chunk.Count(c.file, size); got != c.count {
			t.Errorf("a file of %d bytes has %d chunks, want %d", c.file, got, c.count)
		}
		if c.count == 0 {
			continue
		}
		if got := chunk.Len(c.count-1, c.file, size); got != c.last {
			t.Errorf("the last chunk of %d bytes has %d, want %d", c.file, got, c.last)
		}
		if got := chunk.Len(0, c.file, size); got != min(c.file, size) {
			t.Errorf("the first chunk of %d bytes has %d, want %d", c.file, got, min(c.file, size))
		}
	}
}

func TestValidSize(t *testing.T) {
	for size, want := range map[int64]bool{
		0: false, 4095: false, 4096: true, 6000: false, chunk.DefaultSize: true, chunk.MaxSize: true, 2 * chunk.MaxSize: false, -4096: false,
	} {
		if got := chunk.ValidSize(size); got != want {
			t.Errorf("ValidSize(%d) = %t, want %t", size, got, want)
		}
	}
}
