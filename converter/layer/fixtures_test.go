package layer_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"quarry/internal/need"
)

// refused are the foreign archives that are not layers, and why.
var refused = map[string]string{
	"zran-two-streams.tar.gz":   "after the tar's end marker", // two archives one after the other: readers differ on what that holds
	"go/gnu-incremental.tar":    `entry "test2/": tar type 'D'`,
	"go/issue10968.tar":         "neither a tar archive",
	"go/issue11169.tar":         "neither a tar archive",
	"go/issue12435.tar":         "invalid tar header",
	"go/pax-bad-hdr-file.tar":   "invalid tar header",
	"go/pax-bad-mtime-file.tar": "invalid tar header",
	"go/pax-path-hdr.tar":       "without their entry", // it ends where the entry of its records should be
	"go/pax-nul-path.tar":       "invalid tar header",
	"go/pax-nul-xattrs.tar":     "invalid tar header", // in the name of one
}

func TestForeignArchivesAreReadOrRefusedByName(t *testing.T) {
	root := filepath.Join(need.Fixtures(t), "layers")
	var files []string
	for _, pattern := range []string{"*.tar", "*.tar.gz", "go/*.tar"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("no fixtures %s: %v", pattern, err)
		}
		files = append(files, found...)
	}
	for _, f := range files {
		name, _ := filepath.Rel(root, f)
		t.Run(name, func(t *testing.T) {
			blob, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			rec, c, err := read(t, blob)
			if why := refused[name]; why != "" {
				wantError(t, err, why)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range rec.Entries {
				c.content(t, e)
				if strings.HasPrefix(e.Name, "/") || strings.HasSuffix(e.Name, "/") {
					t.Errorf("name %q", e.Name)
				}
			}
		})
	}
}

func TestSparseEncodingsOfOneFileAreOneFile(t *testing.T) {
	blob, err := os.ReadFile(filepath.Join(need.Fixtures(t), "layers", "go", "sparse-formats.tar"))
	if err != nil {
		t.Fatal(err)
	}
	rec, _ := mustRead(t, blob)
	if len(rec.Entries) != 5 || rec.Entries[4].Name != "end" {
		t.Fatalf("entries %+v", rec.Entries)
	}
	for _, e := range rec.Entries[1:4] {
		if e.Size != rec.Entries[0].Size || !slices.Equal(e.Chunks, rec.Entries[0].Chunks) {
			t.Errorf("%s differs from %s", e.Name, rec.Entries[0].Name)
		}
	}
}
