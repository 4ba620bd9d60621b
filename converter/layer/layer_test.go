package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/converter/layer"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

const testChunk = chunk.MinSize

// chunks is a Putter that keeps what it gets.
type chunks struct {
	mu   sync.Mutex
	m    map[chunk.Digest][]byte
	puts int
}

func (c *chunks) Put(_ context.Context, p []byte) (chunk.Digest, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := chunk.Sum(p)
	if c.m == nil {
		c.m = map[chunk.Digest][]byte{}
	}
	c.m[d] = bytes.Clone(p)
	c.puts++
	return d, nil
}

// content puts a file together again.
func (c *chunks) content(t *testing.T, e image.Entry) string {
	t.Helper()
	var b bytes.Buffer
	for _, d := range e.Chunks {
		b.Write(c.m[d])
	}
	if int64(b.Len()) != e.Size || int64(len(e.Chunks)) != chunk.Count(e.Size, testChunk) {
		t.Errorf("%s: %d bytes in %d chunks, size says %d", e.Name, b.Len(), len(e.Chunks), e.Size)
	}
	return b.String()
}

// describe gives the descriptor of a blob that is what it should be.
func describe(p []byte) layer.Descriptor {
	return layer.Descriptor{Digest: chunk.Sum(p), Size: int64(len(p))}
}

func read(t *testing.T, blob []byte) (*image.LayerRecord, *chunks, error) {
	t.Helper()
	c := &chunks{}
	rec, err := layer.Read(t.Context(), bytes.NewReader(blob), describe(blob), c, layer.Config{ChunkSize: testChunk})
	return rec, c, err
}

func mustRead(t *testing.T, blob []byte) (*image.LayerRecord, *chunks) {
	t.Helper()
	rec, c, err := read(t, blob)
	if err != nil {
		t.Fatal(err)
	}
	return rec, c
}

func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

func TestEntriesAreNormalised(t *testing.T) {
	mtime := time.Unix(-2, 500_000_000)
	hdr := func(h tar.Header) testimage.Entry { return testimage.Entry{Header: h} }
	archive := testimage.Tar(t,
		testimage.Dir("./").WithMode(0o40755),
		testimage.Dir("/usr//./bin").WithMode(0o1777),
		testimage.File("./usr/bin/x", "hello").WithMode(0o104755).WithMtime(mtime).WithXattr("user.b", "2\x00").WithXattr("user.a", ""),
		hdr(tar.Header{Typeflag: tar.TypeReg, Name: "ids", Uid: 70000, Gid: 1<<32 - 2}),
		testimage.Symlink("s", "../a/./b/"),
		testimage.Hardlink("h", "./usr/bin/x"),
		testimage.Device("c", tar.TypeChar, 4095, 1<<20-1),
		testimage.Device("b", tar.TypeBlock, 8, 1),
		hdr(tar.Header{Typeflag: tar.TypeFifo, Name: "p"}),
		testimage.File("a/../../b", ""),
		testimage.File("d/.wh.x", ""),
		testimage.File("caf\xe9", ""),
	)
	rec, c := mustRead(t, archive)
	m, ns := testimage.Mtime.Unix(), uint32(testimage.Mtime.Nanosecond())
	want := []image.Entry{
		{Name: "", Type: image.TypeDir, Mode: 0o755, Mtime: m, MtimeNsec: ns},
		{Name: "usr/bin", Type: image.TypeDir, Mode: 0o1777, Mtime: m, MtimeNsec: ns},
		{Name: "usr/bin/x", Type: image.TypeReg, Mode: 0o4755, Mtime: -2, MtimeNsec: 500_000_000, Size: 5,
			Xattrs: []rafs.Xattr{{Name: "user.a", Value: []byte{}}, {Name: "user.b", Value: []byte("2\x00")}},
			Chunks: []chunk.Digest{chunk.Sum([]byte("hello"))}},
		{Name: "ids", Type: image.TypeReg, UID: 70000, GID: 1<<32 - 2, Mtime: m, MtimeNsec: ns},
		{Name: "s", Type: image.TypeSymlink, Mode: 0o777, Mtime: m, MtimeNsec: ns, Link: "../a/./b/"},
		{Name: "h", Type: image.TypeLink, Mode: 0o644, Mtime: m, MtimeNsec: ns, Link: "./usr/bin/x"},
		{Name: "c", Type: image.TypeChar, Mode: 0o600, Mtime: m, MtimeNsec: ns, Major: 4095, Minor: 1<<20 - 1},
		{Name: "b", Type: image.TypeBlock, Mode: 0o600, Mtime: m, MtimeNsec: ns, Major: 8, Minor: 1},
		{Name: "p", Type: image.TypeFIFO, Mtime: m, MtimeNsec: ns},
		{Name: "a/../../b", Type: image.TypeReg, Mode: 0o644, Mtime: m, MtimeNsec: ns},
		{Name: "d/.wh.x", Type: image.TypeReg, Mode: 0o644, Mtime: m, MtimeNsec: ns},
		{Name: "caf\xe9", Type: image.TypeReg, Mode: 0o644, Mtime: m, MtimeNsec: ns},
	}
	if diff := cmp.Diff(rec.Entries, want); diff != "" {
		t.Errorf("entries (-got +want):\n%s", diff)
	}
	if got := c.content(t, rec.Entries[2]); got != "hello" {
		t.Errorf("content %q", got)
	}
}

func TestRecordDescribesTheWholeLayer(t *testing.T) {
	plain := append(testimage.Tar(t, testimage.File("f", "x")), make([]byte, 20*512)...)
	blob := testimage.Gzip(t, plain)
	rec, _ := mustRead(t, blob)
	got := *rec
	got.Entries = nil
	want := image.LayerRecord{ChunkSize: testChunk, Layer: chunk.Sum(blob), DiffID: chunk.Sum(plain), Size: int64(len(blob)), PlainSize: int64(len(plain))}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("record (-got +want):\n%s", diff)
	}
}

func TestFilesAreSplitAtChunkBoundaries(t *testing.T) {
	for _, size := range []int{0, 1, testChunk - 1, testChunk, testChunk + 1, 3 * testChunk, 5*testChunk + 7} {
		body := strings.Repeat("0123456789abcde", size/15+1)[:size]
		rec, c := mustRead(t, testimage.Tar(t, testimage.File("f", body), testimage.File("next", "n")))
		if got := c.content(t, rec.Entries[0]); got != body {
			t.Errorf("size %d: content differs", size)
		}
		if got := c.content(t, rec.Entries[1]); got != "n" {
			t.Errorf("size %d: the entry after it has %q", size, got)
		}
	}
}

// members compresses p as gzip members that end at each of the cuts.
func members(t *testing.T, p []byte, cuts ...int) []byte {
	var out []byte
	last := 0
	for _, c := range append(cuts, len(p)) {
		out = append(out, testimage.Gzip(t, p[last:c])...)
		last = c
	}
	return out
}

func TestCompressionIsDecidedByTheBytes(t *testing.T) {
	plain := testimage.Tar(t, testimage.File("a", strings.Repeat("a", 100_000)), testimage.File("b", "b"))
	magicName := testimage.Tar(t, testimage.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "\x1f\x8b\x08", Format: tar.FormatGNU, ModTime: time.Unix(1, 0)}})
	skippable := []byte("\x5a\x2a\x4d\x18\x04\x00\x00\x00abcd")
	cat := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	tests := map[string]struct{ blob, plain []byte }{
		"plain tar":                           {plain, plain},
		"plain tar that begins as gzip does":  {magicName, magicName},
		"nothing at all":                      {nil, nil},
		"gzip":                                {testimage.Gzip(t, plain), plain},
		"gzip members cut in header and data": {members(t, plain, 100, 100, 512, 70_000), plain},
		"gzip with zeros after the trailer":   {cat(testimage.Gzip(t, plain), make([]byte, 10)), plain},
		"gzip of nothing":                     {testimage.Gzip(t, nil), nil},
		"zstd":                                {testimage.Zstd(t, plain), plain},
		"zstd frames and skippable frames":    {cat(skippable, testimage.Zstd(t, plain[:700]), skippable, testimage.Zstd(t, plain[700:]), skippable), plain},
		"only end blocks":                     {make([]byte, 1024), make([]byte, 1024)},
		"no end block":                        {plain[:len(plain)-1024], plain[:len(plain)-1024]},
		"one end block":                       {plain[:len(plain)-512], plain[:len(plain)-512]},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			rec, _ := mustRead(t, tt.blob)
			if rec.DiffID != chunk.Sum(tt.plain) || rec.PlainSize != int64(len(tt.plain)) {
				t.Errorf("diffID %s of %d bytes, want %s of %d", rec.DiffID, rec.PlainSize, chunk.Sum(tt.plain), len(tt.plain))
			}
		})
	}
}

func TestBadLayersAreRefused(t *testing.T) {
	plain := testimage.Tar(t, testimage.File("a", strings.Repeat("a", 1000)), testimage.File("b", "bb"))
	gz := testimage.Gzip(t, plain)
	one := testimage.Tar(t, testimage.File("a", "x").WithMtime(time.Unix(1, 0)))
	two := one[:1024] // an entry without end marker
	raw := func(h tar.Header) []byte {
		h.Format = tar.FormatGNU
		return testimage.Tar(t, testimage.Entry{Header: h})
	}
	cat := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	block := make([]byte, 512)
	tests := map[string]struct {
		blob  []byte
		words []string
	}{
		"xz":                              {[]byte("\xfd7zXZ\x00" + strings.Repeat("x", 600)), []string{"xz", "not supported"}},
		"bzip2":                           {[]byte("BZh9" + strings.Repeat("x", 600)), []string{"bzip2", "not supported"}},
		"text":                            {[]byte(strings.Repeat("hello ", 600)), []string{"neither a tar archive"}},
		"short text":                      {[]byte("hello"), []string{"5 bytes", "too short"}},
		"gzip cut in the member":          {gz[:len(gz)-20], []string{"unexpected EOF"}},
		"gzip cut in the trailer":         {gz[:len(gz)-3], []string{"unexpected EOF"}},
		"gzip header only":                {gz[:10], []string{"unexpected EOF"}},
		"gzip with garbage after it":      {cat(gz, []byte("GARBAGE")), []string{"after a gzip member"}},
		"gzip with garbage after zeros":   {cat(gz, block, []byte("G")), []string{"after the last gzip member", "other than zeros"}},
		"gzip with a wrong checksum":      {flip(gz, len(gz)-6), []string{"gzip", "checksum"}},
		"zstd cut":                        {testimage.Zstd(t, plain)[:40], []string{"zstd"}},
		"zstd with garbage after it":      {cat(testimage.Zstd(t, plain), []byte("GARBAGE!")), []string{"zstd"}},
		"content after the end marker":    {cat(plain, []byte("x")), []string{"end marker", "other than zeros"}},
		"entries after the end marker":    {cat(plain, one), []string{"end marker", "other than zeros"}},
		"a zero block between entries":    {cat(two, block, one), []string{`entry "a"`, "end marker with entries after it"}},
		"truncated in a header":           {plain[:1024+512+100], []string{`entry "a"`, "truncated"}},
		"truncated in content":            {two[:512], []string{`entry "a"`, "content at 0 of 1", "truncated"}},
		"a size beyond the archive":       {claimSize(t, 1<<40), []string{`entry "big"`, "limit MaxBytes"}},
		"a negative size":                 {binarySize(t, 0xff), []string{"tar header after the start"}},
		"an unknown type":                 {raw(tar.Header{Typeflag: 'Z', Name: "odd"}), []string{`entry "odd"`, "type 'Z'"}},
		"a GNU dump directory":            {raw(tar.Header{Typeflag: 'D', Name: "odd"}), []string{`entry "odd"`, "type 'D'"}},
		"an entry without a name":         {raw(tar.Header{Typeflag: tar.TypeReg, Name: ""}), []string{"no name"}},
		"a file as root":                  {raw(tar.Header{Typeflag: tar.TypeReg, Name: "."}), []string{"root", "directory"}},
		"a symlink without target":        {raw(tar.Header{Typeflag: tar.TypeSymlink, Name: "s"}), []string{`entry "s"`, "without a target"}},
		"a negative uid":                  {raw(tar.Header{Typeflag: tar.TypeReg, Name: "f", Uid: -1}), []string{`entry "f"`, "uid -1"}},
		"a uid that no file can have":     {raw(tar.Header{Typeflag: tar.TypeReg, Name: "f", Uid: 1<<32 - 1}), []string{`entry "f"`, "uid 4294967295"}},
		"a gid that no file can have":     {raw(tar.Header{Typeflag: tar.TypeReg, Name: "f", Gid: 1<<32 - 1}), []string{`entry "f"`, "gid 4294967295"}},
		"a gid of 33 bits":                {raw(tar.Header{Typeflag: tar.TypeReg, Name: "f", Gid: 1 << 32}), []string{`entry "f"`, "gid 4294967296"}},
		"a device number that is too big": {raw(tar.Header{Typeflag: tar.TypeChar, Name: "c", Devmajor: 4096}), []string{`entry "c"`, "4096:0"}},
		"a sparse version nobody knows":   {sparseVersion(t, "2"), []string{`entry "f"`, "sparse format 2.0"}},
		"an xattr that is not base64":     {libarchiveXattr(t, "user.x", "!!"), []string{`entry "f"`, `"user.x"`}},
		"an xattr without a name":         {testimage.Tar(t, testimage.File("f", "").WithXattr("", "v")), []string{"xattr has no name"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := read(t, tt.blob)
			wantError(t, err, append(tt.words, chunk.Sum(tt.blob).String())...)
		})
	}
}

// flip returns p with one byte changed.
func flip(p []byte, i int) []byte {
	p = bytes.Clone(p)
	p[i] ^= 1
	return p
}

// claimSize makes an archive whose only header promises n bytes.
func claimSize(t *testing.T, n int64) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "big", Size: n, Format: tar.FormatGNU}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// binarySize makes an archive whose size field is base-256 with that first byte.
func binarySize(t *testing.T, first byte) []byte {
	p := claimSize(t, 0)
	for i := 124; i < 136; i++ {
		p[i] = first
	}
	sum := 0
	for i, c := range p[:512] {
		if i >= 148 && i < 156 {
			c = ' '
		}
		sum += int(c)
	}
	copy(p[148:], fmt.Sprintf("%06o\x00 ", sum))
	return p
}

func sparseVersion(t *testing.T, major string) []byte {
	e := testimage.File("f", "1\n0\n")
	e.PAXRecords = map[string]string{"GNX.sparse.major": major, "GNX.sparse.minor": "0"}
	// archive/tar refuses to write GNU's keys, but keeps this one as long.
	return bytes.ReplaceAll(testimage.Tar(t, e), []byte("GNX.sparse"), []byte("GNU.sparse"))
}

func libarchiveXattr(t *testing.T, name, value string) []byte {
	e := testimage.File("f", "")
	e.PAXRecords = map[string]string{"LIBARCHIVE.xattr." + name: value}
	return testimage.Tar(t, e)
}

func TestLibarchiveXattrsAreDecoded(t *testing.T) {
	tests := map[string]struct {
		records map[string]string
		want    []rafs.Xattr
	}{
		"without padding":    {map[string]string{"LIBARCHIVE.xattr.user.x": "AQA"}, []rafs.Xattr{{Name: "user.x", Value: []byte{1, 0}}}},
		"with padding":       {map[string]string{"LIBARCHIVE.xattr.user.x": "AQA="}, []rafs.Xattr{{Name: "user.x", Value: []byte{1, 0}}}},
		"an encoded name":    {map[string]string{"LIBARCHIVE.xattr.user.a%3Db": "AQ"}, []rafs.Xattr{{Name: "user.a=b", Value: []byte{1}}}},
		"SCHILY's wins":      {map[string]string{"LIBARCHIVE.xattr.user.x": "AQ", "SCHILY.xattr.user.x": "s"}, []rafs.Xattr{{Name: "user.x", Value: []byte("s")}}},
		"others are ignored": {map[string]string{"SCHILY.fflags": "x", "comment": "y"}, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			e := testimage.File("f", "")
			e.PAXRecords = tt.records
			rec, _ := mustRead(t, testimage.Tar(t, e))
			if diff := cmp.Diff(rec.Entries[0].Xattrs, tt.want); diff != "" {
				t.Errorf("xattrs (-got +want):\n%s", diff)
			}
		})
	}
}

func TestGlobalPAXHeadersChangeNothing(t *testing.T) {
	global := testimage.Entry{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header",
		PAXRecords: map[string]string{"path": "elsewhere", "comment": "c"}}}
	rec, _ := mustRead(t, testimage.Tar(t, global, testimage.File("f", "x")))
	if len(rec.Entries) != 1 || rec.Entries[0].Name != "f" {
		t.Errorf("entries %+v, want f alone", rec.Entries)
	}
}

func TestTheBlobMustBeTheOneDescribed(t *testing.T) {
	blob := testimage.Gzip(t, testimage.Tar(t, testimage.File("f", "x")))
	other := testimage.Gzip(t, testimage.Tar(t, testimage.File("g", "y")))
	tests := map[string]struct {
		want  layer.Descriptor
		got   []byte
		words []string
	}{
		"another layer":       {layer.Descriptor{Digest: chunk.Sum(blob), Size: int64(len(other))}, other, []string{"blob has digest " + chunk.Sum(other).String()}},
		"a flipped byte":      {describe(blob), flip(blob, 30), []string{"blob has digest"}},
		"shorter than told":   {layer.Descriptor{Digest: chunk.Sum(blob), Size: int64(len(blob)) + 1}, blob, []string{"its descriptor says"}},
		"longer than told":    {describe(blob), append(bytes.Clone(blob), 0), []string{"longer than", "descriptor"}},
		"cut":                 {describe(blob), blob[:len(blob)/2], []string{"its descriptor says"}},
		"endless in the tail": {describe(blob), append(bytes.Clone(blob), make([]byte, 1<<20)...), []string{"longer than"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := layer.Read(t.Context(), bytes.NewReader(tt.got), tt.want, &chunks{}, layer.Config{ChunkSize: testChunk})
			wantError(t, err, append(tt.words, tt.want.Digest.String())...)
		})
	}
}

func TestLimitsAreKept(t *testing.T) {
	many := testimage.Tar(t, testimage.File("a", "x"), testimage.File("b", "y"))
	long := testimage.Tar(t, testimage.File(strings.Repeat("n/", 400)+"x", ""))
	bomb := testimage.Gzip(t, testimage.Tar(t, testimage.File("zeros", strings.Repeat("\x00", 4<<20))))
	tests := map[string]struct {
		blob   []byte
		limits layer.Limits
		word   string
	}{
		"entries":          {many, layer.Limits{MaxEntries: 1}, "MaxEntries"},
		"metadata":         {long, layer.Limits{MaxMetadata: 700}, "MaxMetadata"},
		"bytes":            {bomb, layer.Limits{MaxBytes: 1 << 20}, "MaxBytes"},
		"ratio":            {bomb, layer.Limits{MaxRatio: 100, RatioFloor: 1 << 20}, "MaxRatio"},
		"bytes of a claim": {claimSize(t, 1<<30), layer.Limits{MaxBytes: 1 << 20}, "MaxBytes"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := layer.Read(t.Context(), bytes.NewReader(tt.blob), describe(tt.blob), &chunks{}, layer.Config{ChunkSize: testChunk, Limits: tt.limits})
			wantError(t, err, tt.word)
		})
	}
}

func TestAClaimedSizeAllocatesNothing(t *testing.T) {
	blob := claimSize(t, 16<<30)
	n := testing.AllocsPerRun(1, func() {
		_, err := layer.Read(context.Background(), bytes.NewReader(blob), describe(blob), &chunks{}, layer.Config{ChunkSize: testChunk})
		wantError(t, err, "truncated")
	})
	if n > 1000 {
		t.Errorf("%v allocations", n)
	}
}

func TestHolesArePutOnce(t *testing.T) {
	body := strings.Repeat("\x00", 100*testChunk) + "x"
	rec, c := mustRead(t, testimage.Gzip(t, testimage.Tar(t, testimage.File("f", body), testimage.File("g", body))))
	if got := c.content(t, rec.Entries[1]); got != body {
		t.Error("content differs")
	}
	if c.puts != 3 { // the zero chunk, and each file's last
		t.Errorf("%d puts, want 3", c.puts)
	}
}

func TestErrorsOfTheStoreAndTheSourceComeThrough(t *testing.T) {
	blob := testimage.Gzip(t, testimage.Tar(t, testimage.File("f", "x")))
	errDisk := errors.New("disk is full")
	_, err := layer.Read(t.Context(), bytes.NewReader(blob), describe(blob), failing{errDisk}, layer.Config{ChunkSize: testChunk})
	if !errors.Is(err, errDisk) {
		t.Errorf("error %v, want %v", err, errDisk)
	}
	errRead := errors.New("cable is cut")
	_, err = layer.Read(t.Context(), io.MultiReader(bytes.NewReader(blob[:20]), iotest.ErrReader(errRead)), describe(blob), &chunks{}, layer.Config{ChunkSize: testChunk})
	if !errors.Is(err, errRead) {
		t.Errorf("error %v, want %v", err, errRead)
	}
}

type failing struct{ err error }

func (f failing) Put(context.Context, []byte) (chunk.Digest, error) { return chunk.Digest{}, f.err }

func TestCancelEndsTheRead(t *testing.T) {
	blob := testimage.Tar(t, testimage.File("f", strings.Repeat("abc", 10<<20)))
	ctx, cancel := context.WithCancel(t.Context())
	p := putFunc(func(ctx context.Context, p []byte) (chunk.Digest, error) { cancel(); return chunk.Sum(p), ctx.Err() })
	_, err := layer.Read(ctx, bytes.NewReader(blob), describe(blob), p, layer.Config{ChunkSize: testChunk})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
}

type putFunc func(context.Context, []byte) (chunk.Digest, error)

func (f putFunc) Put(ctx context.Context, p []byte) (chunk.Digest, error) { return f(ctx, p) }

func TestProgressEndsAtTheWholeLayer(t *testing.T) {
	blob := testimage.Gzip(t, testimage.Tar(t, testimage.File("f", strings.Repeat("abc", 1<<20))))
	var last int64
	_, err := layer.Read(t.Context(), iotest.HalfReader(bytes.NewReader(blob)), describe(blob), &chunks{}, layer.Config{ChunkSize: testChunk, Progress: func(n int64) {
		if n <= last {
			t.Errorf("progress %d after %d", n, last)
		}
		last = n
	}})
	if err != nil || last != int64(len(blob)) {
		t.Errorf("progress ended at %d of %d, error %v", last, len(blob), err)
	}
}
