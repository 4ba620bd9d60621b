package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A link in the place of a folder leads nowhere, and the error names it.
func TestACopySaysWhichLinkIsInItsWay(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	if err := os.Symlink(out, filepath.Join(dir, "d")); err != nil {
		t.Fatal(err)
	}
	for _, h := range []tar.Header{{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "d/x/y", Typeflag: tar.TypeReg}, {Name: "d/x", Typeflag: tar.TypeReg}} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		err = unpack(root, &b, newBudget(1<<20), io.Discard)
		root.Close()
		if err == nil || !strings.HasPrefix(err.Error(), "d is a symlink") {
			t.Errorf("%s: %v", h.Name, err)
		}
		if all, err := os.ReadDir(out); err != nil || len(all) > 0 {
			t.Errorf("%s: %v came out, %v", h.Name, all, err)
		}
	}
}

// A time that would be none is refused, and is no timeout of ever.
func TestATimeoutIsNotRoundedToNone(t *testing.T) {
	for _, o := range []execOptions{{timeout: 10 * time.Microsecond}, {grace: 1}} {
		if err := o.fill(nil); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v", o, err)
		}
	}
}
