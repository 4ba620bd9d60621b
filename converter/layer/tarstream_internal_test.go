package layer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// small bounds the files that are compared, in bytes.
const small = 1 << 20

// theirs lists what archive/tar makes of an archive, a line an entry, and
// whether it came to the end.
func theirs(p []byte) (lines []string, ended bool) {
	tr := tar.NewReader(bytes.NewReader(p))
	for {
		h, err := tr.Next()
		if err != nil {
			return lines, errors.Is(err, io.EOF)
		}
		if _, ours := entryTypes[h.Typeflag]; !ours && h.Typeflag != tar.TypeXGlobalHeader || h.Size > small {
			return append(lines, "stop"), true
		}
		var body []byte
		if entryTypes[h.Typeflag] == entryTypes[tar.TypeReg] {
			if body, err = io.ReadAll(tr); err != nil || int64(len(body)) != h.Size {
				return lines, false
			}
		}
		lines = append(lines, line(h, body))
	}
}

func line(h *tar.Header, body []byte) string {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return "global" // what a damaged one is called depends on the order of a map
	}
	return fmt.Sprintf("%q %c %d %q %q", h.Name, h.Typeflag, h.Size, h.Linkname, body)
}

// ours does the same with a tarStream.
func ours(p []byte) (lines []string, err error) {
	s := newTarStream(bytes.NewReader(p), Limits{}.withDefaults())
	for {
		h, data, err := s.next()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return lines, err
		}
		if _, ok := entryTypes[h.Typeflag]; !ok && h.Typeflag != tar.TypeXGlobalHeader || h.Size > small {
			return append(lines, "stop"), nil
		}
		var body []byte
		if entryTypes[h.Typeflag] == entryTypes[tar.TypeReg] {
			body = make([]byte, h.Size)
			c := content{r: s, data: data}
			// In pieces that hit holes and extents in every way.
			for rest := body; len(rest) > 0; {
				n := min(len(rest), 512)
				if !c.hole(int64(n)) {
					if err := c.read(rest[:n]); err != nil {
						return lines, err
					}
				}
				rest = rest[n:]
			}
		}
		lines = append(lines, line(h, body))
	}
}

func addFixtures(f *testing.F, pattern string) {
	f.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		f.Fatalf("no fixtures %s: %v", pattern, err)
	}
	for _, name := range files {
		p, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		if len(p) < small {
			f.Add(p)
		}
	}
}

// A tarStream sees what archive/tar sees, which docker and containerd read
// layers with: the same entries with the same content, or an error at the same
// place. Only records without their entry are an error more.
func FuzzTarStream(f *testing.F) {
	if dir := os.Getenv("QUARRY_FIXTURES"); dir != "" {
		addFixtures(f, filepath.Join(dir, "layers/*.tar"))
		addFixtures(f, filepath.Join(dir, "layers/go/*.tar"))
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{{Typeflag: tar.TypeReg, Name: "f", Size: 700, Format: tar.FormatPAX}, {Typeflag: tar.TypeReg, Name: "g", Format: tar.FormatGNU}} {
		if err := w.WriteHeader(&h); err != nil {
			f.Fatal(err)
		}
		w.Write(make([]byte, h.Size))
	}
	w.Close()
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, p []byte) {
		want, ended := theirs(p)
		got, err := ours(p)
		if errors.Is(err, errNoEntry) && ended {
			err = nil
		}
		if n := len(want) - 1; n >= 0 && want[n] == "stop" && err != nil {
			want, err = want[:n], nil // of a file that is not compared, the map is wrong
		}
		if fmt.Sprint(got) != fmt.Sprint(want) || ended != (err == nil) {
			t.Errorf("ours: %q, error %v\ntheirs: %q, ended %v", got, err, want, ended)
		}
	})
}
