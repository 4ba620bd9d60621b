package pack_test

import (
	"bytes"
	"testing"

	"quarry/store/chunk"
	"quarry/store/pack"
)

// FuzzPack reads arbitrary bytes as a pack. What footer and records agree on is
// a pack whose bytes are exactly those that writing the same chunks gives.
func FuzzPack(f *testing.F) {
	b, _ := build(f, samples()...)
	f.Add(b)
	one, _ := build(f, []byte("x"))
	f.Add(one)
	f.Add(b[:len(b)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		r, size := bytes.NewReader(b), int64(len(b))
		footer, err := pack.ReadFooter(r, size)
		if err != nil && !isFormatError(err) {
			t.Fatalf("footer: %v", err)
		}
		records, scanErr := pack.ScanRecords(r, size)
		if scanErr != nil && !isFormatError(scanErr) {
			t.Fatalf("records: %v", scanErr)
		}
		for _, e := range append(footer, records...) {
			if e.Off < pack.HeaderSize+pack.RecordHeaderSize || e.Off+int64(e.Stored) > size || e.Len > chunk.MaxSize {
				t.Fatalf("entry %+v of a pack of %d bytes", e, size)
			}
		}
		if err != nil || scanErr != nil || len(footer) != len(records) || size < pack.HeaderSize || pack.CheckHeader(b[:pack.HeaderSize]) != nil {
			return
		}
		var again bytes.Buffer
		w := pack.NewWriter(&again)
		for i, e := range footer {
			stored := b[e.Off:][:e.Stored]
			if e != records[i] || pack.Checksum(stored) != e.CRC {
				return // damaged stored bytes, found by their checksum
			}
			if _, err := w.Add(e.Digest, e.Codec, e.Len, stored); err != nil {
				t.Fatalf("add an entry that was accepted: %v", err)
			}
		}
		if _, _, err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(again.Bytes(), b) {
			t.Fatal("accepted bytes are not those a Writer writes")
		}
	})
}

// FuzzDecode decodes arbitrary stored bytes: no panic, and exactly the length
// asked for.
func FuzzDecode(f *testing.F) {
	for _, p := range samples() {
		c, stored := pack.Compress(nil, p)
		f.Add(byte(c), stored, uint32(len(p)))
	}
	f.Add(byte(pack.Zstd), repeated(1000, 400, 600), uint32(1000))
	f.Add(byte(pack.Zstd), repeated(1000, 400, 700), uint32(1000))
	f.Add(byte(pack.Zstd), largeWindow(1000), uint32(1000))
	f.Fuzz(func(t *testing.T, c byte, stored []byte, plainLen uint32) {
		p, err := pack.Decode(nil, pack.Codec(c), stored, plainLen)
		if err != nil && p != nil {
			t.Fatalf("%d bytes came with %v", len(p), err)
		}
		if err == nil && (len(p) != int(plainLen) || len(p) > chunk.MaxSize) {
			t.Fatalf("%d bytes, want %d", len(p), plainLen)
		}
	})
}

// FuzzCompress is the round trip.
func FuzzCompress(f *testing.F) {
	for _, p := range samples() {
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) == 0 || len(p) > chunk.MaxSize {
			return
		}
		c, stored := pack.Compress(nil, p)
		got, err := pack.Decode(nil, c, stored, uint32(len(p)))
		if err != nil || !bytes.Equal(got, p) {
			t.Fatalf("%d bytes, error %v, want %d", len(got), err, len(p))
		}
	})
}
