package testimage

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// Mtime is the modification time of every entry that names none.
var Mtime = time.Unix(1_700_000_000, 123_456_789)

// Entry is one tar entry: a header as archive/tar writes it, and its content.
type Entry struct {
	tar.Header
	Body string
}

// File is a regular file with mode 0644.
func File(name, body string) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, body}
}

// Dir is a directory with mode 0755.
func Dir(name string) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimSuffix(name, "/") + "/", Mode: 0o755}, ""}
}

// Symlink is a symbolic link to target.
func Symlink(name, target string) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}, ""}
}

// Hardlink is a second name of the earlier entry target.
func Hardlink(name, target string) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644}, ""}
}

// Device is a character ('3') or block ('4') device.
func Device(name string, typeflag byte, major, minor int64) Entry {
	return Entry{tar.Header{Typeflag: typeflag, Name: name, Mode: 0o600, Devmajor: major, Devminor: minor}, ""}
}

// WithMode returns e with another mode.
func (e Entry) WithMode(mode int64) Entry {
	e.Mode = mode
	return e
}

// WithMtime returns e with another modification time.
func (e Entry) WithMtime(t time.Time) Entry {
	e.ModTime = t
	return e
}

// WithXattr returns e with one extended attribute more.
func (e Entry) WithXattr(name, value string) Entry {
	records := map[string]string{"SCHILY.xattr." + name: value}
	for k, v := range e.PAXRecords {
		records[k] = v
	}
	e.PAXRecords = records
	return e
}

// Tar writes entries as a tar archive in the PAX format, with its end marker.
func Tar(t testing.TB, entries ...Entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		if h.ModTime.IsZero() && h.Typeflag != tar.TypeXGlobalHeader {
			h.ModTime = Mtime
		}
		if h.Format == tar.FormatUnknown {
			h.Format = tar.FormatPAX
		}
		if h.Size == 0 {
			h.Size = int64(len(e.Body))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatalf("tar entry %q: %v", h.Name, err)
		}
		if _, err := w.Write([]byte(e.Body)); err != nil {
			t.Fatalf("tar entry %q: %v", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Gzip compresses p as one gzip member.
func Gzip(t testing.TB, p []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(p); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// encoder is made once: a new one costs megabytes.
var encoder = sync.OnceValues(func() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
})

// Zstd compresses p as one zstd frame.
func Zstd(t testing.TB, p []byte) []byte {
	t.Helper()
	w, err := encoder()
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(p, nil)
}
