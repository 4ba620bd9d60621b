package cache

import (
	"bytes"
	"encoding/hex"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/chunk"
)

var update = flag.Bool("update", false, "write the golden files anew")

// sampleSeq is the number of the segment that samples are of.
const sampleSeq = 0x1234

// RawEntry is an entry for tests outside of this package.
type RawEntry struct {
	Digest    chunk.Digest
	Page, Len uint32
	State     byte
}

// EncodeIndex writes a sidecar, of entries that need not be good ones.
func EncodeIndex(seq uint64, cl uint32, entries ...RawEntry) []byte {
	b := appendHeader(nil, header{seq, class(cl)})
	for _, e := range entries {
		b = appendEntry(b, seq, &entry{e.Digest, e.Page, e.Len, state(e.State)})
	}
	return b
}

// EncodePin writes a pin list.
func EncodePin(id chunk.Digest, chunks ...Chunk) []byte { return encodePin(id, chunks) }

func sampleIndex() []byte {
	return EncodeIndex(sampleSeq, uint32(speculative),
		RawEntry{chunk.Sum([]byte("one")), 0, 1, byte(unused)},
		RawEntry{chunk.Sum([]byte("two")), 1, 4097, byte(used)},
		RawEntry{chunk.Sum([]byte("three")), 4, chunk.DefaultSize, byte(dropped)})
}

func samplePin() []byte {
	return encodePin(chunk.Sum([]byte("image")), []Chunk{{chunk.Sum([]byte("two")), chunk.MaxSize}, {chunk.Sum([]byte("one")), 1}})
}

func TestGolden(t *testing.T) {
	got := "index of segment 1234, three entries\n" + hex.Dump(sampleIndex()) + "\npin list, two chunks\n" + hex.Dump(samplePin())
	const path = "testdata/formats.golden"
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

func TestSizes(t *testing.T) {
	if n := len(sampleIndex()); n != headerSize+3*entrySize || headerSize != 64 || entrySize != 48 {
		t.Errorf("an index of three entries has %d bytes", n)
	}
	if n := len(samplePin()); n != pinHeaderSize+2*pinEntrySize+4 || pinHeaderSize != 48 || pinEntrySize != 36 {
		t.Errorf("a list of two chunks has %d bytes", n)
	}
	for _, limit := range []int64{MinLimit, MinLimit + 1, 1 << 30, 10 << 30, MaxLimit} {
		z, err := sizesOf(limit)
		if err != nil {
			t.Fatal(err)
		}
		if z.segment < minSegment || z.segment > maxSegment || z.segment%pageSize != 0 || z.unit > z.segment/64*65+pageSize ||
			z.segments+z.pinLists > limit || z.pinned < limit/4 || z.segments < 15*z.unit || limit/z.segment > maxSegments {
			t.Errorf("limit %d: %+v", limit, z)
		}
	}
}

// TestDamagedIndex says what each damage costs.
func TestDamagedIndex(t *testing.T) {
	good := sampleIndex()
	size := int64(4*pageSize + chunk.DefaultSize)
	change := func(at int, by byte) []byte {
		b := bytes.Clone(good)
		b[at] ^= by
		return b
	}
	for what, tc := range map[string]struct {
		b       []byte
		seq     uint64
		size    int64
		entries int
		err     string
	}{
		"nothing":                       {good, sampleSeq, size, 3, ""},
		"a torn tail":                   {good[:len(good)-1], sampleSeq, size, 2, ""},
		"a tail of zeros":               {append(bytes.Clone(good), make([]byte, 4096)...), sampleSeq, size, 3, ""},
		"the header alone":              {good[:headerSize], sampleSeq, size, 0, ""},
		"a torn header":                 {good[:headerSize-1], sampleSeq, size, 0, "torn"},
		"no bytes":                      {nil, sampleSeq, size, 0, "torn"},
		"another magic":                 {change(0, 1), sampleSeq, size, 0, "damaged"},
		"another version":               {change(8, 3), sampleSeq, size, 0, "version 2, not 1"},
		"another class":                 {change(12, 3), sampleSeq, size, 0, "damaged"},
		"a reserved byte of the header": {change(40, 1), sampleSeq, size, 0, "damaged"},
		"another segment's":             {good, sampleSeq + 1, size, 0, "damaged"},
		"another segment's entries":     {append(EncodeIndex(7, 0), good[headerSize:]...), 7, size, 0, ""},
		"a digest":                      {change(headerSize+entrySize, 1), sampleSeq, size, 1, ""},
		"an offset":                     {change(headerSize+32, 1), sampleSeq, size, 0, ""},
		"a length":                      {change(headerSize+2*entrySize+36, 1), sampleSeq, size, 2, ""},
		"a checksum":                    {change(headerSize+40, 1), sampleSeq, size, 0, ""},
		"an unknown state":              {change(headerSize+44, 3), sampleSeq, size, 0, ""},
		"a reserved byte":               {change(headerSize+47, 1), sampleSeq, size, 0, ""},
		"data cut in the last chunk":    {good, sampleSeq, size - 1, 2, ""},
		"no data":                       {good, sampleSeq, 0, 0, ""},
		"a chunk of no bytes":           {EncodeIndex(7, 0, RawEntry{Len: 0}), 7, size, 0, ""},
		"a chunk that is too large":     {EncodeIndex(7, 0, RawEntry{Len: chunk.MaxSize + 1}), 7, 1 << 40, 0, ""},
		"a chunk inside another":        {EncodeIndex(7, 0, RawEntry{Len: 4097}, RawEntry{Page: 1, Len: 1}), 7, size, 1, ""},
		"a chunk behind any segment":    {EncodeIndex(7, 0, RawEntry{Page: 1<<32 - 1, Len: 1}), 7, 1 << 62, 0, ""},
	} {
		_, entries, err := decodeIndex(tc.b, tc.seq, tc.size)
		if len(entries) != tc.entries || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %d entries, %v; want %d, %q", what, len(entries), err, tc.entries, tc.err)
		}
	}
}

func TestDamagedPin(t *testing.T) {
	good, id := samplePin(), chunk.Sum([]byte("image"))
	if chunks, err := decodePin(good, id); err != nil || len(chunks) != 2 {
		t.Fatal(err)
	}
	for i := range good {
		b := bytes.Clone(good)
		b[i] ^= 0x41
		if _, err := decodePin(b, id); err == nil {
			t.Errorf("byte %d changed: no error", i)
		}
		if _, err := decodePin(good[:i], id); err == nil {
			t.Errorf("cut to %d bytes: no error", i)
		}
	}
	for _, bad := range [][]Chunk{{{chunk.Digest{1}, 1}, {chunk.Digest{1}, 1}}, {{chunk.Digest{2}, 1}, {chunk.Digest{1}, 1}}, {{chunk.Digest{}, 0}}, {{chunk.Digest{}, chunk.MaxSize + 1}}} {
		if _, err := decodePin(encodePin(id, bad), id); err == nil {
			t.Errorf("list %v: no error", bad)
		}
	}
	if _, err := decodePin(append(bytes.Clone(good), 0), id); err == nil {
		t.Error("one byte more: no error")
	}
	if _, err := decodePin(good, chunk.Digest{}); err == nil {
		t.Error("another image's list: no error")
	}
}

// FuzzIndex reads arbitrary bytes as a sidecar: what is accepted is what would
// be written, and every entry is inside of the data.
func FuzzIndex(f *testing.F) {
	f.Add(sampleIndex(), uint64(sampleSeq), int64(1<<20))
	f.Add(sampleIndex()[:100], uint64(sampleSeq), int64(1<<20))
	f.Add(EncodeIndex(7, 0), uint64(7), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, seq uint64, size int64) {
		cl, entries, err := decodeIndex(b, seq, size)
		if err != nil {
			return
		}
		again, end := appendHeader(nil, header{seq, cl}), int64(0)
		for i := range entries {
			e := &entries[i]
			if e.off() < end || e.off()+int64(e.length) > size || e.length == 0 || e.length > chunk.MaxSize {
				t.Fatalf("entry %+v of %d bytes of data, behind %d", e, size, end)
			}
			again, end = appendEntry(again, seq, e), e.end()
		}
		if !bytes.HasPrefix(b, again) {
			t.Fatal("accepted bytes are not those that would be written")
		}
	})
}

// FuzzPin reads arbitrary bytes as a pin list.
func FuzzPin(f *testing.F) {
	f.Add(samplePin())
	f.Add(encodePin(chunk.Digest{}, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		id := chunk.Digest{}
		if len(b) >= pinHeaderSize {
			id = chunk.Digest(b[16:48])
		}
		if chunks, err := decodePin(b, id); err == nil && !bytes.Equal(encodePin(id, chunks), b) {
			t.Fatal("accepted bytes are not those that would be written")
		}
	})
}

// TestTable compares the table with a map, through all that happens to it.
func TestTable(t *testing.T) {
	if maxSegment/pageSize > 1<<entryBits || maxSegments+4 >= 1<<(32-entryBits) {
		t.Fatal("a slot has no room for every place")
	}
	tb, model := newTable(0), map[chunk.Digest]place{}
	segs := []*segment{{}, {}, {}}
	for _, s := range segs {
		tb.add(s)
	}
	rnd := uint64(1)
	for i := range 60_000 {
		rnd = rnd*6364136223846793005 + 1442695040888963407
		s := segs[rnd>>40%3]
		d := chunk.Digest{byte(rnd >> 33), byte(rnd>>50) & 31} // few, so that they meet again
		switch {
		case i%9000 == 8999:
			tb.drop(s)
			for d, p := range model {
				if p.seg == s.number {
					delete(model, d)
				}
			}
			s.entries = nil
			tb.add(s)
		case rnd>>45%3 == 0:
			tb.remove(d)
			delete(model, d)
		default:
			s.entries = append(s.entries, entry{digest: d})
			p := place{s.number, uint32(len(s.entries) - 1)}
			if old := tb.put(d, p); old != model[d] {
				t.Fatalf("step %d: put says %v was there, want %v", i, old, model[d])
			}
			model[d] = p
		}
		if tb.n != len(model) {
			t.Fatalf("step %d: %d digests, want %d", i, tb.n, len(model))
		}
	}
	for a := range 256 {
		for b := range 32 {
			d := chunk.Digest{byte(a), byte(b)}
			if tb.get(d) != model[d] {
				t.Fatalf("%v is at %v, want %v", d[:2], tb.get(d), model[d])
			}
		}
	}
}
