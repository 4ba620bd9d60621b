package converter_test

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/internal/need"
	"quarry/store/mem"
)

// otherwise says where GNU tar unpacks a foreign layer to something else, and
// why what we have is right.
var otherwise = map[string]string{
	"go/hdr-only.tar":           "GNU tar takes the size of a directory for content that follows; POSIX, docker and containerd do not, and all entries come twice the same",
	"go/invalid-go17.tar":       "GNU tar does not know the prefix of a header in this mix of forms; archive/tar, and so docker and containerd, do",
	"go/sparse-formats.tar":     "GNU tar does not end: its extents are of single bytes. Python's tarfile reads the same 200 bytes four times",
	"go/pax-global-records.tar": "GNU tar applies global headers; docker and containerd ignore them",
}

// expectations reads testdata/foreign-layers.txt.
func expectations(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("testdata/foreign-layers.txt")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for _, section := range strings.Split(string(text), "\n## ")[1:] {
		name, lines, _ := strings.Cut(section, "\n")
		want[name] = normal(lines)
	}
	return want
}

// TestForeignLayers reads archives that others wrote, most of them to show a
// fault. Each has its tree, or the words of its refusal; none is cut short.
func TestForeignLayers(t *testing.T) {
	root := filepath.Join(need.Fixtures(t), "layers")
	want := expectations(t)
	for _, pattern := range []string{"*.tar", "*.gz", "go/*.tar"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("no fixtures %s: %v", pattern, err)
		}
		for _, file := range files {
			name, err := filepath.Rel(root, file)
			if err != nil {
				t.Fatal(err)
			}
			expected, known := want[name]
			if !known {
				t.Errorf("testdata/foreign-layers.txt says nothing of %s", name)
			}
			delete(want, name)
			t.Run(name, func(t *testing.T) { readForeign(t, name, file, expected) })
		}
	}
	for name := range want {
		t.Errorf("testdata/foreign-layers.txt speaks of %s, which is not there", name)
	}
}

func readForeign(t *testing.T, name, file, want string) {
	blob, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	c := mem.New()
	tr, err := mergeBlobs(t.Context(), c, testChunk, blob)
	if words, refused := strings.CutPrefix(want, "error: "); refused {
		if err == nil || !strings.Contains(err.Error(), strings.TrimSpace(words)) {
			t.Errorf("error %v, want one with %q", err, words)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	got := notation(decoded(t, tr, chunksOf(t, c)))
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("tree (-got +want):\n%s", diff)
	}
	if otherwise[name] == "" {
		compareWithTar(t, blob, want)
	}
}

// compareWithTar unpacks the layer with GNU tar and compares folders. Parents
// without an entry, and the root, have the time of unpacking there.
func compareWithTar(t *testing.T, blob []byte, want string) {
	t.Helper()
	need.Root(t)
	need.Tool(t, "tar")
	dir := t.TempDir()
	flag := "-xpf"
	if bytes.HasPrefix(blob, []byte("\x1f\x8b")) {
		flag = "-xpzf"
	}
	cmd := exec.Command("tar", "--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*", "-C", dir, flag, "-")
	cmd.Stdin = io.MultiReader(bytes.NewReader(blob), bytes.NewReader(make([]byte, 10240))) // some have no end marker
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	implied := map[string]bool{}
	for line := range strings.Lines(want) {
		if path, is := strings.CutSuffix(line, " mtime=0\n"); is && strings.HasPrefix(path, "d ") && strings.Count(path, " ") == 1 {
			implied[path] = true
		}
	}
	keep := func(text string) (b string) {
		for line := range strings.Lines(text) {
			ws := strings.SplitN(line, " ", 3)
			if path := strings.TrimSpace(ws[0] + " " + ws[1]); !implied[path] && !(path == `d ""` && !strings.Contains(want, `d ""`)) {
				b += line
			}
		}
		return b
	}
	if diff := cmp.Diff(keep(notation(listDisk(t, dir))), keep(want)); diff != "" {
		t.Errorf("GNU tar unpacks something else (-tar +want):\n%s", diff)
	}
}
