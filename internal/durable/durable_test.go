package durable_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"quarry/internal/durable"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || string(got) != want {
		t.Errorf("%s: got %q, %v, want %q", path, got, err, want)
	}
}

func wantNames(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	got := []string{}
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s holds %q, want %q", dir, got, want)
	}
}

func TestWriteFileReplaces(t *testing.T) {
	for name, write := range map[string]func(string, []byte, fs.FileMode) error{"durably": durable.WriteFile, "at once": durable.ReplaceFile} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "key")
			for _, want := range []string{"first", "", "second"} {
				must(t, write(path, []byte(want), 0o640))
				wantFile(t, path, want)
			}
			info, err := os.Stat(path)
			must(t, err)
			if got := info.Mode().Perm(); got != 0o640 {
				t.Errorf("mode: got %o, want 640", got)
			}
			// A failure leaves what was there, and nothing beside it.
			must(t, os.Mkdir(filepath.Join(dir, "folder"), 0o700))
			if err := write(filepath.Join(dir, "folder"), nil, 0o600); err == nil {
				t.Error("a file took a folder's place")
			}
			wantNames(t, dir, "folder", "key")
		})
	}
}

func TestCreateFileHasOneWinner(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "key")
	errs := make([]error, 16)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = durable.CreateFile(path, fmt.Append(nil, i), 0o600) })
	}
	wg.Wait()
	winners := 0
	for i, err := range errs {
		if err == nil {
			winners++
			wantFile(t, path, fmt.Sprint(i))
		} else if !errors.Is(err, fs.ErrExist) {
			t.Errorf("CreateFile: got error %v, want %v", err, fs.ErrExist)
		}
	}
	if winners != 1 {
		t.Errorf("got %d winners, want 1", winners)
	}
	wantNames(t, dir, "key")
}

func TestFailedWriteFileLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "folder"), 0o700))
	if err := durable.WriteFile(filepath.Join(dir, "folder"), nil, 0o600); err == nil {
		t.Error("WriteFile over a folder: got no error")
	}
	if err := durable.WriteFile(filepath.Join(dir, "missing", "key"), nil, 0o600); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("WriteFile in a missing folder: got error %v, want %v", err, fs.ErrNotExist)
	}
	wantNames(t, dir, "folder")
}

func TestMkdirAll(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b", "c")
	for range 2 {
		must(t, durable.MkdirAll(dir+"/", 0o700))
	}
	must(t, durable.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	if err := durable.MkdirAll(filepath.Join(dir, "file", "x"), 0o700); err == nil {
		t.Error("MkdirAll below a file: got no error")
	}
}

func text(s string) func(io.Writer) error {
	return func(w io.Writer) error { _, err := io.WriteString(w, s); return err }
}

func TestFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "folder")
	f, err := durable.OpenFolder(dir)
	must(t, err)
	defer f.Close()
	must(t, f.Replace("a/b/c", text("one")))
	must(t, f.Replace("a/b/c", text("two")))
	wantFile(t, filepath.Join(dir, "a/b/c"), "two")
	if err := f.Create("a/b/c", text("three")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Create: got error %v, want %v", err, fs.ErrExist)
	}
	broken := errors.New("broken")
	err = f.Replace("a/b/c", func(w io.Writer) error { return errors.Join(text("half")(w), broken) })
	if !errors.Is(err, broken) {
		t.Errorf("Replace: got error %v, want %v", err, broken)
	}
	wantFile(t, filepath.Join(dir, "a/b/c"), "two")
	if err := f.Replace("../outside", text("x")); err == nil {
		t.Error("Replace outside the folder: got no error")
	}
	wantNames(t, filepath.Dir(dir), "folder")
	must(t, f.Remove("a/b/c"))
	must(t, f.Remove("a/b/c"))
	must(t, f.Remove("never/was"))
	wantNames(t, filepath.Join(dir, "a/b"))
	wantNames(t, filepath.Join(dir, durable.TmpDir))
}
