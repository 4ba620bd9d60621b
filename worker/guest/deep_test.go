package guest_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/worker/guest"
	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// nested is a tar of so many folders in one another, each by itself and a file in the
// last, or of the file alone.
func nested(t *testing.T, name string, n int, each bool) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := 1; each && i <= n; i++ {
		must2(t, w.WriteHeader(&tar.Header{Name: strings.Repeat(name+"/", i), Typeflag: tar.TypeDir, Mode: 0o755}))
	}
	must2(t, w.WriteHeader(&tar.Header{Name: strings.Repeat(name+"/", n) + "f", Typeflag: tar.TypeReg, Mode: 0o644}))
	must2(t, w.Close())
	return &b
}

// roundTrip puts a tar of nested folders in, takes it out, and removes it.
func roundTrip(t *testing.T, f *guest.Files, at string, n int) {
	t.Helper()
	for _, each := range []bool{false, true} {
		if err := f.TarUp(context.Background(), at, guest.Owner{}, nested(t, "a", n, each)); err != nil {
			t.Fatal(err)
		}
		if b, err := down(f, sandbox.TarOptions{Path: at}); err != nil || len(names(t, b)) != n+1 {
			t.Errorf("%d bytes, %v", len(b), err)
		}
		if err := f.Remove(context.Background(), at); err != nil {
			t.Error(err)
		}
	}
}

// What is deeper than a tar down and a list go is refused before its folders are made.
func TestATarOfFoldersThatAreTooDeepLeavesNothing(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	roundTrip(t, f, "deep", wire.MaxFolders)
	for name, tt := range map[string]struct{ element, at string }{
		"folders": {"a", "x"}, "names": {strings.Repeat("a", 200), "x"}, "names below a long path": {"a", strings.Repeat(strings.Repeat("b", 200)+"/", 11) + "x"},
	} {
		n := wire.MaxFolders + 1
		if name != "folders" {
			n = (wire.MaxPath-len(tt.at))/(len(tt.element)+1) + 1
		}
		if err := f.TarUp(context.Background(), tt.at, guest.Owner{}, nested(t, tt.element, n, false)); !errors.Is(err, sandbox.ErrFilePath) {
			t.Errorf("%s: %v", name, err)
		}
		if all, err := os.ReadDir(filepath.Join(w, tt.at)); err != nil || len(all) > 0 {
			t.Errorf("%s: left: %v, %v", name, all, err)
		}
	}
	// What came before can be removed, whatever it is.
	if err := f.TarUp(context.Background(), "y", guest.Owner{}, nested(t, "a", wire.MaxFolders+1, true)); !errors.Is(err, sandbox.ErrFilePath) {
		t.Error(err)
	}
	if err := f.Remove(context.Background(), "y"); err != nil {
		t.Error(err)
	}
	// Links on the way can make it deeper than its name says.
	if err := os.MkdirAll(filepath.Join(w, "z", strings.Repeat("a/", wire.MaxFolders-1)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(strings.Repeat("a/", wire.MaxFolders-1), filepath.Join(w, "z/l")); err != nil {
		t.Fatal(err)
	}
	if err := f.TarUp(context.Background(), "z", guest.Owner{}, nested(t, "l/a/a/a", 1, false)); !errors.Is(err, sandbox.ErrFilePath) {
		t.Error(err)
	}
	if b, err := down(f, sandbox.TarOptions{Path: "z"}); err != nil || len(names(t, b)) > wire.MaxFolders+1 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

// A guest can nest folders deeper than a path names and than there are descriptors.
func TestFoldersOfAnyDepthAreRemoved(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	fd, err := unix.Open(w, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 6000 {
		must2(t, unix.Mkdirat(fd, "folder", 0o755))
		must2(t, unix.Symlinkat("/", fd, "link"))
		next, err := unix.Openat(fd, "folder", unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	if err := f.Remove(context.Background(), "folder"); err != nil {
		t.Error(err)
	}
	if all, err := os.ReadDir(w); err != nil || len(all) != 1 || all[0].Name() != "link" {
		t.Errorf("%v, %v", all, err)
	}
}
