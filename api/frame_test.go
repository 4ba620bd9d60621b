package api_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"quarry/api"
	"quarry/store/chunk"
	"quarry/store/pack"
)

const (
	preamble = 12
	header   = 48
)

// okFrame is the frame of a chunk as a store would send it.
func okFrame(p []byte) api.Frame {
	codec, stored := pack.Compress(nil, p)
	return api.Frame{
		Digest: chunk.Sum(p), Codec: codec, Len: uint32(len(p)), CRC: pack.Checksum(stored), Stored: stored,
	}
}

func sampleFrames() []api.Frame {
	return []api.Frame{
		okFrame([]byte("a raw chunk")),
		okFrame(bytes.Repeat([]byte("zstd "), 100)),
		{Digest: chunk.Sum([]byte("1")), Status: api.StatusNotFound, Reason: "chunk not found"},
		{Digest: chunk.Sum([]byte("2")), Status: api.StatusCorrupt, Reason: "damaged in packs/…"},
		{Digest: chunk.Sum([]byte("3")), Status: api.StatusError},
	}
}

func encodeFrames(t testing.TB, frames []api.Frame) []byte {
	t.Helper()
	var b bytes.Buffer
	fw := api.NewFrameWriter(&b)
	for _, f := range frames {
		if err := fw.Write(f); err != nil {
			t.Fatal(err)
		}
	}
	if err := fw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// decodeFrames reads an answer to its end; the frames own their bytes.
func decodeFrames(r io.Reader, limit int) ([]api.Frame, error) {
	frames, _, err := decodeAnswer(r, limit)
	return frames, err
}

// decodeAnswer is decodeFrames for who wants to know the version.
func decodeAnswer(r io.Reader, limit int) (out []api.Frame, version int, err error) {
	fr := api.NewFrameReader(r, limit)
	for {
		f, err := fr.Next()
		if err == io.EOF {
			return out, fr.Version(), nil
		}
		if err != nil {
			return out, fr.Version(), err
		}
		f.Stored = bytes.Clone(f.Stored)
		out = append(out, f)
	}
}

func TestFramesDecodeToWhatWasEncoded(t *testing.T) {
	want := sampleFrames()
	b := encodeFrames(t, want)
	got, err := decodeFrames(bytes.NewReader(b), len(want))
	if err != nil {
		t.Fatal(err)
	}
	if again := encodeFrames(t, got); !bytes.Equal(again, b) {
		t.Errorf("frames encode to other bytes after decoding")
	}
	for i, f := range got {
		if f.Digest != want[i].Digest || f.Status != want[i].Status || f.Reason != want[i].Reason {
			t.Errorf("frame %d: got %+v, want %+v", i, f, want[i])
		}
	}
}

var update = flag.Bool("update", false, "write the golden files anew")

func TestAnswerHasTheBytesOfTheGolden(t *testing.T) {
	name := filepath.Join("testdata", "answer.golden")
	got := annotate(encodeFrames(t, sampleFrames()))
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

// annotate dumps an answer in version 1.
func annotate(b []byte) string {
	d := dump{b: b}
	d.line(8, "magic")
	d.line(4, "version")
	for d.off < len(b) {
		d.frame()
	}
	return d.out.String()
}

// dump writes an answer down: offset, bytes, meaning.
type dump struct {
	b   []byte
	off int
	out strings.Builder
}

func (d *dump) line(n int, meaning string) {
	fmt.Fprintf(&d.out, "%06x  %-64x  %s\n", d.off, d.b[d.off:d.off+n], meaning)
	d.off += n
}

func (d *dump) frame() {
	size := int(binary.LittleEndian.Uint32(d.b[d.off+4:]))
	if d.b[d.off] == 2 {
		d.line(1, "end frame")
		d.line(3, "zero")
		d.line(4, "chunk frames")
		d.line(40, "zero")
		return
	}
	d.line(1, "chunk frame")
	d.line(1, "status")
	d.line(1, "codec")
	d.line(1, "zero")
	d.line(4, "size")
	d.line(4, "plain length")
	d.line(4, "CRC32C")
	d.line(32, "digest")
	d.line(size, "payload")
}

func TestEveryCutOfAnAnswerIsUnexpectedEOF(t *testing.T) {
	b := encodeFrames(t, sampleFrames())
	for n := range b {
		_, err := decodeFrames(bytes.NewReader(b[:n]), 10)
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("answer cut at %d of %d: got error %v, want unexpected EOF", n, len(b), err)
		}
	}
}

func TestMalformedAnswersAreRefused(t *testing.T) {
	change := func(off int, v byte) func([]byte) []byte {
		return func(b []byte) []byte { b[off] = v; return b }
	}
	put32 := func(off int, v uint32) func([]byte) []byte {
		return func(b []byte) []byte { binary.LittleEndian.PutUint32(b[off:], v); return b }
	}
	one := encodeFrames(t, []api.Frame{okFrame([]byte("a raw chunk"))})
	end := len(one) - header
	tests := map[string]func([]byte) []byte{
		"another magic":                  change(0, 'X'),
		"another version":                put32(8, 3),
		"version 0":                      put32(8, 0),
		"records in version 1":           change(preamble, 3),
		"an unknown kind":                change(preamble, 7),
		"an unknown status":              change(preamble+1, 9),
		"an unknown codec":               change(preamble+2, 9),
		"a reserved byte":                change(preamble+3, 1),
		"a stored length of 4 GiB":       put32(preamble+4, 1<<32-1),
		"a stored length of 0":           put32(preamble+4, 0),
		"a plain length of 0":            put32(preamble+8, 0),
		"a plain length above the limit": put32(preamble+8, chunk.MaxSize+1),
		"raw lengths that differ":        put32(preamble+8, 12),
		"a count too high":               put32(end+4, 2),
		"a count too low":                put32(end+4, 0),
		"a byte set in the end frame":    change(end+20, 1),
		"a byte after the end":           func(b []byte) []byte { return append(b, 0) },
		"a not_found frame with a codec": change(preamble+1, 1),
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			var fe *api.FrameError
			_, err := decodeFrames(bytes.NewReader(spoil(bytes.Clone(one))), 1)
			if !errors.As(err, &fe) {
				t.Errorf("got error %v, want a FrameError", err)
			}
		})
	}
	t.Run("more frames than asked for", func(t *testing.T) {
		var fe *api.FrameError
		_, err := decodeFrames(bytes.NewReader(encodeFrames(t, sampleFrames())), 4)
		if !errors.As(err, &fe) {
			t.Errorf("got error %v, want a FrameError", err)
		}
	})
}

func TestALyingLengthCostsLittleMemory(t *testing.T) {
	b := encodeFrames(t, []api.Frame{okFrame([]byte("a raw chunk"))})
	binary.LittleEndian.PutUint32(b[preamble+4:], chunk.MaxSize)
	binary.LittleEndian.PutUint32(b[preamble+8:], chunk.MaxSize)
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

func TestALongReasonIsCutAtACharacter(t *testing.T) {
	f := api.Frame{Digest: chunk.Sum(nil), Status: api.StatusError, Reason: strings.Repeat("ü", 400)}
	got, err := decodeFrames(bytes.NewReader(encodeFrames(t, []api.Frame{f})), 1)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Repeat("ü", 256); got[0].Reason != want {
		t.Errorf("got a reason of %d bytes, want %d", len(got[0].Reason), len(want))
	}
}

func FuzzFrameReader(f *testing.F) {
	f.Add(encodeAnswer2(f, sampleFrames2()))
	f.Add(encodeAnswer2(f, sampleFrames2()[:2]))
	f.Add(encodeFrames(f, nil))
	f.Add(encodeFrames(f, sampleFrames()))
	f.Add(encodeFrames(f, sampleFrames()[:1])[:70])
	f.Fuzz(func(t *testing.T, b []byte) {
		frames, version, err := decodeAnswer(bytes.NewReader(b), api.MaxBatch)
		if err != nil {
			var fe *api.FrameError
			if !errors.As(err, &fe) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("error %v is neither a FrameError nor unexpected EOF", err)
			}
			return
		}
		again := encodeFrames(t, frames)
		if version == 2 {
			again = encodeAnswer2(t, frames)
		}
		if !bytes.Equal(again, b) {
			t.Fatalf("accepted answer encodes to other bytes:\n%x\n%x", b, again)
		}
	})
}
