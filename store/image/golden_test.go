package image_test

import (
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/store/chunk"
	"quarry/store/image"
)

var update = flag.Bool("update", false, "write the golden files anew")

// A difference here is a change of a format: it needs a new version and a line
// in FORMAT.md.
func TestGolden(t *testing.T) {
	name := exampleName()
	expires := name.Issued.AddDate(0, 0, 30)
	name.Expires = &expires
	failure, err := image.EncodeFailure(aFailure())
	if err != nil {
		t.Fatal(err)
	}
	for file, got := range map[string]string{
		"image_statement.golden": string(encodeStatement(t, exampleStatement())),
		"name_statement.golden":  string(encodeName(t, name)),
		"layer.golden":           annotate(t, encodeLayer(t, exampleRecord())),
		"failure.golden":         string(failure),
	} {
		path := filepath.Join("testdata", file)
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s differs; got:\n%s", file, got)
		}
	}
}

// annotator writes a layer record as lines of offset, bytes and meaning. It
// reads the format by FORMAT.md and shares no code with the decoder.
type annotator struct {
	t   testing.TB
	b   []byte
	off int
	out strings.Builder
}

func (a *annotator) take(n int, format string, args ...any) []byte {
	a.t.Helper()
	if a.off+n > len(a.b) {
		a.t.Fatalf("%d bytes wanted at %d of %d", n, a.off, len(a.b))
	}
	p := a.b[a.off : a.off+n]
	for i := 0; i < n || i == 0; i += 16 {
		meaning := ""
		if i == 0 {
			meaning = fmt.Sprintf(format, args...)
		}
		line := fmt.Sprintf("%06d  %-32x  %s", a.off+i, p[i:min(i+16, n)], meaning)
		a.out.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	a.off += n
	return p
}

func (a *annotator) number(name string) int {
	v, n := binary.Uvarint(a.b[a.off:])
	a.take(n, "%s %d", name, v)
	return int(v)
}

func (a *annotator) text(name string) {
	n := a.number(name + " length")
	if n > 0 {
		a.take(n, "%s %q", name, a.b[a.off:a.off+n])
	}
}

func (a *annotator) entry(chunkSize int64) {
	kind := a.take(1, "entry of type %q", a.b[a.off])[0]
	a.number("name shares")
	a.text("rest of name")
	a.number("mode")
	a.number("uid")
	a.number("gid")
	mtime, n := binary.Varint(a.b[a.off:])
	a.take(n, "mtime %d", mtime)
	a.number("mtime nanoseconds")
	for range a.number("xattrs") {
		a.text("xattr name")
		a.text("xattr value")
	}
	switch kind {
	case image.TypeReg:
		for k := range chunk.Count(int64(a.number("size")), chunkSize) {
			a.take(32, "chunk %d", k)
		}
	case image.TypeLink, image.TypeSymlink:
		a.text("link")
	case image.TypeChar, image.TypeBlock:
		a.number("major")
		a.number("minor")
	}
}

func annotate(t testing.TB, b []byte) string {
	t.Helper()
	a := &annotator{t: t, b: b}
	a.take(8, "magic %q", b[:8])
	a.take(4, "version %d", binary.LittleEndian.Uint32(b[8:]))
	chunkSize := int64(binary.LittleEndian.Uint32(b[12:]))
	a.take(4, "chunk size %d", chunkSize)
	a.take(32, "layer digest")
	a.take(32, "diffID")
	a.take(8, "size %d", binary.LittleEndian.Uint64(b[80:]))
	a.take(8, "plain size %d", binary.LittleEndian.Uint64(b[88:]))
	for range a.number("entries") {
		a.entry(chunkSize)
	}
	a.take(32, "HMAC-SHA256 of all before")
	if a.off != len(b) {
		t.Fatalf("%d bytes after the MAC", len(b)-a.off)
	}
	return a.out.String()
}
