package image_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

var macKey = bytes.Repeat([]byte{0x5a}, image.MACKeySize)

func digest(s string) chunk.Digest { return chunk.Sum([]byte(s)) }

// exampleRecord has one entry of every type and the ends of every range.
func exampleRecord() *image.LayerRecord {
	return &image.LayerRecord{
		ChunkSize: 4096,
		Layer:     digest("layer"),
		DiffID:    digest("diffID"),
		Size:      1000,
		PlainSize: 20480,
		Entries: []image.Entry{
			{Name: "", Type: image.TypeDir, Mode: 0o755, Mtime: 1234567890},
			{Name: "bin", Type: image.TypeSymlink, Mode: 0o777, Link: "usr/bin"},
			{Name: "dev/null", Type: image.TypeChar, Mode: 0o666, Major: 1, Minor: 3},
			{Name: "dev/sda", Type: image.TypeBlock, Mode: 0o660, GID: 6, Major: math.MaxUint32, Minor: math.MaxUint32},
			{Name: "run/fifo", Type: image.TypeFIFO, Mode: 0o7777, UID: math.MaxUint32, GID: math.MaxUint32},
			{Name: "usr/bin/a", Type: image.TypeReg, Mode: 0o4755, Mtime: math.MinInt64, MtimeNsec: 999_999_999, Size: 4097,
				Chunks: []chunk.Digest{digest("one"), digest("two")},
				Xattrs: []rafs.Xattr{{Name: "user.b", Value: []byte{0, 1}}, {Name: "user.a"}}},
			{Name: "usr/bin/b", Type: image.TypeLink, Mode: 0o755, Link: "usr/bin/a"},
			{Name: "usr/bin/.wh.c", Type: image.TypeReg, Mtime: math.MaxInt64},
			{Name: "caf\xe9\n", Type: image.TypeReg, Mode: 0o644, Size: 4096, Chunks: []chunk.Digest{digest("one")}},
		},
	}
}

func encodeLayer(t testing.TB, rec *image.LayerRecord) []byte {
	t.Helper()
	b, err := image.EncodeLayer(rec, macKey)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLayerRecordRoundTrip(t *testing.T) {
	for name, rec := range map[string]*image.LayerRecord{
		"every type":  exampleRecord(),
		"no entries":  {ChunkSize: chunk.DefaultSize, Layer: digest("l"), DiffID: digest("d")},
		"large layer": manyEntries(100),
	} {
		t.Run(name, func(t *testing.T) {
			b := encodeLayer(t, rec)
			got, err := image.DecodeLayer(b, macKey)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(rec, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("decoded differs (-want +got):\n%s", diff)
			}
			if again := encodeLayer(t, got); !bytes.Equal(again, b) {
				t.Error("encoded again it has other bytes")
			}
		})
	}
}

func TestEveryBitFlipOfALayerRecordIsRefused(t *testing.T) {
	good := encodeLayer(t, exampleRecord())
	for bit := range len(good) * 8 {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		rec, err := image.DecodeLayer(b, macKey)
		if err == nil || rec != nil {
			t.Fatalf("accepted with bit %d flipped", bit)
		}
		if bit >= 12*8 && !errors.Is(err, image.ErrBadMAC) {
			t.Fatalf("bit %d flipped: %v, want ErrBadMAC", bit, err)
		}
	}
	for n := range len(good) {
		if _, err := image.DecodeLayer(good[:n], macKey); err == nil {
			t.Fatalf("accepted cut to %d bytes", n)
		}
	}
}

func TestDecodeLayerRefuses(t *testing.T) {
	good := encodeLayer(t, exampleRecord())
	other := bytes.Repeat([]byte{1}, image.MACKeySize)
	if _, err := image.DecodeLayer(good, other); !errors.Is(err, image.ErrBadMAC) {
		t.Errorf("another key: %v, want ErrBadMAC", err)
	}
	if _, err := image.DecodeLayer(good, macKey[1:]); err == nil || !strings.Contains(err.Error(), "at least 32") {
		t.Errorf("a short key: %v", err)
	}
	for _, version := range []byte{0, 1, 3} {
		other := bytes.Clone(good)
		other[8] = version
		if _, err := image.DecodeLayer(other, macKey); !errors.Is(err, image.ErrVersion) || !strings.Contains(err.Error(), fmt.Sprintf("version %d", version)) {
			t.Errorf("version %d: %v, want ErrVersion", version, err)
		}
	}
	if _, err := image.DecodeLayer(append(bytes.Clone(good), 0), macKey); !errors.Is(err, image.ErrBadMAC) {
		t.Errorf("a trailing byte: %v, want ErrBadMAC", err)
	}
	if _, err := image.DecodeLayer(make([]byte, image.MaxLayerRecord+1), macKey); !errors.Is(err, image.ErrMalformed) {
		t.Errorf("too large: %v, want ErrMalformed", err)
	}
}

// A record that is authentic and yet malformed is one that a faulty quarry
// made: the decoder must not depend on the MAC for its bounds.
func TestAuthenticMalformedRecordsAreRefused(t *testing.T) {
	header := encodeLayer(t, &image.LayerRecord{ChunkSize: 4096, Layer: digest("l"), DiffID: digest("d")})
	header = header[:96]
	uvarint := func(v uint64) string { return string(binary.AppendUvarint(nil, v)) }
	for name, body := range map[string]string{
		"a count without entries":          uvarint(1),
		"a huge count":                     uvarint(1 << 62),
		"a number longer than needed":      "\x80\x00",
		"a byte after the last entry":      "\x00\x00",
		"an unknown type":                  "\x019\x00\x01a\x00\x00\x00\x00\x00\x00",
		"a prefix of no name":              "\x015\x01\x01a\x00\x00\x00\x00\x00\x00",
		"a name longer than the record":    "\x015\x00\x7fa\x00\x00\x00\x00\x00\x00",
		"a mode of 13 bits":                "\x015\x00\x01a" + uvarint(1<<12) + "\x00\x00\x00\x00\x00",
		"a uid of 33 bits":                 "\x015\x00\x01a\x00" + uvarint(1<<32) + "\x00\x00\x00\x00",
		"10^9 nanoseconds":                 "\x015\x00\x01a\x00\x00\x00\x00" + uvarint(1e9) + "\x00",
		"more xattrs than bytes":           "\x015\x00\x01a\x00\x00\x00\x00\x00\x7f",
		"more chunks than bytes":           "\x010\x00\x01a\x00\x00\x00\x00\x00\x00" + uvarint(1<<59),
		"a file longer than maxFile":       "\x010\x00\x01a\x00\x00\x00\x00\x00\x00" + uvarint(1<<61),
		"a name that shares less than can": "\x025\x00\x01a\x00\x00\x00\x00\x00\x00" + "5\x00\x02ab\x00\x00\x00\x00\x00\x00",
	} {
		b := append(bytes.Clone(header), body...)
		rec, err := image.DecodeLayer(append(b, hmacOf(b)...), macKey)
		if rec != nil || !errors.Is(err, image.ErrMalformed) {
			t.Errorf("%s: %v, want ErrMalformed", name, err)
		}
	}
}

func TestEncodeLayerRefuses(t *testing.T) {
	for name, change := range map[string]func(*image.LayerRecord){
		"chunk size":           func(r *image.LayerRecord) { r.ChunkSize = 5000 },
		"zero layer digest":    func(r *image.LayerRecord) { r.Layer = chunk.Digest{} },
		"zero diffID":          func(r *image.LayerRecord) { r.DiffID = chunk.Digest{} },
		"negative size":        func(r *image.LayerRecord) { r.PlainSize = -1 },
		"unknown type":         func(r *image.LayerRecord) { r.Entries[0].Type = '7' },
		"missing chunk":        func(r *image.LayerRecord) { r.Entries[5].Chunks = r.Entries[5].Chunks[1:] },
		"negative file size":   func(r *image.LayerRecord) { r.Entries[5].Size = -1 },
		"directory with size":  func(r *image.LayerRecord) { r.Entries[0].Size = 1 },
		"directory with link":  func(r *image.LayerRecord) { r.Entries[0].Link = "x" },
		"file with device":     func(r *image.LayerRecord) { r.Entries[5].Minor = 1 },
		"link with chunks":     func(r *image.LayerRecord) { r.Entries[6].Chunks = []chunk.Digest{digest("x")} },
		"mode with type bits":  func(r *image.LayerRecord) { r.Entries[0].Mode = 0o40755 },
		"nanoseconds":          func(r *image.LayerRecord) { r.Entries[0].MtimeNsec = 1e9 },
		"long name":            func(r *image.LayerRecord) { r.Entries[0].Name = strings.Repeat("x", image.MaxText+1) },
		"long xattr":           func(r *image.LayerRecord) { r.Entries[5].Xattrs[0].Value = make([]byte, image.MaxText+1) },
		"more than the record": func(r *image.LayerRecord) { r.Entries = longLinks() },
	} {
		rec := exampleRecord()
		change(rec)
		if b, err := image.EncodeLayer(rec, macKey); b != nil || !errors.Is(err, image.ErrMalformed) {
			t.Errorf("%s: %v, want ErrMalformed", name, err)
		}
	}
	if _, err := image.EncodeLayer(exampleRecord(), nil); err == nil {
		t.Error("encoded without a key")
	}
}

// longLinks returns entries that together are longer than a record may be.
func longLinks() []image.Entry {
	es := make([]image.Entry, image.MaxLayerRecord/image.MaxText+1)
	target := strings.Repeat("x", image.MaxText)
	for i := range es {
		es[i] = image.Entry{Name: "link", Type: image.TypeSymlink, Link: target}
	}
	return es
}

// manyEntries is like a layer of a distribution: n files of up to three chunks
// in folders of thirty.
func manyEntries(n int) *image.LayerRecord {
	rng := rand.New(rand.NewPCG(1, 2))
	rec := &image.LayerRecord{ChunkSize: chunk.DefaultSize, Layer: digest("many"), DiffID: digest("many diff"), Size: 1 << 30, PlainSize: 3 << 30}
	for i := range n {
		e := image.Entry{
			Name:  fmt.Sprintf("usr/lib/python3/dist-packages/package%d/module%d.py", i/30, i),
			Type:  image.TypeReg,
			Mode:  0o644,
			Mtime: 1_700_000_000 + int64(i),
			Size:  rng.Int64N(3 * chunk.DefaultSize),
		}
		for k := range chunk.Count(e.Size, chunk.DefaultSize) {
			e.Chunks = append(e.Chunks, digest(fmt.Sprint(i, k)))
		}
		rec.Entries = append(rec.Entries, e)
	}
	return rec
}

// 12 000 entries are a Debian image with Python; decoding them is on the path
// of every conversion that finds its layers known.
func BenchmarkDecodeLayer12000(b *testing.B) {
	enc := encodeLayer(b, manyEntries(12_000))
	b.SetBytes(int64(len(enc)))
	for b.Loop() {
		if _, err := image.DecodeLayer(enc, macKey); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkEncodeLayer12000(b *testing.B) {
	rec := manyEntries(12_000)
	for b.Loop() {
		encodeLayer(b, rec)
	}
}
