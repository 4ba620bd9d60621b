package tree_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"quarry/converter/tree"
	"quarry/internal/need"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

func export(t testing.TB, tr *rafs.Tree, src store.BatchGetter) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := tree.Export(t.Context(), &b, tr, src); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestExportReadBackIsTheSameTree(t *testing.T) {
	c := content{}
	tr := sample(t, c)
	archive := export(t, tr, c)
	if len(archive)%10240 != 0 {
		t.Errorf("the archive has %d bytes, no multiple of 10240", len(archive))
	}
	back := merge(t, readTar(t, c, bytes.NewReader(archive)))
	if got, want := show(back, c), show(tr, c); got != want {
		t.Errorf("read back\n%s\nwant\n%s", got, want)
	}
	if got, want := tree.Digest(back), tree.Digest(tr); got != want {
		t.Errorf("read back the tree has digest %s, want %s", got, want)
	}
	if !bytes.Equal(archive, export(t, sample(t, c), c)) {
		t.Error("two exports of the same tree differ")
	}
}

func TestExportOrder(t *testing.T) {
	c := content{}
	tr := merge(t, layer(t, c, `
		f z "1"
		h a/y => z
		d a-b
		f a-b/c "2"
		f a-/d "2"
		f a.b "3"
		f a0 "4"
		l a/l -> z`))
	var got []string
	for a := tar.NewReader(bytes.NewReader(export(t, tr, c))); ; {
		h, err := a.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, h.Name+" "+string(h.Typeflag)+h.Linkname)
	}
	want := []string{"./ 5", "a-/ 5", "a-/d 0", "a-b/ 5", "a-b/c 0", "a.b 0", "a/ 5", "a/l 2z", "a/y 0", "a0 0", "z 1a/y"}
	if !slices.Equal(got, want) {
		t.Errorf("entries\n%q\nwant\n%q", got, want)
	}
}

func TestExportHoldsEveryTime(t *testing.T) {
	var entries []image.Entry
	for i, sec := range []int64{0, -1, 1<<33 - 1, 1 << 33, 253402300800, -62135596800, -1 << 63, 1<<63 - 1} {
		for j, nsec := range []uint32{0, 1, 500_000_000, 999_999_999} {
			entries = append(entries, image.Entry{Name: string(rune('a'+i)) + string(rune('a'+j)), Type: image.TypeReg, Mtime: sec, MtimeNsec: nsec})
		}
	}
	tr := merge(t, entries)
	c := content{}
	back := merge(t, readTar(t, c, bytes.NewReader(export(t, tr, c))))
	if got, want := show(back, c), show(tr, c); got != want {
		t.Errorf("read back\n%s\nwant\n%s", got, want)
	}
}

func TestExportOfBigNumbers(t *testing.T) {
	c := content{}
	tr := merge(t, layer(t, c, "f a \"1\" uid=4294967295 gid=4294967294\nf b \"1\" uid=2097151 gid=2097152"))
	back := merge(t, readTar(t, c, bytes.NewReader(export(t, tr, c))))
	if got, want := show(back, c), show(tr, c); got != want {
		t.Errorf("read back\n%s\nwant\n%s", got, want)
	}
}

// counter keeps the beginning of what is written and counts the rest.
type counter struct {
	head []byte
	n    int64
}

func (c *counter) Write(p []byte) (int, error) {
	c.head = append(c.head, p[:min(len(p), 1<<20-len(c.head))]...)
	c.n += int64(len(p))
	return len(p), nil
}

// A file of 9 GiB needs a size record. All zeros, it needs one chunk.
func TestExportOfHugeFile(t *testing.T) {
	const size = 9<<30 + 1
	zeros := make([]byte, chunk.MaxSize)
	c := content{chunk.Sum(zeros): zeros, chunk.Sum(zeros[:1]): zeros[:1]}
	chunks := append(slices.Repeat([]chunk.Digest{chunk.Sum(zeros)}, size/len(zeros)), chunk.Sum(zeros[:1]))
	n := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: size, Chunks: chunks}
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{{Name: "huge", Inode: n}}}
	var w counter
	if err := tree.Export(t.Context(), &w, &rafs.Tree{ChunkSize: chunk.MaxSize, Root: root}, c); err != nil {
		t.Fatal(err)
	}
	// The root, two blocks of PAX records and the header, the data up to a
	// block, two blocks of end, all up to 20 blocks.
	blocks := int64(4 + size/512 + 1 + 2)
	if want := (blocks + 19) / 20 * 20 * 512; w.n != want {
		t.Errorf("%d bytes, want %d", w.n, want)
	}
	a := tar.NewReader(bytes.NewReader(w.head))
	_, _ = a.Next()
	if h, err := a.Next(); err != nil || h.Name != "huge" || h.Size != size {
		t.Errorf("header %+v, error %v", h, err)
	}
}

func TestExportRefusesSockets(t *testing.T) {
	tr := &rafs.Tree{ChunkSize: chunkSize, Root: &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{
		{Name: "run", Inode: &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{
			{Name: "s", Inode: &rafs.Inode{Mode: rafs.ModeSocket | 0o755}},
		}}},
	}}}
	var b bytes.Buffer
	err := tree.Export(t.Context(), &b, tr, content{})
	if err == nil || !strings.Contains(err.Error(), `"run/s" is a socket`) || b.Len() != 0 {
		t.Errorf("error %v after %d bytes", err, b.Len())
	}
}

// random returns a tree of several windows of content, one file of many chunks
// and many small files, some of them the same.
func random(t testing.TB, c content) *rafs.Tree {
	rng := rand.NewChaCha8([32]byte{2})
	var entries []image.Entry
	add := func(name string, size int) {
		p := make([]byte, size)
		rng.Read(p)
		entries = append(entries, image.Entry{Name: name, Type: image.TypeReg, Size: int64(size), Chunks: c.put(p)})
	}
	add("big", 20<<20+123)
	for i := range 3000 {
		add(filepath.Join("d", string(rune('a'+i%26)), string(rune('a'+i/26%26))+string(rune('a'+i/676))), i)
		same := entries[len(entries)-1]
		same.Name = "same/" + strings.ReplaceAll(same.Name, "/", "_")
		entries = append(entries, same)
	}
	return merge(t, entries)
}

func TestExportOfManyWindows(t *testing.T) {
	c := content{}
	tr := random(t, c)
	back := merge(t, readTar(t, content{}, bytes.NewReader(export(t, tr, c))))
	if got, want := tree.Digest(back), tree.Digest(tr); got != want {
		t.Errorf("read back the tree has digest %s, want %s", got, want)
	}
}

// faulty lets one request after some others fail, or changes an answer.
type faulty struct {
	store.BatchGetter
	after  int
	err    error
	change func(p []byte) []byte
	silent bool // gives no answer for one digest
}

func (f *faulty) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	if f.after--; f.after >= 0 {
		return f.BatchGetter.GetBatch(ctx, ds, fn)
	}
	if f.err != nil {
		return f.err
	}
	if f.silent {
		ds = ds[1:]
	}
	return f.BatchGetter.GetBatch(ctx, ds, func(d chunk.Digest, p []byte, err error) error {
		if f.change != nil {
			p = f.change(p)
		}
		return fn(d, p, err)
	})
}

func TestExportStopsAtReadErrors(t *testing.T) {
	c := content{}
	tr := random(t, c)
	whole := export(t, tr, c)
	missing := content{}
	for d, p := range c {
		missing[d] = p
	}
	for _, d := range tr.Root.Entries[1].Inode.Entries[3].Inode.Entries[5].Inode.Chunks {
		delete(missing, d)
	}
	boom := errors.New("boom")
	tests := []struct {
		name    string
		src     store.BatchGetter
		wantErr string
	}{
		{"the first request fails", &faulty{BatchGetter: c, err: boom}, "boom"},
		{"the third request fails", &faulty{BatchGetter: c, after: 2, err: boom}, "boom"},
		{"the last request fails", &faulty{BatchGetter: c, after: 7, err: boom}, "boom"},
		{"a chunk is missing", missing, "chunk not found"},
		{"a chunk gets no answer", &faulty{BatchGetter: c, after: 1, silent: true}, "no answer"},
		{"a chunk is too short", &faulty{BatchGetter: c, after: 1, change: func(p []byte) []byte { return p[:len(p)-1] }}, "the file needs"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			var b bytes.Buffer
			err := tree.Export(t.Context(), &b, tr, tc.src)
			if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
				t.Fatalf("error %v, want one with %q", err, tc.wantErr)
			}
			if b.Len() >= len(whole)-10240 || !bytes.HasPrefix(whole, b.Bytes()) {
				t.Errorf("%d bytes of %d were written, want only a beginning of the archive", b.Len(), len(whole))
			}
		})
	}
}

func TestExportStopsWhenWritingFailsOrTheContextEnds(t *testing.T) {
	c := content{}
	tr := random(t, c)
	r, w := io.Pipe()
	r.CloseWithError(os.ErrClosed)
	if err := tree.Export(t.Context(), w, tr, c); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed pipe: error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tree.Export(ctx, io.Discard, tr, c); !errors.Is(err, context.Canceled) {
		t.Errorf("ended context: error %v", err)
	}
}

func TestExportUnpackedByTarIsTheSameTree(t *testing.T) {
	need.Root(t)
	tarProgram := need.Tool(t, "tar")
	c := content{}
	tr := sample(t, c)
	dir := t.TempDir()
	untar(t, tarProgram, dir, export(t, tr, c))
	got, err := tree.FromDir(t.Context(), dir, chunkSize)
	if err != nil {
		t.Fatal(err)
	}
	if g, w := show(got, c), show(tr, c); g != w {
		t.Errorf("unpacked\n%s\nwant\n%s", g, w)
	}
	if g, w := tree.Digest(got), tree.Digest(tr); g != w {
		t.Errorf("unpacked the tree has digest %s, want %s", g, w)
	}
}

func untar(t *testing.T, program, dir string, archive []byte) {
	t.Helper()
	cmd := exec.Command(program, "-C", dir, "-xp", "--numeric-owner", "--warning=no-timestamp", "--xattrs", "--xattrs-include=*")
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("tar: %v\n%s", err, out)
	}
}

func TestOddXattrNamesSurviveTar(t *testing.T) {
	need.Root(t)
	tarProgram := need.Tool(t, "tar")
	c := content{}
	var xs []rafs.Xattr
	for _, name := range []string{"user.a=b", "user.c%d", "user.e%3Df", "user.g%25h", "user.i%=j"} {
		xs = append(xs, rafs.Xattr{Name: name, Value: []byte(name)})
	}
	tr := merge(t, []image.Entry{{Name: "f", Type: image.TypeReg, Xattrs: xs}})
	dir := t.TempDir()
	untar(t, tarProgram, dir, export(t, tr, c))
	got, err := tree.FromDir(t.Context(), dir, chunkSize)
	if err != nil {
		t.Fatal(err)
	}
	if g, w := show(got, c), show(tr, c); g != w {
		t.Errorf("unpacked\n%s\nwant\n%s", g, w)
	}
}
