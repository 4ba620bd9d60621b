package main

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"quarry/e2e/corpus/build"
	"quarry/e2e/corpus/measure"
	"quarry/internal/need"
)

// A command on an image that is not there would be left out without a word.
func TestColdCommandsNameImages(t *testing.T) {
	var names []string
	families := map[string]bool{}
	for _, r := range build.List() {
		names = append(names, r.Name())
	}
	for _, c := range coldCommands() {
		if !slices.Contains(names, c.Image) {
			t.Errorf("%q runs in %s, which is no image of the corpus", c.Args, c.Image)
		}
		families[c.Image[:len(c.Image)-2]] = true
	}
	for _, r := range build.List() {
		if !families[r.Family] {
			t.Errorf("no command runs in the family %s", r.Family)
		}
	}
}

func TestChosenImages(t *testing.T) {
	if all, err := chosen(nil); err != nil || len(all) != len(build.List()) {
		t.Errorf("no names choose %d images: %v", len(all), err)
	}
	some, err := chosen([]string{"node-2", "busybox-1"})
	if err != nil || len(some) != 2 || some[0].Name() != "node-2" {
		t.Errorf("two names choose %v: %v", some, err)
	}
	if _, err := chosen([]string{"nothing-1"}); err == nil {
		t.Error("an unknown name is accepted")
	}
}

// What was read of a file, and nothing else of it, is found in the page cache.
func TestResidentPages(t *testing.T) {
	dir := t.TempDir()
	page := int64(os.Getpagesize())
	body := make([]byte, 40*page+100)
	rand.Read(body)
	path := filepath.Join(dir, "sub", "file")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, filepath.Join(dir, "unread")} {
		if err := os.WriteFile(name, body, 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
	}
	if before, err := resident(dir); err != nil {
		t.Fatal(err)
	} else if len(before) != 0 {
		need.Missing(t, "a temporary folder on a disk, whose page cache can be dropped (set TMPDIR)")
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil { // no read-ahead
		t.Fatal(err)
	}
	for _, off := range []int64{page + 5, 2 * page, 40 * page} {
		if _, err := f.ReadAt(make([]byte, 10), off); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(path, filepath.Join(dir, "zz-link")); err != nil {
		t.Fatal(err)
	}
	got, err := resident(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := measure.Touched{"/sub/file": {{Off: page, Len: 2 * page}, {Off: 40 * page, Len: page}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("resident pages (-want +got):\n%s", diff)
	}
}
