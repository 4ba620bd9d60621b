package converter_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/internal/erofstest"
	"quarry/internal/need"
	"quarry/store/mem"
)

// extent is data of a sparse file.
type extent struct {
	off  int64
	data string
}

// plainOf returns the whole content of a sparse file.
func plainOf(size int64, extents []extent) string {
	b := make([]byte, size)
	for _, e := range extents {
		copy(b[e.off:], e.data)
	}
	return string(b)
}

// oldSparse writes a sparse file in old GNU form: four extents in the header,
// the others in blocks of 21 after it.
func oldSparse(name string, size int64, extents []extent) []byte {
	number := func(b []byte, v int64) {
		var h tarHeader
		if v < 1<<33 {
			h.octal(0, 12, v)
		} else {
			h.base256(0, 12, v)
		}
		copy(b, h[:12])
	}
	var h tarHeader
	copy(h[:], name)
	h.octal(100, 8, 0o644)
	h.octal(108, 8, 0)
	h.octal(116, 8, 0)
	h.octal(136, 12, 1700000000)
	h[156] = 'S'
	copy(h[257:], "ustar  \x00")
	var data strings.Builder
	var more []byte
	for i, e := range extents {
		data.WriteString(e.data)
		if i < 4 {
			number(h[386+24*i:], e.off)
			number(h[386+24*i+12:], int64(len(e.data)))
			continue
		}
		at := (i - 4) % 21
		if at == 0 {
			more = append(more, make([]byte, 512)...)
		}
		b := more[len(more)-512:]
		number(b[24*at:], e.off)
		number(b[24*at+12:], int64(len(e.data)))
		if i+1 < len(extents) && at == 20 {
			b[504] = 1
		}
	}
	if len(extents) > 4 {
		h[482] = 1
	}
	number(h[483:], size)
	h.octal(124, 12, int64(data.Len()))
	h.sum()
	return bytes.Join([][]byte{h[:], more, []byte(data.String()), make([]byte, -data.Len()&511)}, nil)
}

// paxSparse writes a sparse file in one of the PAX forms 0.0, 0.1 and 1.0.
func paxSparse(version, name string, size int64, extents []extent) []byte {
	e := &tarEntry{flag: '0', name: "GNUSparseFile.0/" + name, mode: 0o644, mtime: "1700000000", format: "pax"}
	var data, list strings.Builder
	switch version {
	case "0.0":
		e.name = name
		e.pax = append(e.pax, fmt.Sprintf("GNU.sparse.size=%d", size), fmt.Sprintf("GNU.sparse.numblocks=%d", len(extents)))
		for _, x := range extents {
			e.pax = append(e.pax, fmt.Sprintf("GNU.sparse.offset=%d", x.off), fmt.Sprintf("GNU.sparse.numbytes=%d", len(x.data)))
		}
	case "0.1":
		var words []string
		for _, x := range extents {
			words = append(words, fmt.Sprintf("%d,%d", x.off, len(x.data)))
		}
		e.pax = append(e.pax, "GNU.sparse.name="+name, fmt.Sprintf("GNU.sparse.size=%d", size),
			fmt.Sprintf("GNU.sparse.numblocks=%d", len(extents)), "GNU.sparse.map="+strings.Join(words, ","))
	case "1.0":
		e.pax = append(e.pax, "GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name="+name, fmt.Sprintf("GNU.sparse.realsize=%d", size))
		fmt.Fprintf(&list, "%d\n", len(extents))
		for _, x := range extents {
			fmt.Fprintf(&list, "%d\n%d\n", x.off, len(x.data))
		}
		data.WriteString(list.String() + strings.Repeat("\x00", -list.Len()&511))
	}
	for _, x := range extents {
		data.WriteString(x.data)
	}
	e.body = data.String()
	e.size = int64(len(e.body))
	return e.bytes()
}

var threeExtents = []extent{{0, "1"}, {1<<20 + 1, strings.Repeat("two", 1365) + "22"}, {3 << 20, ""}}

// manyExtents are more than fit the header and one block after it.
func manyExtents() (all []extent) {
	for i := range int64(30) {
		all = append(all, extent{i * 100_000, fmt.Sprintf("extent %d", i)})
	}
	return append(all, extent{3 << 20, ""})
}

func TestBug31SparseEncodings(t *testing.T) {
	const size = 3 << 20
	files := []struct {
		name    string
		size    int64
		extents []extent
	}{
		{"three", size, threeExtents},
		{"many", size, manyExtents()},
		{"hole", size, []extent{{size, ""}}},
		{"empty", 0, []extent{{0, ""}}},
		{"short", 513, []extent{{0, "a"}, {512, "b"}}},
	}
	var want strings.Builder
	want.WriteString("f empty \"\"\nf end \"intact\"\n")
	for _, i := range []int{2, 1, 4, 0} { // in the order of names
		f := files[i]
		want.WriteString("f " + f.name + " " + content(plainOf(f.size, f.extents)) + "\n")
	}
	for _, form := range []string{"S", "0.0", "0.1", "1.0"} {
		t.Run(form, func(t *testing.T) {
			var b bytes.Buffer
			for _, f := range files {
				if form == "S" {
					b.Write(oldSparse(f.name, f.size, f.extents))
				} else {
					b.Write(paxSparse(form, f.name, f.size, f.extents))
				}
			}
			b.Write(tarNotation(t, `f end "intact"`))
			wantTree(t, b.Bytes(), want.String())
		})
	}
}

// wantTree compares the tree of a layer with the one expected.
func wantTree(t *testing.T, p []byte, want string) {
	t.Helper()
	c := mem.New()
	tr, err := merged(t, c, p)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(notation(decoded(t, tr, chunksOf(t, c))), normal(want)); diff != "" {
		t.Errorf("tree (-got +want):\n%s", diff)
	}
}

// The same as GNU tar writes it of files on disk.
func TestBug31SparseFilesOfGNUTar(t *testing.T) {
	need.Tool(t, "tar")
	dir := t.TempDir()
	names := []string{"three", "many", "hole", "empty", "end"}
	var want strings.Builder
	for i, extents := range [][]extent{threeExtents, manyExtents(), {{3 << 20, ""}}, nil, {{0, "intact"}}} {
		f, err := os.Create(filepath.Join(dir, names[i]))
		if err != nil {
			t.Fatal(err)
		}
		var size int64
		for _, e := range extents {
			if _, err := f.WriteAt([]byte(e.data), e.off); err != nil {
				t.Fatal(err)
			}
			size = max(size, e.off+int64(len(e.data)))
		}
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		names[i] += " " + content(plainOf(size, extents))
	}
	for _, i := range []int{3, 4, 2, 1, 0} {
		want.WriteString("f " + names[i] + "\n")
	}
	for _, form := range [][]string{{"--format=gnu"}, {"--format=posix", "--sparse-version=0.0"}, {"--format=posix", "--sparse-version=0.1"}, {"--format=posix", "--sparse-version=1.0"}} {
		t.Run(strings.Join(form, " "), func(t *testing.T) {
			args := append(form, "-cS", "--hole-detection=raw", "--owner=0", "--group=0", "--mode=0644", "--mtime=@1700000000", "--pax-option=delete=atime,delete=ctime",
				"-C", dir, "three", "many", "hole", "empty", "end")
			if form[0] == "--format=gnu" {
				args = append(args[:7:7], args[8:]...)
			}
			p, err := exec.Command("tar", args...).Output()
			if err != nil {
				t.Fatalf("tar: %v", err)
			}
			if len(p) > 1<<20 {
				t.Fatalf("tar made %d bytes: that is not sparse", len(p))
			}
			wantTree(t, p, want.String())
		})
	}
}

// counterBlock is what block n of a big file begins with.
func counterBlock(n int64) string { return fmt.Sprintf("block %d of 4096 bytes", n) }

// bigChunk keeps a file of 8 GiB at 32 Ki chunks.
const bigChunk = 256 << 10

func TestBug38BigFiles(t *testing.T) {
	need.Root(t)
	sizes := []int64{1<<32 - 1, 1 << 32, 1<<32 + 1, 1<<33 + 513}
	var b bytes.Buffer
	files := map[int64][]extent{}
	for i, size := range sizes {
		var extents []extent
		for _, off := range []int64{0, 1<<31 - 4096, 1 << 31, 1<<32 - 8192, 1<<32 - 4096, 1 << 32, 1<<33 - 4096, (size - 100) &^ 511} {
			if off+int64(len(counterBlock(off))) <= size && (len(extents) == 0 || off > extents[len(extents)-1].off) {
				extents = append(extents, extent{off, counterBlock(off)})
			}
		}
		extents = append(extents, extent{size, ""})
		files[size] = extents
		if i%2 == 0 {
			b.Write(paxSparse("1.0", fmt.Sprint(size), size, extents))
		} else {
			b.Write(oldSparse(fmt.Sprint(size), size, extents))
		}
	}
	c := mem.New()
	tr, err := mergeBlobs(t.Context(), c, bigChunk, append(b.Bytes(), make([]byte, 1024)...))
	if err != nil {
		t.Fatal(err)
	}
	flat, _ := flatten(t, c, tr)
	file := filepath.Join(t.TempDir(), "image")
	writeTo(t, file, flat)
	mnt := erofstest.Mount(t, file) // fsck.erofs would read every hole
	for _, size := range sizes {
		f, err := os.Open(filepath.Join(mnt, fmt.Sprint(size)))
		if err != nil {
			t.Fatal(err)
		}
		if st, err := f.Stat(); err != nil || st.Size() != size {
			t.Errorf("size %v, %v, want %d", st.Size(), err, size)
		}
		for _, x := range files[size] {
			p := make([]byte, min(4096+100, size-x.off))
			want := make([]byte, len(p))
			for _, y := range files[size] {
				if y.off >= x.off && y.off < x.off+int64(len(want)) {
					copy(want[y.off-x.off:], y.data)
				}
			}
			if _, err := f.ReadAt(p, x.off); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(p, want) {
				t.Errorf("%d bytes: at %d comes %.60q, %v, want %.60q", size, x.off, p, err, want)
			}
		}
		f.Close()
	}
}
