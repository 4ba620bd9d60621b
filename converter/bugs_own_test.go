package converter_test

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/store/bucket/buckettest"
	"quarry/store/mem"
)

func tarLayer(t testing.TB, text string) testimage.Layer {
	return testimage.Layer{Tar: tarNotation(t, text)}
}

func TestBug18HardLinksAreStoredOnce(t *testing.T) {
	var text strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&text, "%x ", i*i)
	}
	body := text.String()
	s := newStore(t)
	r := s.convert(t, testimage.Build(t, tarLayer(t, `f d1/a "`+body+"\"\nh d2/b => d1/a\nh d3/c => d1/a"), tarLayer(t, `f d4/z ""`)).Source(""))
	if r.FileBytes != int64(len(body)) || r.NewPlainBytes != int64(len(body)) {
		t.Errorf("files have %d bytes and %d were stored, want %d", r.FileBytes, r.NewPlainBytes, len(body))
	}
}

// Names and links that lead to a folder of the host, absolutely, upwards and
// relative to the working directory, are all paths of the image: the folder is
// not even opened.
func TestBug22NothingOfTheHostIsTouched(t *testing.T) {
	canary := t.TempDir()
	writeTo(t, filepath.Join(canary, "secret"), []byte("of the host"))
	writeTo(t, filepath.Join(canary, "keep"), nil)
	up := strings.Repeat("../", 20)
	escapes := `f relative "1"
		f ` + canary + `/absolute "2"
		f ` + up[:len(up)-1] + canary + `/upwards "3"
		f a/../` + up + canary + `/mixed "4"
		l x -> ` + canary + `
		f x/cron "5"
		l up -> ` + up + `
		f up` + canary + `/linked "6"
		f secret "of the image"
		h hl => secret`
	markers := "f .wh.keep \"\"\nf x/.wh.keep \"\"\nf x/.wh..wh..opq \"\"\nf " + canary + "/.wh.keep \"\"\nf up" + canary + "/.wh.secret \"\""
	good := testimage.Build(t, tarLayer(t, escapes), tarLayer(t, markers)).Source("")
	bad := []string{canary + "/secret", up + canary + "/secret", "x/secret", "up" + canary + "/secret", "/etc/passwd", up + "etc/passwd"}
	var refused []string
	for _, target := range bad {
		refused = append(refused, testimage.Build(t, tarLayer(t, escapes+"\nh stolen => "+target)).Source(""))
	}
	s := newStore(t)
	t.Chdir(canary)
	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(watch)
	if _, err := unix.InotifyAddWatch(watch, canary, unix.IN_ALL_EVENTS); err != nil {
		t.Fatal(err)
	}

	s.convert(t, good)
	_, files := s.verified(t, latest)
	for _, src := range refused {
		s.fail(t, src, `entry "stolen"`, "no such file")
	}
	if n, err := unix.Read(watch, make([]byte, 4096)); err != unix.EAGAIN {
		t.Errorf("the canary folder was touched: %d bytes of events, %v", n, err)
	}
	if files["hl"] != "of the image" || files["relative"] != "1" {
		t.Errorf("files of the image: %q", files)
	}
	for path, body := range files {
		if strings.Contains(body, "of the host") {
			t.Errorf("%s holds what only the host has", path)
		}
	}
	if left, err := os.ReadDir(canary); err != nil || len(left) != 2 {
		t.Errorf("the canary folder has %v, %v", left, err)
	}
}

// Python compares the mtime and size in a compiled file with those of its source.
func TestBug35CompiledPythonIsNotStale(t *testing.T) {
	need.Root(t)
	source := "x = 1\n"
	for _, mtime := range []uint32{1, 1700000001, 1<<32 - 1} {
		head := binary.LittleEndian.AppendUint32([]byte("\xcb\x0d\x0d\x0a\x00\x00\x00\x00"), mtime)
		head = binary.LittleEndian.AppendUint32(head, uint32(len(source)))
		c := mem.New()
		tr, err := merged(t, c, tarNotation(t, fmt.Sprintf("f m.py %q mtime=%d\nf __pycache__/m.cpython-312.pyc %q mtime=%d.9", source, mtime, head, mtime)))
		if err != nil {
			t.Fatal(err)
		}
		mnt := mount(t, c, tr)
		st, err := os.Stat(filepath.Join(mnt, "m.py"))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(mnt, "__pycache__/m.cpython-312.pyc"))
		if err != nil {
			t.Fatal(err)
		}
		if have := binary.LittleEndian.Uint32(got[8:]); int64(have) != st.ModTime().Unix() || st.ModTime().Nanosecond() != 0 {
			t.Errorf("compiled from a source of %d, which now is of %v", have, st.ModTime())
		}
		if have := binary.LittleEndian.Uint32(got[12:]); int64(have) != st.Size() {
			t.Errorf("compiled from a source of %d bytes, which now has %d", have, st.Size())
		}
	}
}

// Docker's empty layer, sha256:a3ed95ca…, is gzip of two end blocks.
func TestBug39DockersEmptyLayer(t *testing.T) {
	blob, err := hex.DecodeString("1f8b080000096e8800ff621805a360148c5800080000ffff2eafb5ef00040000")
	if err != nil {
		t.Fatal(err)
	}
	if got := testimage.Digest(blob); got != "sha256:a3ed95caeb02ffe68cdd9fd84406680ae93d633cb16422d00e8a7c22955b46d4" {
		t.Fatalf("the layer has digest %s", got)
	}
	empty := testimage.Layer{Tar: make([]byte, 1024), Blob: blob}
	s := newStore(t)
	r := s.convert(t, testimage.Build(t, empty, empty, tarLayer(t, `f a "1"`), empty, empty, empty).Source(""))
	_, files := s.verified(t, latest)
	if diff := cmp.Diff(files, map[string]string{"": "/", "a": "1"}); diff != "" {
		t.Errorf("files (-got +want):\n%s", diff)
	}
	if r.Layers != 6 || r.LayersReused != 4 {
		t.Errorf("%d layers, %d reused, want 6 and 4", r.Layers, r.LayersReused)
	}
	only := s.convert(t, testimage.Build(t, empty, empty, empty, empty, empty).Source(""))
	if only.FileBytes != 0 || only.Statement.Blob != nil {
		t.Errorf("an image of empty layers alone has %d bytes and the blob %v", only.FileBytes, only.Statement.Blob)
	}
	for _, key := range buckettest.Keys(t, s.mem, "") {
		if len(buckettest.Bytes(t, s.mem, key)) == 0 {
			t.Errorf("the object %s is empty", key)
		}
	}
}

// A kilobyte of layer can hold a sparse file of a million chunks, and an image a
// thousand such layers: what they take together is bounded before it is there.
func TestSparseFilesOfManyLayersAreBounded(t *testing.T) {
	var layers []testimage.Layer
	for i := range 10 {
		size := int64(1<<30 + i)
		layers = append(layers, testimage.Layer{Tar: append(paxSparse("1.0", "hole", size, []extent{{size, ""}}), make([]byte, 1024)...)})
	}
	src := testimage.Build(t, layers...).Source("")
	s := newStore(t)
	s.Limits.RecordBytes = 3 * 32 << (30 - 12) // three files' digests, and not their names
	s.fail(t, src, "layer 3 of 10", "limit RecordBytes")
	again := testimage.Build(t, layers[0], layers[0], layers[0]).Source("")
	s.fail(t, again, "layer 1 of 3", "limit RecordBytes") // it would be merged three times
	s.Limits.RecordBytes *= 4
	s.convert(t, src)
	s.convert(t, again)
}
