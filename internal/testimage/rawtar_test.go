package testimage_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"strings"
	"testing"
	"time"

	"quarry/internal/testimage"
)

// What RawTar writes must be read as it was meant, or a test of odd archives
// shows nothing.
func TestRawTarIsReadAsItStands(t *testing.T) {
	long := strings.Repeat("n", 300)
	entries := []testimage.Entry{
		testimage.File("f", "body").WithMtime(time.Unix(5, 1)).WithXattr("user."+strings.Repeat("k", 250), "w").WithXattr("trusted.t", ""),
		testimage.File(long, strings.Repeat("x", 512)).WithMtime(time.Unix(-2, 500_000_000)).WithMode(0o100644),
		testimage.Symlink("s", long).WithMtime(time.Unix(-1, 999_999_999)),
		testimage.Device("d", tar.TypeBlock, 4096, 1<<20).WithMtime(time.Unix(1<<33, 0)),
		{Header: tar.Header{Name: "", Typeflag: 'Z', Uid: 1<<32 - 1, ModTime: time.Unix(-7, 0)}},
	}
	var b bytes.Buffer
	for _, e := range entries {
		b.Write(testimage.RawTar(e))
	}
	b.Write(testimage.EndMarker)
	r := tar.NewReader(&b)
	for _, e := range entries {
		h, err := r.Next()
		if err != nil {
			t.Fatalf("%q: %v", e.Name, err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Name != e.Name || h.Linkname != e.Linkname || h.Typeflag != e.Typeflag || h.Mode != e.Mode || h.Uid != e.Uid ||
			h.Devmajor != e.Devmajor || h.Devminor != e.Devminor || !h.ModTime.Equal(e.ModTime) || string(body) != e.Body {
			t.Errorf("read %+v with %q, want %+v", h, body, e)
		}
		maps.DeleteFunc(h.PAXRecords, func(k, _ string) bool { return !strings.HasPrefix(k, "SCHILY") })
		if !maps.Equal(h.PAXRecords, e.PAXRecords) {
			t.Errorf("records %q, want %q", h.PAXRecords, e.PAXRecords)
		}
	}
	if _, err := r.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last entry: %v", err)
	}
}
