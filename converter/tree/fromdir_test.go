package tree_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/converter/tree"
	"quarry/internal/need"
	"quarry/rafs"
	"quarry/store/chunk"
)

func fromDir(t *testing.T, dir string) *rafs.Tree {
	t.Helper()
	tr, err := tree.FromDir(t.Context(), dir, chunkSize)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func find(tr *rafs.Tree, want string) (found *rafs.Inode) {
	_ = tr.Walk(func(path string, n *rafs.Inode) error {
		if path == want {
			found = n
		}
		return nil
	})
	return found
}

func TestFromDirReadsWhatStatSays(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	p := bytes.Repeat([]byte("0123456789"), 1000)
	must(os.Mkdir(filepath.Join(dir, "d"), 0o700))
	must(os.WriteFile(filepath.Join(dir, "d/f"), p, 0o600))
	must(os.Link(filepath.Join(dir, "d/f"), filepath.Join(dir, "g")))
	must(os.Symlink("/etc", filepath.Join(dir, "l")))
	must(os.Symlink("nowhere", filepath.Join(dir, "dangling")))
	must(unix.Mkfifo(filepath.Join(dir, "p"), 0o644))
	must(unix.Mknod(filepath.Join(dir, "n"), unix.S_IFCHR|0o666, int(unix.Mkdev(10, 256))))
	must(unix.Mknod(filepath.Join(dir, "s"), unix.S_IFSOCK|0o755, 0))
	must(os.Lchown(filepath.Join(dir, "l"), 70000, 5))
	must(os.Chmod(filepath.Join(dir, "p"), 0o644))
	must(unix.Setxattr(filepath.Join(dir, "d"), "user.b", []byte("2"), 0))
	must(unix.Setxattr(filepath.Join(dir, "d"), "user.a", []byte("1\x00"), 0))
	must(unix.Setxattr(filepath.Join(dir, "d"), "trusted.overlay.opaque", []byte("y"), 0))
	must(unix.Setxattr(dir, "user.root", nil, 0))
	at := []unix.Timespec{{Sec: 7}, {Sec: -5, Nsec: 123456789}}
	must(unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(dir, "l"), at, unix.AT_SYMLINK_NOFOLLOW))

	tr := fromDir(t, dir)
	var names []string
	for _, d := range tr.Root.Entries {
		names = append(names, d.Name)
	}
	if got := strings.Join(names, " "); got != "d dangling g l n p s" {
		t.Errorf("names %q", got)
	}
	f := find(tr, "/d/f")
	if f != find(tr, "/g") || f.Mode != rafs.ModeRegular|0o600 || f.Size != int64(len(p)) || len(f.Chunks) != 3 ||
		f.Chunks[0] != chunk.Sum(p[:chunkSize]) || f.Chunks[2] != chunk.Sum(p[2*chunkSize:]) {
		t.Errorf("d/f is %+v", f)
	}
	l := find(tr, "/l")
	if l.Mode != rafs.ModeSymlink|0o777 || l.Target != "/etc" || l.UID != 70000 || l.GID != 5 || l.Mtime != -5 || l.MtimeNsec != 123456789 {
		t.Errorf("l is %+v", l)
	}
	if n := find(tr, "/n"); n.Mode != rafs.ModeChar|0o644 || n.Major() != 10 || n.Minor() != 256 {
		t.Errorf("n is %+v", n)
	}
	if n := find(tr, "/p"); n.Mode != rafs.ModeFIFO|0o644 {
		t.Errorf("p is %+v", n)
	}
	if n := find(tr, "/s"); n.Type() != rafs.ModeSocket {
		t.Errorf("s is %+v", n)
	}
	d := find(tr, "/d")
	if len(d.Xattrs) != 2 || d.Xattrs[0].Name != "user.a" || string(d.Xattrs[0].Value) != "1\x00" || d.Xattrs[1].Name != "user.b" || d.Size != 0 {
		t.Errorf("d is %+v", d)
	}
	if len(tr.Root.Xattrs) != 1 || tr.Root.Xattrs[0].Name != "user.root" {
		t.Errorf("the root has xattrs %v", tr.Root.Xattrs)
	}
	if _, err := rafs.Encode(tr); err != nil {
		t.Error(err)
	}
}

// A path longer than PATH_MAX cannot be opened by its name.
func TestFromDirGoesBelowPathMax(t *testing.T) {
	dir := t.TempDir()
	name := strings.Repeat("n", 250)
	fd, err := unix.Open(dir, unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	const depth = 40
	for range depth {
		if err := unix.Mkdirat(fd, name, 0o755); err != nil {
			t.Fatal(err)
		}
		sub, err := unix.Openat(fd, name, unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = sub
	}
	unix.Close(fd)
	tr := fromDir(t, dir)
	n, got := tr.Root, 0
	for len(n.Entries) > 0 {
		n, got = n.Entries[0].Inode, got+1
	}
	if got != depth {
		t.Errorf("%d levels, want %d", got, depth)
	}
	if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
		t.Log(err)
	}
}

func TestFromDirErrorsNameTheFile(t *testing.T) {
	if _, err := tree.FromDir(t.Context(), "/no/such/folder", chunkSize); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "/no/such/folder") {
		t.Errorf("missing folder: %v", err)
	}
	if _, err := tree.FromDir(t.Context(), t.TempDir(), 1000); err == nil || !strings.Contains(err.Error(), "chunk size 1000") {
		t.Errorf("wrong chunk size: %v", err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := tree.FromDir(t.Context(), filepath.Join(dir, "f"), chunkSize); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("a file: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tree.FromDir(ctx, dir, chunkSize); !errors.Is(err, context.Canceled) {
		t.Errorf("ended context: %v", err)
	}
}

func TestFromDirLeavesNoDescriptors(t *testing.T) {
	dir := t.TempDir()
	for i := range 50 {
		if err := os.MkdirAll(filepath.Join(dir, strings.Repeat("d/", i%5+1), string(rune('a'+i%26))), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "d", "f"+string(rune('a'+i%26))), make([]byte, 10000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	fromDir(t, dir)
	before := open()
	for range 10 {
		fromDir(t, dir)
	}
	if after := open(); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}
