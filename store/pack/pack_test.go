package pack_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/chunk"
	"quarry/store/pack"
)

var update = flag.Bool("update", false, "write the golden files anew")

// build makes a pack of plain chunks and returns its bytes and entries.
func build(t testing.TB, plain ...[]byte) ([]byte, []pack.Entry) {
	t.Helper()
	var buf bytes.Buffer
	w := pack.NewWriter(&buf)
	for _, p := range plain {
		c, stored := pack.Compress(nil, p)
		if _, err := w.Add(chunk.Sum(p), c, uint32(len(p)), stored); err != nil {
			t.Fatalf("add: %v", err)
		}
	}
	entries := w.Entries()
	id, size, err := w.Close()
	if err != nil {
		t.Fatalf("close: %v", err)
	}
	if size != int64(buf.Len()) || id != chunk.Sum(buf.Bytes()) {
		t.Fatalf("close returned id %s, size %d of other bytes", id, size)
	}
	return buf.Bytes(), entries
}

func samples() [][]byte {
	return [][]byte{
		[]byte("raw: too short to shrink"),
		bytes.Repeat([]byte("zstd "), 20),
		{0},
	}
}

func TestFooterAndRecordsTellWhatWasAdded(t *testing.T) {
	plain := samples()
	b, want := build(t, plain...)
	footer, err := pack.ReadFooter(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, footer); diff != "" {
		t.Errorf("footer differs:\n%s", diff)
	}
	records, err := pack.ScanRecords(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, records); diff != "" {
		t.Errorf("records differ:\n%s", diff)
	}
	for i, e := range footer {
		stored := b[e.Off:][:e.Stored]
		p, err := pack.Decode(nil, e.Codec, stored, e.Len)
		if err != nil || !bytes.Equal(p, plain[i]) || pack.Checksum(stored) != e.CRC || chunk.Sum(p) != e.Digest {
			t.Errorf("chunk %d: got %q, error %v, want %q", i, p, err, plain[i])
		}
	}
}

func TestFooterLargerThanTheFirstRead(t *testing.T) {
	var plain [][]byte
	for i := range 3000 {
		plain = append(plain, fmt.Appendf(nil, "chunk %d", i))
	}
	b, want := build(t, plain...)
	got, err := pack.ReadFooter(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("footer differs:\n%.500s", diff)
	}
}

func TestSizesOfTheFixedParts(t *testing.T) {
	b, _ := build(t, []byte{7})
	want := pack.HeaderSize + pack.RecordHeaderSize + 1 + 4 + pack.EntrySize + pack.TrailerSize
	if len(b) != want || want != 12+56+1+4+48+20 {
		t.Errorf("a pack of one byte has %d bytes, want %d", len(b), want)
	}
}

func TestKey(t *testing.T) {
	if got, want := pack.Key(chunk.Digest{0xab}), "packs/ab"+strings.Repeat("00", 31); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestGolden pins the bytes of the format: a change of them needs a version.
func TestGolden(t *testing.T) {
	var buf bytes.Buffer
	w := pack.NewWriter(&buf)
	raw, zeros := []byte("raw"), make([]byte, 1000)
	// The frame is written out here, for another release of the compressor may
	// make another one: 1000 bytes in one block that repeats a zero.
	frame := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x60, 0xe8, 0x02, 0x43, 0x1f, 0x00, 0x00}
	for _, c := range []struct {
		codec  pack.Codec
		plain  []byte
		stored []byte
	}{{pack.Raw, raw, raw}, {pack.Zstd, zeros, frame}} {
		if p, err := pack.Decode(nil, c.codec, c.stored, uint32(len(c.plain))); err != nil || !bytes.Equal(p, c.plain) {
			t.Fatalf("decode: %d bytes, %v", len(p), err)
		}
		if _, err := w.Add(chunk.Sum(c.plain), c.codec, uint32(len(c.plain)), c.stored); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got := annotate(t, buf.Bytes())
	path := filepath.Join("testdata", "pack.golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("bytes differ from %s; with a new version, run with -update:\n%s", path, diff)
	}
}

// annotate prints a pack as offset, bytes, meaning.
func annotate(t *testing.T, b []byte) string {
	entries, err := pack.ReadFooter(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	off := 0
	field := func(n int, format string, args ...any) {
		meaning := fmt.Sprintf(format, args...)
		for n > 0 {
			k := min(n, 16)
			fmt.Fprintf(&out, "%04x  %-32x  %s\n", off, b[off:off+k], meaning)
			off, n, meaning = off+k, n-k, "..."
		}
	}
	field(8, "header magic")
	field(4, "version %d", pack.Version)
	for i, e := range entries {
		field(4, "record %d: tag", i)
		field(4, "codec %s, reserved", e.Codec)
		field(4, "stored length %d", e.Stored)
		field(4, "plain length %d", e.Len)
		field(4, "checksum of the stored bytes")
		field(32, "digest")
		field(4, "checksum of the record header")
		field(int(e.Stored), "stored bytes")
	}
	field(4, "footer: tag")
	for i, e := range entries {
		field(32, "entry %d: digest", i)
		field(4, "stored length %d", e.Stored)
		field(4, "plain length %d", e.Len)
		field(4, "checksum of the stored bytes")
		field(4, "codec %s, reserved", e.Codec)
	}
	field(4, "trailer: %d entries", len(entries))
	field(4, "version %d", pack.Version)
	field(4, "checksum of the footer so far")
	field(8, "trailer magic")
	if off != len(b) {
		t.Fatalf("annotated %d of %d bytes", off, len(b))
	}
	return out.String()
}

func TestWriterRefuses(t *testing.T) {
	w := pack.NewWriter(io.Discard)
	if _, _, err := w.Close(); err == nil {
		t.Error("a pack without chunks was closed")
	}
	for name, add := range map[string]func() error{
		"raw of another length":    func() error { _, err := w.Add(chunk.Digest{}, pack.Raw, 2, []byte{1}); return err },
		"zstd not smaller":         func() error { _, err := w.Add(chunk.Digest{}, pack.Zstd, 1, []byte{1}); return err },
		"an unknown codec":         func() error { _, err := w.Add(chunk.Digest{}, 2, 1, []byte{1}); return err },
		"an empty chunk":           func() error { _, err := w.Add(chunk.Digest{}, pack.Raw, 0, nil); return err },
		"a chunk that is too long": func() error { _, err := w.Add(chunk.Digest{}, pack.Zstd, chunk.MaxSize+1, []byte{1}); return err },
	} {
		if add() == nil {
			t.Errorf("%s was added", name)
		}
	}
}

func TestFullPackIsClosedAsItIs(t *testing.T) {
	w := pack.NewWriter(io.Discard)
	big := make([]byte, chunk.MaxSize)
	for {
		_, err := w.Add(chunk.Digest{1}, pack.Raw, chunk.MaxSize, big)
		if errors.Is(err, pack.ErrFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if w.Count() != pack.MaxPack/chunk.MaxSize-1 {
		t.Errorf("%d chunks of %d bytes fit", w.Count(), chunk.MaxSize)
	}
	if _, size, err := w.Close(); err != nil || size > pack.MaxPack {
		t.Errorf("size %d, error %v", size, err)
	}

	w = pack.NewWriter(io.Discard)
	for range pack.MaxCount {
		if _, err := w.Add(chunk.Digest{1}, pack.Raw, 1, big[:1]); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Add(chunk.Digest{1}, pack.Raw, 1, big[:1]); !errors.Is(err, pack.ErrFull) {
		t.Errorf("got %v, want pack.ErrFull", err)
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestErrorsOfTheWriterSurface(t *testing.T) {
	w := pack.NewWriter(brokenWriter{})
	_, addErr := w.Add(chunk.Digest{1}, pack.Raw, 1<<20, make([]byte, 1<<20))
	_, _, closeErr := w.Close()
	if !errors.Is(addErr, io.ErrShortWrite) || !errors.Is(closeErr, io.ErrShortWrite) {
		t.Errorf("add: %v, close: %v", addErr, closeErr)
	}
}

func TestEveryFlippedBitIsFound(t *testing.T) {
	b, entries := build(t, samples()...)
	isStored := make([]bool, len(b))
	for _, e := range entries {
		for i := range e.Stored {
			isStored[e.Off+int64(i)] = true
		}
	}
	last := entries[len(entries)-1]
	footer := int(last.Off) + int(last.Stored)
	for i := range b {
		for bit := range 8 {
			b[i] ^= 1 << bit
			_, footerErr := pack.ReadFooter(bytes.NewReader(b), int64(len(b)))
			if found := isFormatError(footerErr); found != (i >= footer) {
				t.Errorf("byte %d bit %d: footer error %v", i, bit, footerErr)
			}
			records, scanErr := pack.ScanRecords(bytes.NewReader(b), int64(len(b)))
			inRecord := i >= pack.HeaderSize && i < footer+4 && !isStored[i]
			if found := isFormatError(scanErr); found != inRecord {
				t.Errorf("byte %d bit %d: scan error %v", i, bit, scanErr)
			}
			if i >= footer && len(records) != len(entries) {
				t.Errorf("byte %d bit %d: %d records, want all %d", i, bit, len(records), len(entries))
			}
			if i < pack.HeaderSize && pack.CheckHeader(b[:pack.HeaderSize]) == nil {
				t.Errorf("byte %d bit %d: header is fine", i, bit)
			}
			b[i] ^= 1 << bit
		}
	}
}

func isFormatError(err error) bool {
	var format *pack.FormatError
	return errors.As(err, &format)
}

func TestEveryTruncationIsFound(t *testing.T) {
	b, entries := build(t, samples()...)
	for n := range b {
		if _, err := pack.ReadFooter(bytes.NewReader(b[:n]), int64(n)); !isFormatError(err) {
			t.Errorf("%d bytes: footer error %v", n, err)
		}
		got, err := pack.ScanRecords(bytes.NewReader(b[:n]), int64(n))
		whole := 0
		for _, e := range entries {
			if int64(n) >= e.Off+int64(e.Stored) {
				whole++
			}
		}
		if len(got) != whole || err != nil && !isFormatError(err) {
			t.Errorf("%d bytes: %d records, error %v, want %d", n, len(got), err, whole)
		}
	}
}

func TestReadersReportErrorsOfTheBucketAsSuch(t *testing.T) {
	mine := errors.New("bucket is away")
	r := failingReader{mine}
	if _, err := pack.ReadFooter(r, 1000); !errors.Is(err, mine) || isFormatError(err) {
		t.Errorf("footer: %v", err)
	}
	if _, err := pack.ScanRecords(r, 1000); !errors.Is(err, mine) || isFormatError(err) {
		t.Errorf("records: %v", err)
	}
}

type failingReader struct{ err error }

func (r failingReader) ReadAt([]byte, int64) (int, error) { return 0, r.err }
