package dir_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/dir"
)

func open(t testing.TB, path string) *dir.Bucket {
	t.Helper()
	b, err := dir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantFiles compares the files below a folder, as relative paths.
func wantFiles(t *testing.T, folder string, want ...string) {
	t.Helper()
	got := []string{}
	must(t, filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			got = append(got, strings.TrimPrefix(path, folder+"/"))
		}
		return err
	}))
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("files in the folder: got %q, want %q", got, want)
	}
}

func TestConformance(t *testing.T) {
	buckettest.Run(t, func(t *testing.T) bucket.Bucket { return open(t, t.TempDir()) })
	buckettest.RunJournal(t, func(t *testing.T) bucket.Journal { return open(t, t.TempDir()) })
}

func TestOpenMakesTheFolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data", "bucket")
	buckettest.Put(t, open(t, path), "packs/a", []byte("a"))
	wantFiles(t, path, "packs/a")
	info, err := os.Stat(filepath.Join(path, "packs", "a"))
	must(t, err)
	if got := info.Mode().Perm(); got != 0o600 {
		t.Errorf("mode of an object: got %o, want 600", got)
	}
	_, err = dir.Open(filepath.Join(path, "packs", "a"))
	if err == nil || !strings.Contains(err.Error(), "not a folder") {
		t.Errorf("Open of a file: got error %v, want one that says so", err)
	}
}

func TestOpenSweepsWhatACrashLeft(t *testing.T) {
	path := t.TempDir()
	b := open(t, path)
	buckettest.Put(t, b, "packs/a", []byte("a"))
	must(t, b.Append(t.Context(), 1, []byte("one")))
	must(t, os.WriteFile(filepath.Join(path, "tmp", "1"), []byte("half"), 0o600))
	must(t, os.MkdirAll(filepath.Join(path, "tmp", "x", "y"), 0o700))

	b = open(t, path)
	wantFiles(t, path, "log/00000000000000000001", "packs/a")
	buckettest.Put(t, b, "packs/b", []byte("b"))
	if got := buckettest.Entries(t, b, 1); len(got) != 1 || string(got[0].Data) != "one" {
		t.Errorf("journal after the sweep: got %v, want entry one", got)
	}
}

func TestFailedPutLeavesNoFile(t *testing.T) {
	path := t.TempDir()
	b := open(t, path)
	if err := b.Put(t.Context(), "a/b", bytes.NewReader([]byte("short")), 6); err == nil {
		t.Error("Put of a short body: got no error")
	}
	buckettest.Put(t, b, "file", nil)
	if err := b.Put(t.Context(), "file/below", bytes.NewReader(nil), 0); err == nil {
		t.Error("Put below an object: got no error")
	}
	buckettest.Put(t, b, "folder/object", nil)
	if err := b.Put(t.Context(), "folder", bytes.NewReader(nil), 0); err == nil {
		t.Error("Put over a folder: got no error")
	}
	wantFiles(t, path, "file", "folder/object")
}

func TestDeleteKeepsFolders(t *testing.T) {
	b := open(t, t.TempDir())
	buckettest.Put(t, b, "a/b", nil)
	must(t, b.Delete(t.Context(), "a/b"))
	must(t, b.Delete(t.Context(), "a"))
	buckettest.Put(t, b, "a/b", nil) // the folder is known to be durable and must still be there
}

func TestPutMakesAFolderAgainThatSomebodyRemoved(t *testing.T) {
	path := t.TempDir()
	b := open(t, path)
	buckettest.Put(t, b, "packs/a", nil)
	must(t, os.RemoveAll(filepath.Join(path, "packs")))
	if err := b.Put(t.Context(), "packs/a", bytes.NewReader(nil), 0); err == nil {
		t.Error("Put into a removed folder: got no error")
	}
	buckettest.Put(t, b, "packs/a", nil)
}

// TestPlantedLinksLeadNowhere plants links to a folder outside in every place.
func TestPlantedLinksLeadNowhere(t *testing.T) {
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	must(t, os.WriteFile(secret, []byte("secret"), 0o600))
	path := t.TempDir()
	must(t, os.Symlink(outside, filepath.Join(path, "tmp")))
	b := open(t, path) // must not sweep the folder outside
	must(t, os.Symlink(outside, filepath.Join(path, "packs")))
	must(t, os.Symlink(secret, filepath.Join(path, "object")))
	must(t, os.Symlink("../../../../../../.."+secret, filepath.Join(path, "relative")))

	p := make([]byte, 6)
	for _, key := range []string{"packs/secret", "object", "relative"} {
		if err := b.ReadAt(t.Context(), key, p, 0); err == nil || errors.Is(err, bucket.ErrNotFound) {
			t.Errorf("ReadAt(%s): got error %v, want one about the link", key, err)
		}
		if _, err := b.Stat(t.Context(), key); err == nil || errors.Is(err, bucket.ErrNotFound) {
			t.Errorf("Stat(%s): got error %v, want one about the link", key, err)
		}
	}
	for _, prefix := range []string{"", "packs/", "obj"} {
		var err error
		for _, err = range b.List(t.Context(), prefix) {
		}
		if err == nil {
			t.Errorf("List(%q): got no error", prefix)
		}
	}
	if err := b.Put(t.Context(), "packs/new", bytes.NewReader(nil), 0); err == nil {
		t.Error("Put through a link: got no error")
	}
	if err := b.Delete(t.Context(), "packs/secret"); err == nil {
		t.Error("Delete through a link: got no error")
	}
	buckettest.Put(t, b, "object", []byte("mine")) // replaces the link, not what it leads to
	must(t, b.Delete(t.Context(), "relative"))
	wantFiles(t, outside, "secret")
	got, err := os.ReadFile(secret)
	if err != nil || string(got) != "secret" {
		t.Errorf("the file outside: got %q, %v, want it untouched", got, err)
	}
}

func TestAFolderInThePlaceOfAnObjectIsNamed(t *testing.T) {
	path := t.TempDir()
	b := open(t, path)
	planted := filepath.Join(path, "packs", "a")
	must(t, os.MkdirAll(planted, 0o700))
	err := b.Put(t.Context(), "packs/a", bytes.NewReader(nil), 0)
	if !errors.Is(err, bucket.ErrDamaged) || !strings.Contains(err.Error(), planted) || !strings.Contains(err.Error(), "move it away") {
		t.Errorf("got %v, want ErrDamaged with the folder and what to do", err)
	}
	must(t, os.Remove(planted))
	buckettest.Put(t, b, "packs/a", nil)
}

func TestAFIFODoesNotBlock(t *testing.T) {
	path := t.TempDir()
	b := open(t, path)
	must(t, syscall.Mkfifo(filepath.Join(path, "fifo"), 0o600))
	if err := b.ReadAt(t.Context(), "fifo", make([]byte, 1), 0); err == nil {
		t.Error("ReadAt of a FIFO: got no error")
	}
	for _, err := range b.List(t.Context(), "fifo/") {
		t.Errorf("List below a FIFO: got error %v, want nothing", err)
	}
}

func TestAnOpenFileKeepsItsObject(t *testing.T) {
	path := t.TempDir()
	b := open(t, path)
	want := []byte("the object as it was")
	buckettest.Put(t, b, "packs/a", want)
	for name, change := range map[string]func(){
		"replaced": func() { buckettest.Put(t, b, "packs/a", []byte("another object")) },
		"deleted":  func() { must(t, b.Delete(t.Context(), "packs/a")) },
	} {
		buckettest.Put(t, b, "packs/a", want)
		f, err := b.File(t.Context(), "packs/a")
		must(t, err)
		change()
		if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
		must(t, f.Close())
	}
	must(t, syscall.Mkfifo(filepath.Join(path, "fifo"), 0o600))
	for key, want := range map[string]error{"missing": bucket.ErrNotFound, "packs": bucket.ErrNotFound, "packs/a/b": bucket.ErrNotFound, "fifo": bucket.ErrDamaged, "../x": nil} {
		if f, err := b.File(t.Context(), key); err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("File(%s): got %v, error %v, want %v", key, f, err, want)
		}
	}
}

func TestFullDiskLeavesNothingHalfWritten(t *testing.T) {
	need.Root(t)
	path := t.TempDir()
	must(t, syscall.Mount("tmpfs", path, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { syscall.Unmount(path, syscall.MNT_DETACH) })
	b := open(t, path)
	t.Cleanup(func() { b.Close() })
	buckettest.Put(t, b, "packs/old", []byte("old"))
	must(t, b.Append(t.Context(), 1, []byte("one")))

	big := make([]byte, 2<<20)
	for _, key := range []string{"packs/new", "packs/old"} {
		err := b.Put(t.Context(), key, bytes.NewReader(big), int64(len(big)))
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free space") {
			t.Errorf("Put: got error %v, want ENOSPC with what to do", err)
		}
	}
	if err := b.Append(t.Context(), 2, big[:bucket.MaxEntry]); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("Append: got error %v, want ENOSPC", err)
	}
	wantFiles(t, path, "log/00000000000000000001", "packs/old")
	if got := string(buckettest.Bytes(t, b, "packs/old")); got != "old" {
		t.Errorf("the old object: got %q, want old", got)
	}
	must(t, b.Append(t.Context(), 2, []byte("two")))
	buckettest.Put(t, b, "packs/new", big[:1<<19])
}

func TestTwoProcessesHaveOneWinner(t *testing.T) {
	path := t.TempDir()
	buckets := []*dir.Bucket{open(t, path), open(t, path)}
	for n := uint64(1); n <= 8; n++ {
		errs := make(chan error, 2)
		for _, b := range buckets {
			go func() { errs <- b.Append(t.Context(), n, []byte("x")) }() // ends with the Append
		}
		first, second := <-errs, <-errs
		if first != nil {
			first, second = second, first
		}
		if first != nil || !errors.Is(second, bucket.ErrTaken) {
			t.Fatalf("entry %d: got errors %v and %v, want none and %v", n, first, second, bucket.ErrTaken)
		}
	}
}

func TestDamagedJournalIsRefused(t *testing.T) {
	const second = "log/00000000000000000002"
	for _, test := range []struct {
		name   string
		damage func(path string) error
		want   string
	}{
		{"a missing entry", func(p string) error { return os.Remove(filepath.Join(p, second)) }, "entry 2"},
		{"an empty entry", func(p string) error { return os.Truncate(filepath.Join(p, second), 0) }, "entry 2 is empty"},
		{"a huge entry", func(p string) error { return os.Truncate(filepath.Join(p, second), 1<<40) }, "entry 2 is longer"},
		{"a link", func(p string) error {
			return errors.Join(os.Remove(filepath.Join(p, second)), os.Symlink("/etc/hostname", filepath.Join(p, second)))
		}, "entry 2"},
		{"a file that is no entry", func(p string) error {
			return os.WriteFile(filepath.Join(p, "log", "2.bak"), []byte("x"), 0o600)
		}, "log/2.bak is no journal entry"},
		{"a number written otherwise", func(p string) error {
			return os.WriteFile(filepath.Join(p, "log", "+0000000000000000004"), []byte("x"), 0o600)
		}, "is no journal entry"},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := t.TempDir()
			b := open(t, path)
			for n := uint64(1); n <= 3; n++ {
				must(t, b.Append(t.Context(), n, []byte("x")))
			}
			must(t, test.damage(path))
			var err error
			for _, err = range b.Read(t.Context(), 1) {
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("Read: got error %v, want one with %q", err, test.want)
			}
			if !errors.Is(err, bucket.ErrDamaged) {
				t.Errorf("Read: got error %v, want ErrDamaged", err)
			}
		})
	}
}

func TestDotFilesAreNoEntries(t *testing.T) {
	path := t.TempDir()
	b := open(t, path)
	must(t, b.Append(t.Context(), 1, []byte("x")))
	must(t, os.WriteFile(filepath.Join(path, "log", ".nfs0000123"), []byte("x"), 0o600))
	n := 0
	for _, err := range b.Read(t.Context(), 1) {
		must(t, err)
		n++
	}
	if n != 1 {
		t.Errorf("read %d entries, want 1", n)
	}
}

func TestReadFollowsAppendsInProgress(t *testing.T) {
	b := open(t, t.TempDir())
	const last = 50
	done := make(chan error, 1)
	go func() { // ends after the last append
		for n := uint64(1); n <= last; n++ {
			if err := b.Append(t.Context(), n, []byte{byte(n)}); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		entries := buckettest.Entries(t, b, 1)
		for i, e := range entries {
			if e.N != uint64(i+1) || e.Data[0] != byte(e.N) {
				t.Fatalf("entry %d: got number %d, data %v", i+1, e.N, e.Data)
			}
		}
		if len(entries) == last {
			break
		}
	}
	must(t, <-done)
}

// TestABucketIsSharedByAWriterAndReaders: who opens it beside a writer that lives takes
// nothing from it, and who only reads it changes nothing.
func TestABucketIsSharedByAWriterAndReaders(t *testing.T) {
	path := t.TempDir()
	first, err := dir.Open(path)
	must(t, err)
	defer first.Close()
	halfWritten := func(what string) {
		t.Helper()
		if got, err := os.ReadDir(filepath.Join(path, "tmp")); err != nil || len(got) != 1 {
			t.Errorf("%s: half-written files are %v, error %v, want the writer's", what, got, err)
		}
	}
	body := bytes.NewReader([]byte("body"))
	must(t, first.Put(t.Context(), "k", readAtFunc(func(p []byte, off int64) (int, error) {
		second, err := dir.OpenShared(path) // while the first writes
		must(t, err)
		defer second.Close()
		halfWritten("opened shared")
		must(t, second.Put(t.Context(), "other", body, 4))
		reader, err := dir.OpenReadOnly(path)
		must(t, err)
		defer reader.Close()
		halfWritten("opened for reading")
		for what, err := range map[string]error{
			"put": reader.Put(t.Context(), "k2", body, 4), "append": reader.Append(t.Context(), 1, []byte("x")),
			"delete": reader.Delete(t.Context(), "other"), "sweep": reader.Sweep(),
		} {
			if err == nil {
				t.Errorf("%s by a reader: got no error", what)
			}
		}
		if _, err := reader.Stat(t.Context(), "other"); err != nil {
			t.Error(err)
		}
		return body.ReadAt(p, off)
	}), 4))
	must(t, os.WriteFile(filepath.Join(path, "tmp", "left"), nil, 0o600))
	must(t, first.Sweep())
	must(t, first.Put(t.Context(), "k3", body, 4))
	if got, err := os.ReadDir(filepath.Join(path, "tmp")); err != nil || len(got) != 0 {
		t.Errorf("after a sweep: half-written files are %v, error %v", got, err)
	}
	if _, err := dir.OpenReadOnly(filepath.Join(path, "none")); err == nil {
		t.Error("a reader made a bucket")
	}
}

type readAtFunc func(p []byte, off int64) (int, error)

func (f readAtFunc) ReadAt(p []byte, off int64) (int, error) { return f(p, off) }
