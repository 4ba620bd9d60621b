package registry_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/store/bucket/dir"
	"quarry/store/registry"
)

// disk is a disk of so many MiB for the test alone; resize changes its size.
func disk(t *testing.T, size int) (path string, resize func(size int)) {
	t.Helper()
	need.Root(t)
	path = t.TempDir()
	must(t, unix.Mount("tmpfs", path, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=0700", size)))
	t.Cleanup(func() { must(t, unix.Unmount(path, unix.MNT_DETACH)) })
	return path, func(size int) {
		must(t, unix.Mount("tmpfs", path, "tmpfs", unix.MS_REMOUNT, fmt.Sprintf("size=%dm", size)))
	}
}

// An upload that ends is copied to the bucket, which leaves the node its room too.
func TestACopyOnTheSameDiskLeavesRoom(t *testing.T) {
	path, resize := disk(t, 48)
	b, err := dir.Open(filepath.Join(path, "bucket"))
	must(t, err)
	defer b.Close()
	l := newLab(t, func(c *registry.Config) {
		c.Dir, c.Bucket, c.SameDisk, c.KeepFree = filepath.Join(path, "uploads"), b, true, 24<<20
	})
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	d := digest.FromBytes(content)
	id, err := l.StartUpload("a", "")
	must(t, err)
	finish := func(p registry.Part) error { return l.FinishUpload(t.Context(), "a", id, p, d) }
	wantErr(t, "with room for one copy alone", finish(part(content)), syscall.ENOSPC)
	wantOffset(t, l, id, int64(len(content)))
	if n := objects(t, b, ""); n != 0 {
		t.Errorf("%d objects are stored", n)
	}
	resize(64)
	must(t, finish(registry.Part{}))
	if got, err := read(t, l, "a", d); err != nil || !bytes.Equal(got, content) {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
	// Nothing is due any more: there is room for as much again, but for its copy.
	id, err = l.StartUpload("a", "")
	must(t, err)
	_, err = l.AppendUpload("a", id, part(content))
	must(t, err)
	must(t, finish(registry.Part{})) // is there, and not copied
}

// Uploads make room for a node to start, those first that are oldest, and none when all
// of them are not enough.
func TestUploadsMakeRoom(t *testing.T) {
	path, _ := disk(t, 16)
	l := newLab(t, func(c *registry.Config) { c.Dir = path })
	var ids []string
	for i := range 3 {
		id, err := l.StartUpload("a", "")
		must(t, err)
		_, err = l.AppendUpload("a", id, part(make([]byte, 2<<20)))
		must(t, err)
		at := time.Unix(1e9+int64(i), 0)
		must(t, os.Chtimes(filepath.Join(path, id), at, at))
		ids = append(ids, id)
	}
	for _, test := range []struct{ want, removed int }{{17 << 20, 0}, {8 << 20, 0}, {11 << 20, 1}, {15 << 20, 2}} {
		if n, size, err := registry.MakeRoom(path, int64(test.want)); n != test.removed || size != int64(n)*(512+2<<20) || err != nil {
			t.Errorf("%d MiB are wanted: %d uploads of %d bytes removed, %v; want %d", test.want>>20, n, size, err, test.removed)
		}
		if test.removed == 1 {
			l.open(t)
			_, err := l.UploadOffset("a", ids[0])
			wantErr(t, "the oldest", err, registry.ErrUploadUnknown)
			wantOffset(t, l, ids[1], 2<<20)
		}
	}
	wantFiles(t, l, 0)
}

// The room of the disk that an upload left behind takes is another's after some minutes.
func TestIdleUploadsMakeRoomOnTheDisk(t *testing.T) {
	path, _ := disk(t, 48)
	now := time.Now()
	l := newLab(t, func(c *registry.Config) {
		c.Dir, c.KeepFree = filepath.Join(path, "uploads"), 24<<20
		c.Now = func() time.Time { return now }
	})
	push := func() error {
		t.Helper()
		id, err := l.StartUpload("a", "")
		must(t, err)
		_, err = l.AppendUpload("a", id, part(make([]byte, 16<<20)))
		return err
	}
	must(t, push())
	wantErr(t, "at once", push(), syscall.ENOSPC)
	now = now.Add(6 * time.Minute)
	must(t, push())
}
