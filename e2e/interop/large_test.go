//go:build interop

package interop_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/internal/testimage"
)

const (
	// hugeSize is over the 32 bits of a compact inode's size, by more than a chunk.
	hugeSize = 4<<30 + 3<<20 + 5
	// manyChunks is over the 16 bits of the first part of a chunk number.
	manyChunks = 1<<16 + 500
	// deepest is the number of nested directories whose longest path is just below
	// PATH_MAX, which tools that use whole paths need.
	deepest = 2040
)

// largeImages are those that readers need minutes for.
func largeImages(t *testing.T) map[string]*testimage.Layout {
	t.Helper()
	return map[string]*testimage.Layout{
		"many-chunks": layout(t, manyEntries()...),
		"huge-sparse": testimage.Build(t, testimage.Layer{Tar: sparseTar(t)}),
		"deepest":     layout(t, testimage.File(strings.Repeat("d/", deepest)+"bottom", "deep")),
	}
}

func manyEntries() []testimage.Entry {
	var entries []testimage.Entry
	for i := range manyChunks {
		if i%1000 == 0 {
			entries = append(entries, testimage.Dir(fmt.Sprintf("%03d", i/1000)).WithMtime(time.Unix(1_700_000_000, 0)))
		}
		f := testimage.File(fmt.Sprintf("%03d/%d", i/1000, i), fmt.Sprintf("content of file %d\n", i)).WithMtime(time.Unix(1_600_000_000, 0))
		entries = append(entries, f)
	}
	return entries
}

// sparseTar is GNU tar's archive of a file that is all holes but for its start,
// a piece across 4 GiB, and its end.
func sparseTar(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, off := range []int64{0, 4<<30 - 5000, hugeSize - 100} {
		if _, err := f.WriteAt(noise(uint64(off), int(min(10000, hugeSize-off))), off); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{f.Name(), dir} {
		if err := os.Chtimes(path, testimage.Mtime, testimage.Mtime); err != nil {
			t.Fatal(err)
		}
	}
	var out, errOut bytes.Buffer
	cmd := exec.Command(need.Tool(t, "tar"), "-C", dir, "--sparse", "--format=pax", "--pax-option=delete=atime,delete=ctime", "-c", ".")
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("tar: %v: %s", err, errOut.String())
	}
	if out.Len() > 1<<20 {
		t.Fatalf("the sparse archive has %d bytes: the file system under %s keeps no holes", out.Len(), dir)
	}
	return out.Bytes()
}
