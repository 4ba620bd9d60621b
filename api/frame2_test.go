package api_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"quarry/api"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// records returns frames as records of a pack, with the checksums that they say.
func records(frames []api.Frame) (b []byte) {
	le := binary.LittleEndian
	for _, f := range frames {
		begin := len(b)
		b = append(b, "CHNK"...)
		b = append(b, byte(f.Codec), 0, 0, 0)
		b = le.AppendUint32(b, uint32(len(f.Stored)))
		b = le.AppendUint32(b, f.Len)
		b = le.AppendUint32(b, f.CRC)
		b = append(b, f.Digest[:]...)
		b = le.AppendUint32(b, pack.Checksum(b[begin:]))
		b = append(b, f.Stored...)
	}
	return b
}

// encodeAnswer2 encodes an answer in version 2. Frames with Records begin a records
// frame of so many.
func encodeAnswer2(t testing.TB, frames []api.Frame) []byte {
	t.Helper()
	var b bytes.Buffer
	fw := api.NewFrameWriter2(&b)
	for len(frames) > 0 {
		n := frames[0].Records
		if n == 0 {
			if err := fw.Write(frames[0]); err != nil {
				t.Fatal(err)
			}
			frames = frames[1:]
			continue
		}
		p := records(frames[:n])
		if err := fw.Records(uint32(n), uint64(len(p))); err != nil {
			t.Fatal(err)
		}
		b.Write(p)
		frames = frames[n:]
	}
	if err := fw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// sampleFrames2 are two records frames with chunk frames around them.
func sampleFrames2() []api.Frame {
	first := okFrame([]byte("the first record"))
	first.Records = 2
	alone := okFrame([]byte("a record alone"))
	alone.Records = 1
	return []api.Frame{
		first, okFrame(bytes.Repeat([]byte("a record "), 100)),
		{Digest: chunk.Sum([]byte("1")), Status: api.StatusNotFound, Reason: "chunk not found"},
		alone,
		okFrame([]byte("no record")),
	}
}

func TestRecordsDecodeToWhatWasEncoded(t *testing.T) {
	want := sampleFrames2()
	b := encodeAnswer2(t, want)
	got, version, err := decodeAnswer(bytes.NewReader(b), len(want))
	if err != nil || version != 2 || len(got) != len(want) {
		t.Fatalf("%d frames of version %d, error %v", len(got), version, err)
	}
	for i, f := range got {
		w := want[i]
		if f.Digest != w.Digest || f.Status != w.Status || f.Codec != w.Codec || f.Len != w.Len || f.CRC != w.CRC || f.Records != w.Records || !bytes.Equal(f.Stored, w.Stored) {
			t.Errorf("chunk %d: got %+v, want %+v", i, f, w)
		}
	}
	if again := encodeAnswer2(t, got); !bytes.Equal(again, b) {
		t.Error("the answer encodes to other bytes after decoding")
	}
}

func TestAnswerOfVersion2HasTheBytesOfTheGolden(t *testing.T) {
	name := filepath.Join("testdata", "answer2.golden")
	got := annotate2(encodeAnswer2(t, sampleFrames2()))
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got answer\n%s\nwant\n%s", got, want)
	}
}

// annotate2 is annotate for an answer in version 2.
func annotate2(b []byte) string {
	d := dump{b: b}
	d.line(8, "magic")
	d.line(4, "version")
	for d.off < len(b) {
		if b[d.off] != 3 {
			d.frame()
			continue
		}
		count := int(binary.LittleEndian.Uint32(b[d.off+4:]))
		d.line(1, "records frame")
		d.line(3, "zero")
		d.line(4, "records")
		d.line(8, "bytes of records")
		d.line(32, "zero")
		for range count {
			stored := int(binary.LittleEndian.Uint32(b[d.off+8:]))
			d.line(pack.RecordHeaderSize, "record header, as in a pack")
			d.line(stored, "stored bytes")
		}
	}
	return d.out.String()
}

func TestEveryCutOfAnAnswerOfVersion2IsUnexpectedEOF(t *testing.T) {
	b := encodeAnswer2(t, sampleFrames2())
	for n := range b {
		if _, err := decodeFrames(bytes.NewReader(b[:n]), 10); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("answer cut at %d of %d: got error %v, want unexpected EOF", n, len(b), err)
		}
	}
}

func TestMalformedRecordsAreRefused(t *testing.T) {
	frames := sampleFrames2()[:2]
	two := encodeAnswer2(t, frames)
	first := preamble + header // the header of the first record
	second := first + pack.RecordHeaderSize + len(frames[0].Stored)
	end := len(two) - header
	change := func(off int, v byte) func([]byte) []byte {
		return func(b []byte) []byte { b[off] = v; return b }
	}
	put32 := func(off int, v uint32) func([]byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint32(b[off:], v); return b }
	}
	size := binary.LittleEndian.Uint32(two[preamble+8:])
	tests := map[string]func([]byte) []byte{
		"a reserved byte":                     change(preamble+1, 1),
		"a reserved byte behind the lengths":  change(preamble+47, 1),
		"no records":                          put32(preamble+4, 0),
		"more records than asked for":         put32(preamble+4, 3),
		"4 Gi records":                        put32(preamble+4, 1<<32-1),
		"fewer records than bytes":            put32(preamble+4, 1),
		"no bytes":                            put32(preamble+8, 0),
		"a byte less":                         put32(preamble+8, size-1),
		"a byte more":                         put32(preamble+8, size+1),
		"fewer bytes than headers":            put32(preamble+8, 2*pack.RecordHeaderSize),
		"more bytes than the largest chunks":  put32(preamble+12, 1),
		"an unknown tag":                      change(first, 'X'),
		"a stored length that is not its own": change(first+8, 9),
		"a digest that is not its own":        change(first+20, 9),
		"a damaged second header":             change(second+50, 9),
		"a count too high":                    put32(end+4, 3),
		"a count that leaves records out":     put32(end+4, 1),
		"a byte after the end":                func(b []byte) []byte { return append(b, 0) },
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			b := spoil(bytes.Clone(two))
			if bytes.Equal(b, two) {
				t.Fatal("nothing was spoiled")
			}
			var fe *api.FrameError
			if _, err := decodeFrames(bytes.NewReader(b), 2); !errors.As(err, &fe) {
				t.Errorf("got error %v, want a FrameError", err)
			}
		})
	}
}

func TestALyingRecordCostsLittleMemory(t *testing.T) {
	big := okFrame(bytes.Repeat([]byte("x"), chunk.MaxSize))
	random := make([]byte, chunk.MaxSize)
	for i := range random {
		random[i] = byte(i * i >> 7)
	}
	big.Codec, big.Stored, big.CRC = pack.Raw, random, pack.Checksum(random)
	big.Digest = chunk.Sum(random)
	big.Records = 1
	b := encodeAnswer2(t, []api.Frame{big})[:preamble+header+pack.RecordHeaderSize+100]
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := decodeFrames(bytes.NewReader(b), 1)
	runtime.ReadMemStats(&after)
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got error %v, want unexpected EOF", err)
	}
	if got := after.TotalAlloc - before.TotalAlloc; got > 1<<20 {
		t.Errorf("reading an answer that lies about its length allocated %d bytes", got)
	}
}
