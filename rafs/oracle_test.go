package rafs_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/erofs/go-erofs"
	"quarry/internal/erofstest"
	"quarry/internal/need"
	"quarry/rafs"
)

// oracleSamples are the trees that other readers of the format must agree on. No
// test changes them.
var oracleSamples = sync.OnceValue(func() map[string]*sample {
	empty := newSample(4096)
	onlyEmptyFiles := newSample(4096)
	onlyEmptyFiles.tree.Root = dir(0o755, map[string]*rafs.Inode{"a": onlyEmptyFiles.file(nil), "b": onlyEmptyFiles.file(nil)})
	samples := map[string]*sample{
		"empty": empty, "only empty files": onlyEmptyFiles, "small": smallSample(), "edges": edgeSample(), "sweep": sweepSample(),
	}
	for seed := range uint64(12) {
		samples[fmt.Sprint("random ", seed)] = randomSample(seed, 30<<(seed%7))
	}
	return samples
})

// TestKernelAgrees mounts flattened images and compares every path.
func TestKernelAgrees(t *testing.T) {
	for name, s := range oracleSamples() {
		t.Run(name, func(t *testing.T) {
			boot, m := s.encode(t)
			flat := writeFile(t, filepath.Join(t.TempDir(), "flat.img"), s.flatten(boot, m))
			compareMounted(t, s, erofstest.Mount(t, flat))
		})
	}
}

// TestSweepCoversEverySlot sees that the sweep does what it is there for: inodes
// at every 32-byte step of a block but the last, where none fits.
func TestSweepCoversEverySlot(t *testing.T) {
	boot, _ := sweepSample().encode(t)
	img, err := erofs.Open(bytes.NewReader(boot), erofs.WithExtraDevices(bytes.NewReader(nil)))
	if err != nil {
		t.Fatal(err)
	}
	slots := map[int64]bool{}
	for _, folder := range []string{"dirs", "files", "links", "exact"} {
		entries, err := fs.ReadDir(img, folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			info, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			slots[info.Sys().(*erofs.Stat).Ino%128] = true
		}
	}
	if len(slots) != 127 || slots[127] {
		t.Errorf("inodes lie at %d of 128 places in a block, want all but the last", len(slots))
	}
}

func compareMounted(t *testing.T, s *sample, mnt string) {
	t.Helper()
	inos, nlink := map[*rafs.Inode]uint64{}, map[*rafs.Inode]uint64{}
	countLinks(s.tree.Root, nlink)
	bad := 0
	err := s.tree.Walk(func(path string, n *rafs.Inode) error {
		if err := compareFile(s, mnt+path, n, nlink[n], inos); err != nil {
			t.Errorf("%q: %v", path, err)
			if bad++; bad > 20 {
				return errors.New("too many differences")
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	groups := map[uint64]bool{}
	for _, ino := range inos {
		groups[ino] = true
	}
	if len(groups) != len(inos) {
		t.Errorf("got %d inode numbers for %d inodes", len(groups), len(inos))
	}
}

func countLinks(n *rafs.Inode, nlink map[*rafs.Inode]uint64) {
	nlink[n] = 2
	for _, d := range n.Entries {
		if d.Inode.IsDir() {
			nlink[n]++
			countLinks(d.Inode, nlink)
		} else {
			nlink[d.Inode]++
		}
	}
}

func compareFile(s *sample, path string, n *rafs.Inode, nlink uint64, inos map[*rafs.Inode]uint64) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err
	}
	if ino, seen := inos[n]; seen {
		if ino != st.Ino {
			return fmt.Errorf("inode number is %d, by another path %d", st.Ino, ino)
		}
		return nil // everything else was compared by the other path
	}
	inos[n] = st.Ino
	// The tree as stat(2) tells it; only directories have a size of the file
	// system's own making.
	want := unix.Stat_t{Mode: n.Mode, Uid: n.UID, Gid: n.GID, Nlink: nlink, Rdev: unix.Mkdev(n.Major(), n.Minor()), Size: n.Size + int64(len(n.Target))}
	want.Mtim = unix.Timespec{Sec: n.Mtime, Nsec: int64(n.MtimeNsec)}
	got := unix.Stat_t{Mode: st.Mode, Uid: st.Uid, Gid: st.Gid, Nlink: st.Nlink, Rdev: st.Rdev, Size: st.Size, Mtim: st.Mtim}
	if n.IsDir() {
		got.Size = 0
	}
	if got != want {
		return fmt.Errorf("got stat %+v, want %+v", got, want)
	}
	if err := compareXattrs(path, n); err != nil {
		return err
	}
	return compareData(s, path, n)
}

func compareData(s *sample, path string, n *rafs.Inode) error {
	switch n.Type() {
	case rafs.ModeRegular:
		got, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Equal(got, s.content(n)) {
			return errors.New("content differs")
		}
	case rafs.ModeSymlink:
		got, err := os.Readlink(path)
		if err != nil {
			return err
		}
		if got != n.Target {
			return fmt.Errorf("got target %q, want %q", got, n.Target)
		}
	case rafs.ModeDir:
		got, err := os.ReadDir(path)
		if err != nil {
			return err
		}
		return compareNames(got, n)
	}
	return nil
}

func compareNames(got []fs.DirEntry, n *rafs.Inode) error {
	var gotNames, wantNames []string
	for _, e := range got {
		gotNames = append(gotNames, e.Name())
	}
	for _, d := range n.Entries {
		wantNames = append(wantNames, d.Name)
	}
	slices.Sort(gotNames)
	if !slices.Equal(gotNames, wantNames) {
		return fmt.Errorf("got names %q, want %q", gotNames, wantNames)
	}
	return nil
}

func compareXattrs(path string, n *rafs.Inode) error {
	size, err := unix.Llistxattr(path, nil)
	if err != nil {
		return fmt.Errorf("size of xattr list: %w", err)
	}
	list := make([]byte, size)
	if size, err = unix.Llistxattr(path, list); err != nil {
		return fmt.Errorf("list xattrs: %w", err)
	}
	got := strings.FieldsFunc(string(list[:size]), func(r rune) bool { return r == 0 })
	slices.Sort(got)
	var want []string
	for _, x := range n.Xattrs {
		want = append(want, x.Name)
		value := make([]byte, len(x.Value)+1)
		size, err := unix.Lgetxattr(path, x.Name, value)
		if err != nil {
			return fmt.Errorf("get xattr %s: %w", x.Name, err)
		}
		if !bytes.Equal(value[:size], x.Value) {
			return fmt.Errorf("xattr %s has %d other bytes, want %d", x.Name, size, len(x.Value))
		}
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("got xattrs %q, want %q", got, want)
	}
	return nil
}

// TestFsckAgrees gives bootstrap and data device to fsck.erofs, which reads all
// metadata and all data.
func TestFsckAgrees(t *testing.T) {
	need.Tool(t, "fsck.erofs")
	for name, s := range oracleSamples() {
		t.Run(name, func(t *testing.T) {
			boot, m := s.encode(t)
			var data []byte
			if m.Blob != nil {
				data = s.dataDevice(m.Blob)
			}
			if out, err := fsck(t, boot, data); err != nil || !strings.Contains(out, "No errors found") {
				t.Errorf("fsck.erofs: %v\n%s", err, out)
			}
		})
	}
}

// TestFsckNotices sees that the oracle has eyes: it does read the data device.
func TestFsckNotices(t *testing.T) {
	need.Tool(t, "fsck.erofs")
	s := smallSample()
	boot, m := s.encode(t)
	if out, err := fsck(t, boot, s.dataDevice(m.Blob)[:4096]); err == nil {
		t.Errorf("fsck.erofs accepts a data device of one block instead of three:\n%s", out)
	}
}

func fsck(t *testing.T, boot, data []byte) (string, error) {
	t.Helper()
	tmp := t.TempDir()
	argv := []string{"-d3", "--extract"}
	if data != nil {
		argv = append(argv, "--device="+writeFile(t, filepath.Join(tmp, "data"), data))
	}
	out, err := exec.Command("fsck.erofs", append(argv, writeFile(t, filepath.Join(tmp, "bootstrap"), boot))...).CombinedOutput()
	return string(out), err
}

func writeFile(t *testing.T, path string, p []byte) string {
	t.Helper()
	if err := os.WriteFile(path, p, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestGoErofsAgrees reads bootstrap and data device with an independent Go reader.
func TestGoErofsAgrees(t *testing.T) {
	for name, s := range oracleSamples() {
		t.Run(name, func(t *testing.T) {
			boot, m := s.encode(t)
			var opts []erofs.OpenOpt
			if m.Blob != nil {
				opts = append(opts, erofs.WithExtraDevices(bytes.NewReader(s.dataDevice(m.Blob))))
			}
			img, err := erofs.Open(bytes.NewReader(boot), opts...)
			if err != nil {
				t.Fatal(err)
			}
			bad, seen := 0, map[*rafs.Inode]bool{}
			err = s.tree.Walk(func(path string, n *rafs.Inode) error {
				if seen[n] {
					return nil
				}
				seen[n] = true
				if err := compareGoErofs(s, img, strings.TrimPrefix(path, "/"), n); err != nil {
					t.Errorf("%q: %v", path, err)
					if bad++; bad > 20 {
						return errors.New("too many differences")
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

func compareGoErofs(s *sample, img fs.FS, path string, n *rafs.Inode) error {
	if path == "" {
		path = "."
	}
	info, err := img.(fs.ReadLinkFS).Lstat(path)
	if err != nil {
		return err
	}
	st := info.Sys().(*erofs.Stat)
	got := rafs.Inode{UID: st.UID, GID: st.GID, Mtime: int64(st.Mtime), MtimeNsec: st.MtimeNs, Rdev: st.Rdev}
	want := rafs.Inode{UID: n.UID, GID: n.GID, Mtime: n.Mtime, MtimeNsec: n.MtimeNsec, Rdev: n.Rdev}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("got %+v, want %+v", got, want)
	}
	if len(st.Xattrs) != len(n.Xattrs) {
		return fmt.Errorf("got xattrs %v, want %v", st.Xattrs, n.Xattrs)
	}
	for _, x := range n.Xattrs {
		name := x.Name
		if strings.HasPrefix(name, "system.") {
			name += "." // go-erofs 0.3.1 takes the two whole names for prefixes
		}
		if value, ok := st.Xattrs[name]; !ok || value != string(x.Value) {
			return fmt.Errorf("xattr %s differs", x.Name)
		}
	}
	switch n.Type() {
	case rafs.ModeRegular:
		p, err := fs.ReadFile(img, path)
		if err != nil || !bytes.Equal(p, s.content(n)) {
			return fmt.Errorf("content differs, error %v", err)
		}
	case rafs.ModeSymlink:
		target, err := fs.ReadLink(img, path)
		if err != nil || target != n.Target {
			return fmt.Errorf("target %q, error %v, want %q", target, err, n.Target)
		}
	case rafs.ModeDir:
		entries, err := fs.ReadDir(img, path)
		if err != nil {
			return err
		}
		return compareNames(entries, n)
	}
	return nil
}
