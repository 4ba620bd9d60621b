package converter_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/store/bucket/buckettest"
	"quarry/store/image"
)

var update = flag.Bool("update", false, "write the golden files anew")

// goldenImage has every kind of file. Its layers are not compressed and not
// written by archive/tar, so that no library decides on its digests.
func goldenImage(t *testing.T) *testimage.Layout {
	l := testimage.New(t)
	var layers []testimage.Layer
	for _, entries := range goldenLayers() {
		var plain []byte
		for _, e := range entries {
			plain = append(plain, testimage.RawTar(e)...)
		}
		layers = append(layers, testimage.Layer{Tar: append(plain, testimage.EndMarker...), Codec: "none"})
	}
	l.Tag("latest", l.Image(testimage.Image{Layers: layers, Config: map[string]any{"Env": []string{"A=b"}}}))
	return l
}

func goldenLayers() [][]testimage.Entry {
	at := func(sec int64, e testimage.Entry) testimage.Entry { return e.WithMtime(time.Unix(sec, sec%1000)) }
	owned := at(1_700_000_005, testimage.File("etc/owned", "o").WithMode(0o4755))
	owned.Uid, owned.Gid = 70_000, 1<<32-2
	return [][]testimage.Entry{{
		at(1_700_000_001, testimage.Dir("./").WithMode(0o711)),
		at(1_700_000_002, testimage.Dir("etc")),
		at(1_700_000_003, testimage.File("etc/gone", "g")),
		at(1_700_000_004, testimage.File("etc/kept", strings.Repeat("kept ", 2000))),
		owned,
		at(-1, testimage.Symlink("link", "../etc/kept")),
		at(1_700_000_006, testimage.Hardlink("etc/again", "etc/kept")),
		at(1_700_000_007, testimage.Device("null", tar.TypeChar, 1, 3)),
		at(1_700_000_008, testimage.Entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600}}),
		at(1_700_000_009, testimage.File("xattrs", "").WithXattr("user.k", "v").WithXattr("security.capability", "\x01\x00\x00\x02").WithXattr("trusted.overlay.opaque", "y")),
		at(1_700_000_010, testimage.File("deep/er/file", "no parent has an entry")),
		at(1_700_000_011, testimage.Dir("opaque")),
		at(1_700_000_012, testimage.File("opaque/old", "o")),
	}, {
		at(1_700_000_013, testimage.File("etc/.wh.gone", "")),
		at(1_700_000_014, testimage.File("opaque/new", "n")),
		at(1_700_000_015, testimage.File("opaque/.wh..wh..opq", "")),
		at(1_700_000_016, testimage.File("caf\xe9", strings.Repeat("\x00", 3*testChunk))),
		at(1_700_000_017, testimage.File("missing/.wh.x", "")),
	}}
}

const goldenFile = "testdata/image.golden"

// TestReproGolden pins the bytes that a converter version makes. When they
// change, images that were made before must not pass for images of this version.
func TestReproGolden(t *testing.T) {
	s := newStore(t)
	r := s.convert(t, goldenImage(t).Source(""))
	payload := buckettest.Bytes(t, s.mem, image.StatementKey(r.Statement.Source, amd64))
	got := append(bytes.TrimSpace(payload), '\n')
	want, err := os.ReadFile(goldenFile)
	if err != nil && !*update {
		t.Fatal(err)
	}
	if bytes.Equal(got, want) {
		return
	}
	var old struct{ Bootstrap, Converter, Source string }
	if len(want) > 0 {
		if err := json.Unmarshal(want, &old); err != nil {
			t.Fatal(err)
		}
	}
	switch sameSource := old.Source == r.Statement.Source.String(); {
	case sameSource && old.Bootstrap != r.Statement.Bootstrap.String() && old.Converter == converter.Version:
		t.Fatalf("one source has another bootstrap, %s instead of %s, though the converter is still %s: if that is meant, raise converter.Version, then run go test ./converter -run Golden -update",
			r.Statement.Bootstrap, old.Bootstrap, converter.Version)
	case !*update:
		t.Fatalf("the statement of %s is\n%swant\n%sif that is meant, run go test ./converter -run Golden -update", goldenFile, got, want)
	}
	if err := os.MkdirAll(filepath.Dir(goldenFile), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(goldenFile, got, 0o644); err != nil {
		t.Fatal(err)
	}
}

// Other processes, with other processors, time zones, locales and homes, make
// the golden image too.
func TestReproGoldenInOtherProcesses(t *testing.T) {
	for _, env := range [][]string{
		{"GOMAXPROCS=1", "TZ=Pacific/Kiritimati", "LANG=C", "HOME=/nowhere"},
		{"GOMAXPROCS=8", "TZ=America/St_Johns", "LANG=tr_TR.UTF-8", "GOGC=5"},
	} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestReproGolden$", "-test.v")
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte("--- PASS: TestReproGolden")) {
			t.Errorf("with %q: %v\n%s", env, err, out)
		}
	}
}
