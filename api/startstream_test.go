package api_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"quarry/api"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/image"
	"quarry/store/pack"
)

// sentPart is a part with its payload as sent.
type sentPart struct {
	api.StartPart
	payload []byte
}

func rawPart(t api.PartType, p string) sentPart {
	return sentPart{api.StartPart{Type: t, Codec: pack.Raw, Size: int64(len(p)), Plain: int64(len(p))}, []byte(p)}
}

func zstdPart(plain []byte) sentPart {
	_, stored := pack.Compress(nil, plain)
	return sentPart{api.StartPart{Type: api.PartBootstrap, Codec: pack.Zstd, Size: int64(len(stored)), Plain: int64(len(plain))}, stored}
}

func sampleStart() []sentPart {
	return []sentPart{
		rawPart(api.PartName, "name envelope"), rawPart(api.PartImage, "image envelope"),
		rawPart(api.PartConfig, "{}"), zstdPart(bytes.Repeat([]byte("bootstrap "), 100)),
	}
}

func encodeStart(t testing.TB, parts []sentPart) []byte {
	t.Helper()
	var b bytes.Buffer
	sw := api.NewStartWriter(&b)
	for _, p := range parts {
		if err := sw.Begin(p.StartPart); err != nil {
			t.Fatal(err)
		}
		if _, err := sw.Write(p.payload); err != nil {
			t.Fatal(err)
		}
	}
	if err := sw.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// rawStart writes headers that the writer would refuse.
func rawStart(parts ...sentPart) []byte {
	b := binary.LittleEndian.AppendUint32([]byte("QRYSTART"), 1)
	for _, p := range append(parts, sentPart{StartPart: api.StartPart{Type: 255}}) {
		b = append(b, byte(p.Type), byte(p.Codec), 0, 0)
		b = binary.LittleEndian.AppendUint32(b, uint32(p.Size))
		b = binary.LittleEndian.AppendUint32(b, uint32(p.Plain))
		b = append(b, p.payload...)
	}
	return b
}

// decodeStart reads a stream to its end, with read for each part's payload.
func decodeStart(b []byte, read func(*api.StartReader) ([]byte, error)) ([]sentPart, error) {
	sr := api.NewStartReader(bytes.NewReader(b))
	var out []sentPart
	for {
		p, err := sr.Next()
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		payload, err := read(sr)
		if err != nil {
			return out, err
		}
		out = append(out, sentPart{p, payload})
	}
}

func asSent(sr *api.StartReader) ([]byte, error) { return io.ReadAll(sr) }

func TestStartStreamsDecodeToWhatWasEncoded(t *testing.T) {
	full := sampleStart()
	incompressible := rawPart(api.PartBootstrap, "raw")
	for name, parts := range map[string][]sentPart{
		"by tag": full, "by digest": full[1:], "by tag, known": full[:2], "by digest, known": full[1:2],
		"raw": {full[1], full[2], incompressible},
	} {
		b := encodeStart(t, parts)
		got, err := decodeStart(b, asSent)
		if err != nil || !bytes.Equal(encodeStart(t, got), b) {
			t.Errorf("%s: decoded to %d parts that encode to other bytes, error %v", name, len(got), err)
		}
		plain, err := decodeStart(b, (*api.StartReader).Bytes)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for i, p := range plain {
			if int64(len(p.payload)) != parts[i].Plain {
				t.Errorf("%s: part %d has %d bytes, want %d", name, p.Type, len(p.payload), parts[i].Plain)
			}
		}
	}
}

func TestStartStreamHasTheBytesOfTheGolden(t *testing.T) {
	name := filepath.Join("testdata", "start.golden")
	got := annotateStart(encodeStart(t, sampleStart()))
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
		t.Errorf("got stream\n%s\nwant\n%s", got, want)
	}
}

// annotateStart dumps a stream: offset, bytes, meaning.
func annotateStart(b []byte) string {
	var out strings.Builder
	off := 0
	line := func(n int, meaning string) {
		fmt.Fprintf(&out, "%06x  %-64x  %s\n", off, b[off:off+n], meaning)
		off += n
	}
	names := map[byte]string{1: "name statement", 2: "image statement", 3: "config", 4: "bootstrap", 255: "end"}
	line(8, "magic")
	line(4, "version")
	for off < len(b) {
		size := int(binary.LittleEndian.Uint32(b[off+4:]))
		line(1, "part: "+names[b[off]])
		line(1, "codec")
		line(2, "zero")
		line(4, "size")
		line(4, "plain length")
		if size > 0 {
			line(size, "payload")
		}
	}
	return out.String()
}

func TestEveryCutOfAStartStreamIsUnexpectedEOF(t *testing.T) {
	b := encodeStart(t, sampleStart())
	for n := range b {
		if _, err := decodeStart(b[:n], (*api.StartReader).Bytes); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("stream cut at %d of %d: got error %v, want unexpected EOF", n, len(b), err)
		}
	}
}

func TestMalformedStartStreamsAreRefused(t *testing.T) {
	s := sampleStart()
	name, img, config, boot := s[0], s[1], s[2], s[3]
	with := func(p sentPart, change func(*sentPart)) sentPart { change(&p); return p }
	good := encodeStart(t, s)
	set := func(off int, v byte) []byte { b := bytes.Clone(good); b[off] = v; return b }
	end := sentPart{StartPart: api.StartPart{Type: 255}}
	for what, b := range map[string][]byte{
		"another magic":           set(0, 'X'),
		"another version":         set(8, 3),
		"version 2 with an end":   append(binary.LittleEndian.AppendUint32([]byte("QRYSTART"), 2), encodeStart(t, s[:2])[12:]...),
		"a reserved byte":         set(14, 1),
		"a byte after the end":    append(bytes.Clone(good), 0),
		"no part":                 rawStart(),
		"an end with a size":      append(bytes.Clone(good[:len(good)-12]), 255, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 'x'),
		"no image":                rawStart(name, config, boot),
		"a name twice":            rawStart(name, name, img, config, boot),
		"an image twice":          rawStart(name, img, img, config, boot),
		"a config twice":          rawStart(name, img, config, config, boot),
		"a bootstrap twice":       rawStart(name, img, config, boot, boot),
		"a name after the image":  rawStart(img, name, config, boot),
		"a bootstrap first":       rawStart(name, img, boot, config),
		"a config alone":          rawStart(name, img, config),
		"a bootstrap alone":       rawStart(name, img, boot),
		"a part 0":                rawStart(rawPart(0, "x")),
		"a prefetch list":         rawStart(name, img, config, boot, rawPart(5, "x")),
		"a prefetched chunk":      rawStart(name, img, config, boot, rawPart(6, "x")),
		"two ends":                rawStart(name, img, config, boot, end),
		"an empty name":           rawStart(rawPart(api.PartName, ""), img, config, boot),
		"a large name":            rawStart(with(name, func(p *sentPart) { p.Size, p.Plain = signer.MaxEnvelope+1, signer.MaxEnvelope+1 })),
		"a large image":           rawStart(with(img, func(p *sentPart) { p.Size, p.Plain = 1<<32-1, 1<<32-1 })),
		"a large config":          rawStart(img, with(config, func(p *sentPart) { p.Size, p.Plain = image.MaxConfig+1, image.MaxConfig+1 })),
		"a large bootstrap":       rawStart(img, config, with(boot, func(p *sentPart) { p.Plain = rafs.MaxBootstrap + 1 })),
		"zstd for a config":       rawStart(img, with(config, func(p *sentPart) { p.Codec, p.Plain = pack.Zstd, 100 })),
		"zstd that is larger":     rawStart(img, config, with(boot, func(p *sentPart) { p.Plain = p.Size })),
		"raw lengths that differ": rawStart(img, config, with(boot, func(p *sentPart) { p.Codec = pack.Raw })),
		"an unknown codec":        rawStart(img, config, with(boot, func(p *sentPart) { p.Codec = 2 })),
		"zstd of less":            rawStart(img, config, with(boot, func(p *sentPart) { p.Plain++ })),
		"zstd of more":            rawStart(img, config, with(boot, func(p *sentPart) { p.Plain-- })),
		"zstd that is none":       rawStart(img, config, with(boot, func(p *sentPart) { p.payload = bytes.Repeat([]byte("x"), int(p.Size)) })),
	} {
		var se *api.StartError
		if got, err := decodeStart(b, (*api.StartReader).Bytes); !errors.As(err, &se) {
			t.Errorf("%s: got %d parts, error %v, want a StartError", what, len(got), err)
		}
	}
}

func TestALyingStartStreamCostsLittleMemory(t *testing.T) {
	s := sampleStart()
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	bomb := enc.EncodeAll(make([]byte, 256<<20), nil)
	wide, err := zstd.NewWriter(nil, zstd.WithWindowSize(256<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer wide.Close()
	window := wide.EncodeAll(make([]byte, 300<<20), nil)
	bootstrap := func(codec pack.Codec, size, plain int, payload []byte) sentPart {
		return sentPart{api.StartPart{Type: api.PartBootstrap, Codec: codec, Size: int64(size), Plain: int64(plain)}, payload}
	}
	for what, p := range map[string]sentPart{
		"a length that does not come":      bootstrap(pack.Raw, rafs.MaxBootstrap, rafs.MaxBootstrap, nil),
		"zstd that does not come":          bootstrap(pack.Zstd, rafs.MaxBootstrap-1, rafs.MaxBootstrap, nil),
		"a bomb":                           bootstrap(pack.Zstd, len(bomb), len(bomb)+1, bomb),
		"a large window":                   bootstrap(pack.Zstd, len(window), 300<<20, window),
		"little zstd that says it is huge": bootstrap(pack.Zstd, len(s[3].payload), rafs.MaxBootstrap, s[3].payload),
	} {
		b := rawStart(s[1], s[2], p)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := decodeStart(b, (*api.StartReader).Bytes); err == nil {
			t.Errorf("%s was accepted", what)
		}
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 32<<20 {
			t.Errorf("%s made the reader allocate %d bytes", what, got)
		}
	}
}

// encodeStart2 writes a stream of version 2 with what follows it.
func encodeStart2(t testing.TB, parts []sentPart, rest string) []byte {
	t.Helper()
	var b bytes.Buffer
	sw := api.NewStartWriter2(&b)
	for _, p := range parts {
		if err := sw.Begin(p.StartPart); err != nil {
			t.Fatal(err)
		}
		if _, err := sw.Write(p.payload); err != nil {
			t.Fatal(err)
		}
	}
	w, err := sw.Rest()
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(w, rest)
	if _, err := sw.Rest(); err == nil || sw.Close() == nil || sw.Begin(parts[0].StartPart) == nil {
		t.Error("something was written behind the trace stream")
	}
	return b.Bytes()
}

func TestATraceStreamFollowsImageOrBootstrapInVersion2(t *testing.T) {
	s := sampleStart()
	r := bytes.NewReader(encodeStart2(t, s, "rest"))
	sr := api.NewStartReader(r)
	for _, want := range s {
		p, err := sr.Next()
		if err != nil || p != want.StartPart {
			t.Fatalf("got %+v, %v, want %+v", p, err, want.StartPart)
		}
		if _, err := sr.Bytes(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := sr.Next(); err != io.EOF || sr.Version() != 2 || r.Len() != len("rest") {
		t.Errorf("got %v, version %d, %d bytes left, want io.EOF, 2 and the rest", err, sr.Version(), r.Len())
	}
	r = bytes.NewReader(encodeStart2(t, s[:2], "rest"))
	sr = api.NewStartReader(r)
	for range 2 {
		if _, err := sr.Next(); err != nil {
			t.Fatal(err)
		}
		if _, err := sr.Bytes(); err != nil {
			t.Fatal(err)
		}
	}
	if r.Len() != len("rest") {
		t.Errorf("%d bytes left behind an image alone", r.Len())
	}
	for n, parts := range map[int][]sentPart{0: nil, 1: s[:1], 3: s[:3]} {
		sw := api.NewStartWriter2(io.Discard)
		for _, p := range parts {
			if err := sw.Begin(p.StartPart); err != nil {
				t.Fatal(err)
			}
			sw.Write(p.payload)
		}
		if _, err := sw.Rest(); err == nil {
			t.Errorf("a trace stream follows %d parts", n)
		}
	}
	if _, err := api.NewStartWriter(io.Discard).Rest(); err == nil {
		t.Error("a trace stream in version 1")
	}
}

func TestAStartWriterKeepsItsWord(t *testing.T) {
	begin := func(parts ...sentPart) (sw *api.StartWriter, err error) {
		sw = api.NewStartWriter(io.Discard)
		for _, p := range parts {
			if err == nil {
				err = sw.Begin(p.StartPart)
			}
			if err == nil {
				_, err = sw.Write(p.payload)
			}
		}
		return sw, err
	}
	s := sampleStart()
	if _, err := begin(s[0], s[2]); err == nil {
		t.Error("a config after a name was written")
	}
	short := s[1]
	short.payload = short.payload[1:]
	if sw, err := begin(s[0], short); err != nil || sw.Close() == nil {
		t.Errorf("a part that ends early was closed (%v)", err)
	}
	long := s[1]
	long.payload = append(bytes.Clone(long.payload), 'x')
	if _, err := begin(s[0], long); err == nil {
		t.Error("a part longer than its header was written")
	}
	if err := api.NewStartWriter(io.Discard).Close(); err == nil {
		t.Error("a stream of no part was closed")
	}
}

func FuzzStartReader(f *testing.F) {
	s := sampleStart()
	f.Add(encodeStart(f, s))
	f.Add(encodeStart(f, s[1:2]))
	f.Add(encodeStart(f, s)[:60])
	f.Add(rawStart(s[1], s[2], s[3], s[3]))
	f.Add(encodeStart2(f, s, "rest"))
	f.Fuzz(func(t *testing.T, b []byte) {
		plain, err := decodeStart(b, (*api.StartReader).Bytes)
		if err != nil {
			var se *api.StartError
			if !errors.As(err, &se) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("error %v is neither a StartError nor unexpected EOF", err)
			}
			return
		}
		parts, err := decodeStart(b, asSent)
		if err != nil || len(parts) != len(plain) {
			t.Fatalf("%d parts as sent, %d decompressed, error %v", len(parts), len(plain), err)
		}
		for _, p := range plain {
			if int64(len(p.payload)) != p.Plain {
				t.Fatalf("part %d has %d bytes, its header says %d", p.Type, len(p.payload), p.Plain)
			}
		}
		again := encodeStart(t, parts)
		if b[8] == 2 { // what follows is another format
			again = encodeStart2(t, parts, "")
			b = b[:min(len(again), len(b))]
		}
		if !bytes.Equal(again, b) {
			t.Fatalf("accepted stream encodes to other bytes:\n%x\n%x", b, again)
		}
	})
}
