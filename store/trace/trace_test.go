package trace_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
	"quarry/store/trace"
)

var update = flag.Bool("update", false, "write the golden files anew")

func platform(t testing.TB, s string) image.Platform {
	t.Helper()
	p, err := image.ParsePlatform(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func aRecord(t testing.TB) trace.Record {
	return trace.Record{
		Image: chunk.Sum([]byte("image")), Source: chunk.Sum([]byte("source")),
		Platform: platform(t, "linux/arm/v7"), Numbers: []uint32{7, 0, 3, 70000},
	}
}

func encode(t testing.TB, r trace.Record) []byte {
	t.Helper()
	b, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// aStream has a list of four, of which two chunks come, one raw and one zstd.
func aStream(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w := trace.NewWriter(&b)
	err := w.List([]uint32{7, 0, 3, 70000}, 3)
	for _, c := range []trace.Chunk{stored(3, bytes.Repeat([]byte("chunk "), 20)), stored(7, []byte("raw"))} {
		err = errors.Join(err, w.Chunk(c))
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func stored(n uint32, plain []byte) trace.Chunk {
	codec, s := pack.Compress(nil, plain)
	return trace.Chunk{Number: n, Codec: codec, Len: uint32(len(plain)), Stored: s}
}

// annotator writes bytes as lines of offset, bytes and meaning. It reads the
// formats by FORMAT.md and shares no code with the decoder.
type annotator struct {
	b   []byte
	off int
	out strings.Builder
}

func (a *annotator) take(n int, format string, args ...any) {
	for i := 0; i < n || i == 0; i += 16 {
		meaning := ""
		if i == 0 {
			meaning = fmt.Sprintf(format, args...)
		}
		line := fmt.Sprintf("%06d  %-32x  %s", a.off+i, a.b[a.off+i:a.off+min(i+16, n)], meaning)
		a.out.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	a.off += n
}

func (a *annotator) u32(name string) int {
	v := binary.LittleEndian.Uint32(a.b[a.off:])
	a.take(4, "%s %d", name, v)
	return int(v)
}

func annotateRecord(b []byte) string {
	a := &annotator{b: b}
	a.take(8, "magic %q", b[:8])
	a.u32("version")
	a.take(32, "image id")
	a.take(32, "source")
	count := a.u32("count")
	n := int(b[a.off])
	a.take(1, "platform of %d bytes", n)
	a.take(n, "platform %q", b[a.off:a.off+n])
	for range count {
		a.u32("number")
	}
	return a.out.String()
}

func annotateStream(b []byte) string {
	a := &annotator{b: b}
	a.take(8, "magic %q", b[:8])
	a.u32("version")
	for a.off < len(b) {
		kind := b[a.off]
		a.take(4, "part %d, codec %d", kind, b[a.off+1])
		size := a.u32("size")
		a.u32("plain")
		switch kind {
		case 5:
			a.u32("coming")
			for range size/4 - 1 {
				a.u32("number")
			}
		case 6:
			a.u32("number")
			a.take(size-4, "stored")
		}
	}
	return a.out.String()
}

// A difference here is a change of a format: it needs a new version and a line
// in FORMAT.md.
func TestGolden(t *testing.T) {
	for file, got := range map[string]string{
		"record.golden": annotateRecord(encode(t, aRecord(t))),
		"stream.golden": annotateStream(aStream(t)),
	} {
		path := filepath.Join("testdata", file)
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s differs; got:\n%s", file, got)
		}
	}
}

func known(err error) bool {
	return errors.Is(err, trace.ErrMalformed) || errors.Is(err, trace.ErrVersion) || errors.Is(err, io.ErrUnexpectedEOF)
}

func TestRecordsOfNoRunAreRefused(t *testing.T) {
	good := encode(t, aRecord(t))
	if got, err := trace.Decode(good); err != nil || !slices.Equal(got.Numbers, aRecord(t).Numbers) || got.Platform != aRecord(t).Platform {
		t.Fatalf("got %+v, %v", got, err)
	}
	for i := range good[:80] {
		b := bytes.Clone(good)
		b[i] ^= 0x80
		// The digests may be any.
		if _, err := trace.Decode(b); (err == nil) != (i >= 12 && i < 76) || err != nil && !known(err) {
			t.Errorf("byte %d flipped: %v", i, err)
		}
	}
	for n := range good {
		if _, err := trace.Decode(good[:n]); !errors.Is(err, trace.ErrMalformed) {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
	twice := bytes.Clone(good)
	copy(twice[len(twice)-4:], twice[len(twice)-8:])
	upper := bytes.Clone(good)
	upper[81] = 'L'
	for name, b := range map[string][]byte{"a number twice": twice, "a byte more": append(bytes.Clone(good), 0), "another platform text": upper} {
		if _, err := trace.Decode(b); !errors.Is(err, trace.ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := aRecord(t)
	for _, list := range [][]uint32{nil, {1, 1}, make([]uint32, trace.MaxNumbers+1)} {
		r.Numbers = list
		if _, err := r.Encode(); err == nil {
			t.Errorf("%d numbers were encoded", len(list))
		}
	}
	r = aRecord(t)
	r.Numbers = nil
	for n := range uint32(trace.MaxNumbers) {
		r.Numbers = append(r.Numbers, n)
	}
	if b := encode(t, r); len(b) > trace.MaxRecord {
		t.Errorf("the longest record has %d bytes, more than MaxRecord", len(b))
	} else if _, err := trace.Decode(b); err != nil {
		t.Error(err)
	}
}

func TestKeysSortByTimeAndReadBack(t *testing.T) {
	r := aRecord(t)
	b := encode(t, r)
	var last string
	for _, ns := range []int64{0, 1, 1e9, 1_700_000_000_000_000_000, 1<<63 - 1} {
		k := trace.KeyOf(r, b, time.Unix(0, ns))
		got, ok := trace.ParseKey(k.String())
		if !ok || got != k {
			t.Errorf("%s reads as %+v, want %+v", k, got, k)
		}
		if k.String() <= last || !strings.HasPrefix(k.String(), trace.Prefix) {
			t.Errorf("%s does not sort after %s", k, last)
		}
		last = k.String()
		for _, bad := range []string{last + "0", last[:len(last)-1], strings.ToUpper(last), "traces/" + last, strings.Replace(last, "arm-v7", "armhf", 1)} {
			if k, ok := trace.ParseKey(bad); ok {
				t.Errorf("%s reads as %+v", bad, k)
			}
		}
	}
}

func TestAListIsWhatRunsAgreeOn(t *testing.T) {
	for name, c := range map[string]struct {
		runs [][]uint32
		want []uint32
	}{
		"no run":                           {},
		"one run":                          {runs: [][]uint32{{1, 2, 3}}},
		"two equal runs":                   {runs: [][]uint32{{3, 1, 2}, {3, 1, 2}}, want: []uint32{3, 1, 2}},
		"what one alone touched":           {runs: [][]uint32{{3, 9, 1}, {3, 1, 8}}, want: []uint32{3, 1}},
		"equal places go by number":        {runs: [][]uint32{{5, 4}, {4, 5}}, want: []uint32{4, 5}},
		"a median and no mean":             {runs: [][]uint32{{1, 2, 3, 4}, {1, 2, 3, 4}, {2, 3, 4, 1}}, want: []uint32{1, 2, 3, 4}},
		"a run of nothing":                 {runs: [][]uint32{{1, 2}, {}, {1, 2}}, want: []uint32{1, 2}},
		"one run that lies is outnumbered": {runs: [][]uint32{{1, 2}, {9, 8, 7, 6, 5}, {1, 2}}, want: []uint32{1, 2}},
	} {
		if got := trace.Merge(c.runs); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
	size := func(n uint32) int64 { return int64(n) }
	for _, c := range []struct {
		count int
		plain int64
		want  int
	}{{10, 100, 4}, {2, 100, 2}, {10, 5, 0}, {10, 10, 1}, {10, 60, 3}, {10, 59, 2}} {
		if got := trace.Cut([]uint32{10, 20, 30, 40}, c.count, c.plain, size); len(got) != c.want {
			t.Errorf("%d numbers and %d bytes: got %v, want %d", c.count, c.plain, got, c.want)
		}
	}
}

// imageOf encodes and decodes a tree of files, each given by its chunks' content.
func imageOf(t *testing.T, files map[string][]string) *rafs.Image {
	t.Helper()
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	dir := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	root.Entries = []rafs.Dirent{{Name: "lib", Inode: dir}}
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		f := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: int64(len(files[name])) * chunk.MinSize}
		for _, text := range files[name] {
			f.Chunks = append(f.Chunks, chunk.Sum([]byte(text)))
		}
		dir.Entries = append(dir.Entries, rafs.Dirent{Name: name, Inode: f})
	}
	b, err := rafs.Encode(&rafs.Tree{ChunkSize: chunk.MinSize, Root: root})
	if err != nil {
		t.Fatal(err)
	}
	im, err := rafs.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	return im
}

func TestAListIsCarriedToAnotherImage(t *testing.T) {
	from := imageOf(t, map[string][]string{"a": {"a0", "a1"}, "b": {"b0"}, "c": {"c0", "c1"}, "gone": {"g0"}, "moved": {"m0"}})
	to := imageOf(t, map[string][]string{"0": {"new"}, "a": {"a0", "other"}, "b": {"b0"}, "c": {"x0"}, "here": {"m0"}})
	number := func(im *rafs.Image, text string) uint32 {
		i := slices.IndexFunc(im.Blob.Chunks, func(c rafs.Chunk) bool { return c.Digest == chunk.Sum([]byte(text)) })
		return uint32(i)
	}
	var list, want []uint32
	for _, s := range []string{"m0", "a1", "c0", "c1", "g0", "b0", "a0"} {
		list = append(list, number(from, s))
	}
	for _, s := range []string{"m0", "other", "x0", "b0", "a0"} {
		want = append(want, number(to, s))
	}
	places := trace.Places(from, append(list, 1<<31))
	if got := trace.In(to, places); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v of %v", got, want, to.Blob.Chunks)
	}
	if got := trace.In(from, places); !slices.Equal(got, list) {
		t.Errorf("in its own image: got %v, want %v", got, list)
	}
	empty := imageOf(t, nil)
	if got := trace.In(empty, places); got != nil {
		t.Errorf("in an image without data: %v", got)
	}
	if got := trace.Places(empty, list); got != nil {
		t.Errorf("of an image without data: %v", got)
	}
	// Two places that are one chunk there are one number.
	same := imageOf(t, map[string][]string{"a": {"s", "s"}})
	if got := trace.In(same, trace.Places(from, list)); !slices.Equal(got, []uint32{0}) {
		t.Errorf("got %v, want one number", got)
	}
}

// readStream reads a stream to its end and returns what encodes to it.
func readStream(r io.Reader) (list []uint32, coming int, chunks []trace.Chunk, err error) {
	tr := trace.NewReader(r)
	if list, coming, err = tr.List(); err != nil {
		return nil, 0, nil, err
	}
	for {
		c, err := tr.Next()
		if err == io.EOF {
			if _, again := tr.Next(); again != io.EOF {
				return nil, 0, nil, fmt.Errorf("the end was there once: %v", again)
			}
			return list, coming, chunks, nil
		}
		if err != nil {
			return nil, 0, nil, err
		}
		c.Stored = bytes.Clone(c.Stored)
		chunks = append(chunks, c)
	}
}

func TestAStreamReadsBack(t *testing.T) {
	list, coming, chunks, err := readStream(bytes.NewReader(aStream(t)))
	if err != nil || !slices.Equal(list, []uint32{7, 0, 3, 70000}) || coming != 3 || len(chunks) != 2 {
		t.Fatalf("got %v, %d, %d chunks, %v", list, coming, len(chunks), err)
	}
	if p, err := chunks[0].Plain(nil); err != nil || string(p) != strings.Repeat("chunk ", 20) || chunks[0].Number != 3 {
		t.Errorf("got %q of %d, %v", p, chunks[0].Number, err)
	}
	var b bytes.Buffer
	if err := trace.NewWriter(&b).Close(); err != nil {
		t.Fatal(err)
	}
	if list, coming, chunks, err := readStream(&b); err != nil || len(list)+coming+len(chunks) != 0 {
		t.Errorf("a stream without a list: %v, %d, %v, %v", list, coming, chunks, err)
	}
}

// streamWith writes parts that the writer would refuse.
func streamWith(parts ...[]byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte("QRYHINTS"), 1)
	return append(b, slices.Concat(parts...)...)
}

func aPart(kind, codec byte, size, plain uint32, payload ...byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte{kind, codec, 0, 0}, size)
	return append(binary.LittleEndian.AppendUint32(b, plain), payload...)
}

func TestStreamsThatLieAreRefused(t *testing.T) {
	list := aPart(5, 0, 12, 12, 1, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0)
	c7, c8 := aPart(6, 0, 5, 1, 7, 0, 0, 0, 'x'), aPart(6, 0, 5, 1, 8, 0, 0, 0, 'x')
	end := aPart(255, 0, 0, 0)
	if _, _, _, err := readStream(bytes.NewReader(streamWith(list, c7, end))); err != nil {
		t.Fatal(err)
	}
	var sum [][]byte
	many := aPart(5, 0, 4+4*5, 4+4*5, 5, 0, 0, 0)
	for n := range byte(5) {
		many = append(many, n, 0, 0, 0)
		p := bytes.Repeat([]byte{n}, chunk.MaxSize)
		_, s := pack.Compress(nil, p)
		sum = append(sum, append(aPart(6, 1, uint32(len(s))+4, chunk.MaxSize, n, 0, 0, 0), s...))
	}
	other := bytes.Clone(list)
	other[2] = 1
	for name, b := range map[string][]byte{
		"no preamble":                 slices.Concat(list, end),
		"a chunk without a list":      streamWith(c7, end),
		"two lists":                   streamWith(list, list, end),
		"a chunk that was not coming": streamWith(list, c8, end),
		"a chunk twice":               streamWith(list, c7, c7, end),
		"a chunk after the end":       streamWith(list, end, c7),
		"an unknown part":             streamWith(list, aPart(7, 0, 0, 0), end),
		"a reserved byte":             streamWith(other, end),
		"more coming than there are":  streamWith(aPart(5, 0, 8, 8, 2, 0, 0, 0, 7, 0, 0, 0), end),
		"a number twice":              streamWith(aPart(5, 0, 12, 12, 1, 0, 0, 0, 7, 0, 0, 0, 7, 0, 0, 0), end),
		"an empty list":               streamWith(aPart(5, 0, 4, 4, 0, 0, 0, 0), end),
		"a list of 4 GiB":             streamWith(aPart(5, 0, 1<<32-4, 1<<32-4)),
		"a list of odd length":        streamWith(aPart(5, 0, 9, 9, 1, 0, 0, 0, 7, 0, 0, 0, 0), end),
		"a chunk of 4 GiB":            streamWith(list, aPart(6, 0, 1<<32-1, 1<<32-5)),
		"a chunk of nothing":          streamWith(list, aPart(6, 0, 4, 0, 7, 0, 0, 0), end),
		"a chunk without its number":  streamWith(list, aPart(6, 0, 3, 1, 7, 0, 0), end),
		"raw of another length":       streamWith(list, aPart(6, 0, 5, 2, 7, 0, 0, 0, 'x'), end),
		"zstd that is no shorter":     streamWith(list, aPart(6, 1, 5, 1, 7, 0, 0, 0, 'x'), end),
		"an unknown codec":            streamWith(list, aPart(6, 2, 5, 2, 7, 0, 0, 0, 'x'), end),
		"an end with content":         streamWith(list, aPart(255, 0, 1, 1, 0)),
		"more than 32 MiB":            streamWith(append([][]byte{many}, append(sum, end)...)...),
	} {
		if _, _, _, err := readStream(bytes.NewReader(b)); !errors.Is(err, trace.ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, _, err := readStream(bytes.NewReader(streamWith(append([][]byte{many}, append(sum[:4], end)...)...))); err != nil {
		t.Errorf("exactly 32 MiB: %v", err)
	}
	whole := aStream(t)
	for n := range whole {
		if _, _, _, err := readStream(bytes.NewReader(whole[:n])); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
	whole[8] = 2
	if _, _, _, err := readStream(bytes.NewReader(whole)); !errors.Is(err, trace.ErrVersion) {
		t.Errorf("another version: %v", err)
	}
}

func TestAWriterRefusesWhatAReaderWould(t *testing.T) {
	w := trace.NewWriter(io.Discard)
	if w.Chunk(stored(7, []byte("x"))) == nil || w.List([]uint32{1, 1}, 1) == nil || w.List([]uint32{1}, 2) == nil {
		t.Error("a chunk without a list, a number twice or more coming than there are was written")
	}
	if err := w.List([]uint32{7, 8}, 1); err != nil {
		t.Fatal(err)
	}
	if w.List([]uint32{7}, 1) == nil || w.Chunk(stored(8, []byte("x"))) == nil {
		t.Error("a second list or a chunk that is not coming was written")
	}
	if err := w.Chunk(stored(7, []byte("x"))); err != nil {
		t.Fatal(err)
	}
	if w.Chunk(stored(7, []byte("x"))) == nil {
		t.Error("a chunk was written twice")
	}
}

// A list is merged from any runs without order among them.
func TestMergingDoesNotDependOnTheOrderOfRuns(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var runs [][]uint32
	for range trace.MaxRuns {
		var run []uint32
		for _, n := range rnd.Perm(300)[:200] {
			run = append(run, uint32(n))
		}
		runs = append(runs, run)
	}
	want := trace.Merge(runs)
	for range 5 {
		rnd.Shuffle(len(runs), func(i, j int) { runs[i], runs[j] = runs[j], runs[i] })
		if got := trace.Merge(runs); !slices.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}
