package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"

	"quarry/converter/layer"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/image"
)

// readWith reads a layer with limits and a chunk size of its own.
func readWith(t *testing.T, blob []byte, size uint32, limits layer.Limits) (*image.LayerRecord, *chunks, error) {
	t.Helper()
	c := &chunks{}
	rec, err := layer.Read(t.Context(), bytes.NewReader(blob), describe(blob), c, layer.Config{ChunkSize: size, Limits: limits})
	return rec, c, err
}

// threeFiles is a plain layer of a MiB that does not compress to nothing.
func threeFiles(t *testing.T) []byte {
	t.Helper()
	var b strings.Builder
	for i := range 50_000 {
		fmt.Fprintf(&b, "%d ", i*i)
	}
	s := b.String()
	return testimage.Tar(t, testimage.File("one", s), testimage.File("two", s[:1<<18]), testimage.File("three", s[1000:]))
}

func TestGzipMembersAreReadToTheLast(t *testing.T) {
	plain := threeFiles(t)
	want, _ := mustRead(t, plain)
	var every64K []int
	for i := 64 << 10; i < len(plain); i += 64 << 10 {
		every64K = append(every64K, i)
	}
	two := len(testimage.Tar(t, testimage.File("one", strings.Repeat(" ", int(want.Entries[0].Size))))) - 1024
	for name, cuts := range map[string][]int{
		"every 64 KiB":                  every64K,
		"in the middle of a header":     {100, two + 256},
		"with empty members in between": {0, 512, 512, 512, two, two},
		"one byte each at the start":    {1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
		"before the end marker":         {len(plain) - 1024, len(plain) - 512},
	} {
		t.Run(name, func(t *testing.T) {
			rec, c := mustRead(t, members(t, plain, cuts...))
			if rec.DiffID != chunk.Sum(plain) || len(rec.Entries) != 3 {
				t.Fatalf("diffID %s and %d entries", rec.DiffID, len(rec.Entries))
			}
			for i, e := range rec.Entries {
				if c.content(t, e); e.Chunks[len(e.Chunks)-1] != want.Entries[i].Chunks[len(e.Chunks)-1] {
					t.Errorf("%s has other content", e.Name)
				}
			}
		})
	}
}

// estargz lays out an eStargz blob: each header and each chunk a member of its
// own, then the table of contents as an entry, then the footer, an empty member
// whose header has an extra field.
func estargz(t *testing.T, plain []byte) (blob, whole []byte) {
	t.Helper()
	toc, err := json.Marshal(map[string]any{"version": 1, "entries": []any{}})
	if err != nil {
		t.Fatal(err)
	}
	entries := plain[:len(plain)-1024]
	tocTar := testimage.Tar(t, testimage.File("stargz.index.json", string(toc)))
	for i := 0; i < len(entries); i += 1 << 18 {
		blob = append(blob, testimage.Gzip(t, entries[i:min(i+1<<18, len(entries))])...)
	}
	off := len(blob)
	blob = append(blob, testimage.Gzip(t, tocTar)...)
	var footer bytes.Buffer
	w, err := gzip.NewWriterLevel(&footer, gzip.NoCompression)
	if err != nil {
		t.Fatal(err)
	}
	w.Extra = append([]byte("SG\x16\x00"), fmt.Sprintf("%016xSTARGZ", off)...)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return append(blob, footer.Bytes()...), append(bytes.Clone(entries), tocTar...)
}

func TestAnEStargzLayerIsALayer(t *testing.T) {
	blob, whole := estargz(t, threeFiles(t))
	rec, _ := mustRead(t, blob)
	if rec.DiffID != chunk.Sum(whole) || len(rec.Entries) != 4 || rec.Entries[3].Name != "stargz.index.json" {
		t.Errorf("diffID %s and %d entries", rec.DiffID, len(rec.Entries))
	}
}

func TestEndsOfArchives(t *testing.T) {
	whole := testimage.Tar(t, testimage.File("a", strings.Repeat("a", 700)))
	entry := whole[:len(whole)-1024] // a PAX header and its records, the header, two blocks of content
	tests := map[string]struct {
		plain []byte
		err   string
	}{
		"no end block":                      {entry, ""},
		"one":                               {append(bytes.Clone(entry), make([]byte, 512)...), ""},
		"two":                               {whole, ""},
		"twenty":                            {append(bytes.Clone(entry), make([]byte, 20*512)...), ""},
		"half a block":                      {append(bytes.Clone(entry), make([]byte, 100)...), "truncated"},
		"cut in the padding":                {entry[:len(entry)-100], ""},
		"cut where the padding begins":      {entry[:len(entry)-(1024-700)], ""},
		"cut in the content":                {entry[:len(entry)-(1024-699)], "truncated"},
		"cut after a header":                {entry[:len(entry)-1024], "truncated"},
		"cut in a header":                   {entry[:len(entry)-1024-10], "truncated"},
		"cut after a PAX header":            {entry[:1024], "truncated"},
		"one byte behind the end":           {append(bytes.Clone(whole), 1), "other than zeros"},
		"zeros and a byte behind the end":   {append(append(bytes.Clone(whole), make([]byte, 1<<20)...), 1), "other than zeros"},
		"a zero block with an entry behind": {append(append(bytes.Clone(entry), make([]byte, 512)...), entry...), "end marker with entries after it"},
	}
	for name, tt := range tests {
		for codec, pack := range map[string]func(testing.TB, []byte) []byte{"tar": func(_ testing.TB, p []byte) []byte { return p }, "gzip": testimage.Gzip, "zstd": testimage.Zstd} {
			t.Run(name+" as "+codec, func(t *testing.T) {
				rec, _, err := read(t, pack(t, tt.plain))
				if tt.err != "" {
					wantError(t, err, tt.err)
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if rec.DiffID != chunk.Sum(tt.plain) || len(rec.Entries) != 1 || rec.Entries[0].Size != 700 {
					t.Errorf("diffID %s, entries %+v", rec.DiffID, rec.Entries)
				}
			})
		}
	}
}

// sparsePAX makes an archive with a sparse file in form 0.1: extents are pairs
// of offset and content.
func sparsePAX(t *testing.T, size int64, data string, extents string) []byte {
	t.Helper()
	n := 0
	if extents != "" {
		n = (strings.Count(extents, ",") + 1) / 2
	}
	e := testimage.File("f", data)
	e.PAXRecords = map[string]string{
		"GNX.sparse.size": fmt.Sprint(size), "GNX.sparse.numblocks": fmt.Sprint(n), "GNX.sparse.map": extents,
		"GNX.sparse.major": "0", "GNX.sparse.minor": "1",
	}
	// archive/tar refuses to write GNU's keys, but keeps these as long.
	return bytes.ReplaceAll(testimage.Tar(t, e, testimage.File("end", "intact")), []byte("GNX.sparse"), []byte("GNU.sparse"))
}

// 128 GiB of nothing are half a million digests of 32 bytes in the record, and
// no more: no chunk of them is filled, hashed or stored, but one.
func TestAHoleCostsItsDigestsAndNothingElse(t *testing.T) {
	const size, s = 128 << 30, chunk.DefaultSize
	blob := testimage.Gzip(t, sparsePAX(t, size, "x", fmt.Sprintf("%d,1", size/2)))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	rec, c, err := readWith(t, blob, s, layer.Limits{MaxChunks: size/s + 1}) // one more for the file behind it
	if err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if f := rec.Entries[0]; f.Size != size || int64(len(f.Chunks)) != size/s || rec.Entries[1].Size != 6 {
		t.Fatalf("file of %d bytes in %d chunks", f.Size, len(f.Chunks))
	}
	want := make([]byte, s)
	zero := chunk.Sum(want)
	want[0] = 'x'
	for k, d := range rec.Entries[0].Chunks {
		if w := zero; k == size/2/s && d != chunk.Sum(want) || k != size/2/s && d != w {
			t.Fatalf("chunk %d is %s", k, d)
		}
	}
	if c.puts != 3 { // zeros, the x, the file behind
		t.Errorf("%d chunks were stored", c.puts)
	}
	// Digests in a slice that grows by a quarter: less than eight times 16 MiB.
	if grew := after.TotalAlloc - before.TotalAlloc; grew > 128<<20 {
		t.Errorf("%d bytes were allocated", grew)
	}
}

func TestSparseMapsThatLieAreRefused(t *testing.T) {
	tests := map[string]struct {
		size          int64
		data, extents string
		err           string
	}{
		"extents and holes":        {20_000, "abc", "0,1,5000,2", ""},
		"extents of no length":     {20_000, "abc", "0,1,5000,2,20000,0", ""},
		"a hole alone":             {20_000, "", "20000,0", ""},
		"no map":                   {20_000, "", "", ""},
		"the whole file":           {3, "abc", "0,3", ""},
		"extents out of order":     {20_000, "abc", "5000,2,0,1", "invalid tar header"},
		"extents that overlap":     {20_000, "abc", "0,2,1,1", "invalid tar header"},
		"an extent past the end":   {20_000, "abc", "0,1,19999,2", "invalid tar header"},
		"a negative extent":        {20_000, "abc", "0,-1", "invalid tar header"},
		"an offset that overflows": {20_000, "abc", "9223372036854775807,2", "invalid tar header"},
		"half a pair":              {20_000, "abc", "0,1,2", "invalid tar header"},
		"words":                    {20_000, "abc", "a,b", "invalid tar header"},
		"less than there is":       {20_000, "abc", "0,1,5000,1", "speaks of 2 bytes, the entry has 3"},
		"more than there is":       {20_000, "abc", "0,1,5000,3", "speaks of 4 bytes, the entry has 3"},
		"a negative size":          {-1, "", "", "invalid tar header"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			rec, c, err := read(t, sparsePAX(t, tt.size, tt.data, tt.extents))
			if tt.err != "" {
				wantError(t, err, tt.err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Trim(c.content(t, rec.Entries[0]), "\x00"); strings.ReplaceAll(got, "\x00", "") != tt.data {
				t.Errorf("content %q", got)
			}
			if got := c.content(t, rec.Entries[1]); got != "intact" {
				t.Errorf("the file behind it has %q", got)
			}
		})
	}
}

// scattered is a sparse file whose every chunk holds one byte: 20 bytes of map
// make a chunk of 4096.
func scattered(t *testing.T, n int) []byte {
	var extents []string
	for i := range n {
		extents = append(extents, fmt.Sprintf("%d,1", i*testChunk))
	}
	return sparsePAX(t, int64(n*testChunk), strings.Repeat("x", n), strings.Join(extents, ","))
}

// Each limit lets through what it names and nothing more.
func TestEveryLimitIsExact(t *testing.T) {
	two := testimage.Tar(t, testimage.File("a", "x"), testimage.File("b", strings.Repeat("y", 3*testChunk)))
	meta := testimage.Tar(t, testimage.Symlink("name", "target").WithXattr("user.k", "value"))
	records := testimage.Tar(t, testimage.File("f", "").WithXattr("user.a", "").WithXattr("user.b", "1").WithXattr("user.c", "2"))
	zeros := testimage.Gzip(t, make([]byte, 1<<20))
	ratio := int64(1<<20) / int64(len(zeros))
	// A PAX header is a block, its records are another, then comes the file's own;
	// archive/tar reads nothing else before the content.
	const headers = 3 * 512
	nameless := testimage.Tar(t, testimage.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "f", Format: tar.FormatGNU, ModTime: time.Unix(1, 0)}})
	tests := []struct {
		name  string
		blob  []byte
		limit int64
		set   func(*layer.Limits, int64)
	}{
		{"MaxEntries", two, 2, func(l *layer.Limits, n int64) { l.MaxEntries = int(n) }},
		{"MaxBytes", two, int64(len(two)), func(l *layer.Limits, n int64) { l.MaxBytes = n }},
		{"MaxBytes", testimage.Gzip(t, two), int64(len(two)), func(l *layer.Limits, n int64) { l.MaxBytes = n }},
		{"MaxBytes", scattered(t, 1000), 1000*testChunk + 6, func(l *layer.Limits, n int64) { l.MaxBytes = n }},
		{"MaxChunks", two, 4, func(l *layer.Limits, n int64) { l.MaxChunks = n }},
		{"MaxChunks", sparsePAX(t, 100*testChunk+1, "", ""), 102, func(l *layer.Limits, n int64) { l.MaxChunks = n }},
		{"MaxMetadata", meta, int64(len("name" + "target" + "user.k" + "value")), func(l *layer.Limits, n int64) { l.MaxMetadata = n }},
		{"MaxHeader", testimage.Tar(t, testimage.File("f", "")), headers, func(l *layer.Limits, n int64) { l.MaxHeader = n }},
		{"MaxHeader", nameless, 512, func(l *layer.Limits, n int64) { l.MaxHeader = n }},
		{"MaxRecords", records, 4, func(l *layer.Limits, n int64) { l.MaxRecords = int(n) }}, // and mtime
		{"MaxRatio", zeros, ratio, func(l *layer.Limits, n int64) { l.MaxRatio, l.RatioFloor = n, 1 }},
		{"MaxRatio", zeros, 1 << 20, func(l *layer.Limits, n int64) { l.MaxRatio, l.RatioFloor = 1, n }},
	}
	for _, tt := range tests {
		var at, below layer.Limits
		tt.set(&at, tt.limit)
		tt.set(&below, tt.limit-1)
		if _, _, err := readWith(t, tt.blob, testChunk, at); err != nil {
			t.Errorf("%s of %d: %v", tt.name, tt.limit, err)
		}
		_, _, err := readWith(t, tt.blob, testChunk, below)
		wantError(t, err, "limit "+tt.name)
	}
}

// Headers without a file, one after the other, would be read for ever.
func TestHeadersWithoutAFileEnd(t *testing.T) {
	var b bytes.Buffer
	e := testimage.Tar(t, testimage.File("f", ""))
	for b.Len() < 5<<20 {
		b.Write(e[:1024]) // PAX header and records
	}
	_, _, err := read(t, append(b.Bytes(), e...))
	wantError(t, err, "limit MaxHeader")
}

// What scattered bytes expand to is bounded by the ratio as compression is.
func TestScatteredBytesAreBoundedByTheRatio(t *testing.T) {
	_, _, err := readWith(t, scattered(t, 1000), testChunk, layer.Limits{MaxRatio: 10, RatioFloor: 1 << 20})
	wantError(t, err, "sparse files expand", "limit MaxRatio")
}

func TestDecompressKeepsTheLimits(t *testing.T) {
	plain := threeFiles(t)
	for _, blob := range [][]byte{plain, testimage.Gzip(t, plain), testimage.Zstd(t, plain)} {
		for _, most := range []int64{int64(len(plain)), int64(len(plain)) - 1} {
			r, err := layer.Decompress(bytes.NewReader(blob), int64(len(blob)), layer.Limits{MaxBytes: most})
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			_, err = got.ReadFrom(r)
			if fits := most == int64(len(plain)); fits != (err == nil) || fits && !bytes.Equal(got.Bytes(), plain) {
				t.Errorf("%d bytes, limit %d: error %v", got.Len(), most, err)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestCancelEndsAHole(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	blob := sparsePAX(t, 1<<34, "", "")
	p := putFunc(func(_ context.Context, p []byte) (chunk.Digest, error) { cancel(); return chunk.Sum(p), nil })
	_, err := layer.Read(ctx, bytes.NewReader(blob), describe(blob), p, layer.Config{ChunkSize: testChunk})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// Readers above one that has ended ask it again, and docker archives put one
// decompressor on another.
func TestADecompressorThatHasEndedStaysSo(t *testing.T) {
	plain := testimage.Tar(t, testimage.File("f", "x"))
	gz := testimage.Gzip(t, plain)
	for name, tt := range map[string]struct {
		blob []byte
		want error
	}{
		"gzip":             {gz, io.EOF},
		"two gzip members": {append(bytes.Clone(gz), gz...), io.EOF},
		"zstd":             {testimage.Zstd(t, plain), io.EOF},
		"cut gzip":         {gz[:len(gz)-4], io.ErrUnexpectedEOF},
	} {
		r, err := layer.Decompress(bytes.NewReader(tt.blob), int64(len(tt.blob)), layer.Limits{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(io.Discard, r)
		if wantNone := errors.Is(tt.want, io.EOF); wantNone != (err == nil) {
			t.Errorf("%s: error %v", name, err)
		}
		for range 3 {
			if n, err := r.Read(make([]byte, 100)); n != 0 || !errors.Is(err, tt.want) {
				t.Errorf("%s, asked again: %d bytes, error %v", name, n, err)
			}
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}
