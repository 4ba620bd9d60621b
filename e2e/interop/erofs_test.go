package interop_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/rafs"
	"quarry/store/chunk"
)

// TestFeatures holds the fields by which other readers decide whether they can
// read a bootstrap at all.
func TestFeatures(t *testing.T) {
	const super, compatAt, incompatAt = 1024, 8, 80
	for _, cv := range images(t) {
		sb := cv.boot[super:]
		if got := binary.LittleEndian.Uint32(sb[incompatAt:]); got != 0x0C {
			t.Errorf("%s: feature_incompat is %#x, want exactly 0x0c: chunk-based files and device table", cv.name, got)
		}
		if got := binary.LittleEndian.Uint32(sb[compatAt:]); got != 0x40000000 {
			t.Errorf("%s: feature_compat is %#x, want 0x40000000, which marks RAFS v6", cv.name, got)
		}
	}
}

// TestFsck lets fsck.erofs read all metadata and data and extract it.
func TestFsck(t *testing.T) {
	need.Tool(t, "fsck.erofs")
	for _, cv := range images(t) {
		t.Run(cv.name, func(t *testing.T) {
			args := []string{"-d3"}
			if dev := cv.writeDevice(t); dev != "" {
				args = append(args, "--device="+dev)
			}
			boot := cv.writeBoot(t)
			if !extractable(cv) {
				fsck(t, cv, append(args, "--extract", boot), "No errors found")
				return
			}
			out := filepath.Join(memoryFolder(t), "out")
			if !fsck(t, cv, append(args, "--extract="+out, boot), "Extracted filesystem successfully") {
				return
			}
			got, want := withoutLinks(cv.listDir(t, out)), withoutLinks(listTree(t, cv.image.Tree))
			compare(t, got, want, asFsckExtracts)
		})
	}
}

// fsck runs fsck.erofs and reports whether it is satisfied. The one fault that
// is allowed is its own.
func fsck(t *testing.T, cv *converted, args []string, success string) bool {
	t.Helper()
	// Its stack grows by a block and more for every nested directory.
	cmd := exec.Command("sh", append([]string{"-c", `ulimit -s unlimited; exec fsck.erofs "$@"`, "sh"}, args...)...)
	text, err := cmd.CombinedOutput()
	if err == nil && bytes.Contains(text, []byte(success)) {
		return true
	}
	// erofs-utils before 1.8 means to mask the device number as the kernel does,
	// but computes the mask of a 64-bit number by a 32-bit builtin. The high byte,
	// where chunk numbers above 16 bits go on, then counts as part of the device.
	if len(cv.image.Blob.Chunks) > 1<<16 && bytes.Contains(text, []byte("m_deviceid 257 ")) && !fsckIsAtLeast(t, 1, 8) {
		t.Log("fsck.erofs before 1.8 cannot read chunk numbers above 65535")
		return false
	}
	t.Fatalf("fsck.erofs: %v\n%s", err, tail(text))
	return false
}

// fsckIsAtLeast says whether fsck.erofs has this version or a later one.
func fsckIsAtLeast(t *testing.T, major, minor int) bool {
	t.Helper()
	text, err := exec.Command("fsck.erofs", "-V").Output()
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(text), "\n") // "fsck.erofs 1.5"
	var gotMajor, gotMinor int
	if _, err := fmt.Sscanf(line[strings.LastIndexByte(line, ' ')+1:], "%d.%d", &gotMajor, &gotMinor); err != nil {
		t.Fatalf("version of fsck.erofs %q: %v", line, err)
	}
	return gotMajor > major || gotMajor == major && gotMinor >= minor
}

// extractable says whether an image is extracted too: not the one whose holes
// are written out, nor the one whose paths are too long behind a folder's.
func extractable(cv *converted) bool { return cv.name != "huge-sparse" && cv.name != "deepest" }

// asFsckExtracts evens out what fsck.erofs 1.5 loses when it extracts: xattrs,
// and setuid and setgid of files, which it gives their owner after their mode.
func asFsckExtracts(_ string, got, want *entry) {
	for _, e := range []*entry{got, want} {
		e.xattrs = ""
		if e.mode&rafs.ModeType == rafs.ModeRegular {
			e.mode &^= 0o6000
		}
	}
}

// memoryFolder is a folder in a tmpfs, which keeps every time stamp as it is.
func memoryFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		t.Fatalf("mount a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// tail is the end of a tool's output.
func tail(text []byte) []byte { return text[max(0, len(text)-3000):] }

// TestDump lets dump.erofs read the superblock and the root directory.
func TestDump(t *testing.T) {
	need.Tool(t, "dump.erofs")
	for _, cv := range images(t) {
		t.Run(cv.name, func(t *testing.T) {
			args := []string{}
			if dev := cv.writeDevice(t); dev != "" {
				args = append(args, "--device="+dev)
			}
			boot := cv.writeBoot(t)
			text, err := exec.Command("dump.erofs", append(args, "-s", boot)...).CombinedOutput()
			if err != nil {
				t.Fatalf("dump.erofs -s: %v\n%s", err, text)
			}
			for _, want := range []string{"chunked_file", "device_table", fmt.Sprintf("%d\n", 128)} {
				if !bytes.Contains(text, []byte(want)) {
					t.Errorf("dump.erofs -s does not say %q:\n%s", want, text)
				}
			}
			text, err = exec.Command("dump.erofs", append(args, "--ls", "--path=/", boot)...).CombinedOutput()
			if err != nil {
				t.Fatalf("dump.erofs --ls: %v\n%s", err, text)
			}
			for _, d := range cv.image.Tree.Root.Entries {
				if !bytes.Contains(text, []byte(d.Name)) {
					t.Errorf("dump.erofs --ls / does not name %q:\n%s", d.Name, tail(text))
				}
			}
		})
	}
}

// TestGoErofs reads bootstrap and data device with an independent Go reader.
func TestGoErofs(t *testing.T) {
	for _, cv := range images(t) {
		if cv.name == "deepest" {
			continue // every look-up walks from the root, so time goes with the square of the depth
		}
		t.Run(cv.name, func(t *testing.T) {
			var opts []erofs.OpenOpt
			if dev := cv.writeDevice(t); dev != "" {
				f, err := os.Open(dev)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				opts = append(opts, erofs.WithExtraDevices(f))
			}
			img, err := erofs.Open(bytes.NewReader(cv.boot), opts...)
			if err != nil {
				t.Fatal(err)
			}
			r := goErofs{img: img, size: int64(cv.image.Tree.ChunkSize), list: map[string]entry{}, first: map[int64]string{}}
			if err := r.walk("."); err != nil {
				t.Fatal(err)
			}
			compare(t, r.list, listTree(t, cv.image.Tree), nil)
		})
	}
}

// goErofs lists an image as go-erofs shows it.
type goErofs struct {
	img   fs.FS
	size  int64 // of a chunk
	list  map[string]entry
	first map[int64]string // inode number to the first path
}

func (r goErofs) walk(path string) error {
	info, err := r.img.(fs.ReadLinkFS).Lstat(path)
	if err != nil {
		return fmt.Errorf("%q: %w", path, err)
	}
	st := info.Sys().(*erofs.Stat)
	name := "/" + strings.TrimPrefix(path, ".")
	if path != "." {
		name = "/" + path
	}
	if first, ok := r.first[st.Ino]; ok {
		r.list[name] = entry{linkTo: first}
		return nil
	}
	r.first[st.Ino] = name
	n, err := r.inode(path, st)
	if err != nil {
		return fmt.Errorf("%q: %w", path, err)
	}
	r.list[name] = entryOf(n)
	if !n.IsDir() {
		return nil
	}
	entries, err := fs.ReadDir(r.img, path)
	if err != nil {
		return fmt.Errorf("%q: %w", path, err)
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, e := range entries {
		if err := r.walk(strings.TrimPrefix(path+"/"+e.Name(), "./")); err != nil {
			return err
		}
	}
	return nil
}

func (r goErofs) inode(path string, st *erofs.Stat) (*rafs.Inode, error) {
	n := &rafs.Inode{Mode: unixMode(st.Mode), UID: st.UID, GID: st.GID, Mtime: int64(st.Mtime), MtimeNsec: st.MtimeNs, Rdev: st.Rdev}
	for name, value := range st.Xattrs {
		if strings.HasPrefix(name, "system.") {
			name = strings.TrimSuffix(name, ".") // go-erofs 0.3.1 takes the two whole names for prefixes
		}
		n.Xattrs = append(n.Xattrs, rafs.Xattr{Name: name, Value: []byte(value)})
	}
	sortXattrs(n)
	var err error
	switch n.Type() {
	case rafs.ModeSymlink:
		n.Target, err = fs.ReadLink(r.img, path)
	case rafs.ModeRegular:
		n.Size = st.Size
		n.Chunks, err = r.chunks(path)
	}
	return n, err
}

func (r goErofs) chunks(path string) ([]chunk.Digest, error) {
	f, err := r.img.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return chunksOf(f, r.size)
}

// chunksOf returns the digests of what r has, cut into chunks.
func chunksOf(r io.Reader, size int64) ([]chunk.Digest, error) {
	var ds []chunk.Digest
	p := make([]byte, size)
	for {
		n, err := io.ReadFull(r, p)
		if n > 0 {
			ds = append(ds, chunk.Sum(p[:n]))
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return ds, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func sortXattrs(n *rafs.Inode) {
	slices.SortFunc(n.Xattrs, func(a, b rafs.Xattr) int { return strings.Compare(a.Name, b.Name) })
}

// unixMode is the mode of stat(2) for one of io/fs.
func unixMode(m fs.FileMode) uint32 {
	mode := uint32(m.Perm())
	for _, b := range []struct {
		of   fs.FileMode
		unix uint32
	}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}} {
		if m&b.of != 0 {
			mode |= b.unix
		}
	}
	switch {
	case m.IsDir():
		return mode | rafs.ModeDir
	case m&fs.ModeSymlink != 0:
		return mode | rafs.ModeSymlink
	case m&fs.ModeNamedPipe != 0:
		return mode | rafs.ModeFIFO
	case m&fs.ModeSocket != 0:
		return mode | rafs.ModeSocket
	case m&fs.ModeCharDevice != 0:
		return mode | rafs.ModeChar
	case m&fs.ModeDevice != 0:
		return mode | rafs.ModeBlock
	}
	return mode | rafs.ModeRegular
}
