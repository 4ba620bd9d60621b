package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// A folder that is moved while what is in it is removed leads to nothing else.
func TestAFolderThatIsMovedMeanwhileIsNotLeftForAnother(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a/b/c", "other/b/kept"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := &remover{h: &helper{q: wire.Request{Path: filepath.Join(dir, "a"), MaxCount: 100}}, cur: fd, levels: []removing{{names: []string{"a"}}}}
	for range 2 { // into a, and into b
		if err := r.next(&r.levels[len(r.levels)-1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(filepath.Join(dir, "a/b"), filepath.Join(dir, "other/moved")); err != nil {
		t.Fatal(err)
	}
	if f, ok := errors.AsType[*failure](r.run()); !ok || f.number != wire.CodeChanged {
		t.Errorf("%+v", f)
	}
	if _, err := os.Stat(filepath.Join(dir, "other/b/kept")); err != nil {
		t.Error(err)
	}
}
