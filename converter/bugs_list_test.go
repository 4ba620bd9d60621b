package converter_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/rafs"
	"quarry/store/chunk"
)

// node is one path of a tree as somebody reads it.
type node struct {
	path     string // without the leading slash
	mode     uint32 // type and permission bits
	uid, gid uint32
	sec      int64
	nsec     uint32
	rdev     string // "1,3"
	target   string
	size     int64
	digest   [sha256.Size]byte
	start    string // of the content, its first 64 bytes
	xattrs   []string
	inode    any // the same for all names of a file
	nlink    uint64
}

// notation prints a tree in the notation of tars: paths in order, attributes
// where they differ from those of a plain entry, nlink= where a file has more
// names than one or a directory not 2 and one for each directory in it. A root
// as no entry describes it is left out.
func notation(nodes []node) string {
	slices.SortFunc(nodes, func(a, b node) int {
		return slices.Compare(strings.Split(a.path, "/"), strings.Split(b.path, "/"))
	})
	subdirs := map[string]uint64{}
	for _, n := range nodes {
		if n.mode&rafs.ModeType == rafs.ModeDir && n.path != "" {
			subdirs[n.path[:max(strings.LastIndexByte(n.path, '/'), 0)]]++
		}
	}
	first := map[any]string{}
	var b strings.Builder
	for _, n := range nodes {
		links := uint64(1)
		if n.mode&rafs.ModeType == rafs.ModeDir {
			links = 2 + subdirs[n.path]
		}
		line := n.describe()
		if target, again := first[n.inode]; again {
			line = "h " + word(n.path) + " => " + word(target)
		} else if n.nlink != links {
			line += fmt.Sprintf(" nlink=%d", n.nlink)
		}
		if first[n.inode] == "" {
			first[n.inode] = n.path
		}
		if line != `d "" mtime=0` {
			b.WriteString(line + "\n")
		}
	}
	return b.String()
}

func (n *node) describe() string {
	letter, mode := map[uint32]string{
		rafs.ModeDir: "d", rafs.ModeRegular: "f", rafs.ModeSymlink: "l",
		rafs.ModeChar: "c", rafs.ModeBlock: "b", rafs.ModeFIFO: "p", rafs.ModeSocket: "s",
	}[n.mode&rafs.ModeType], uint32(0o644)
	s := letter + " " + word(n.path)
	switch letter {
	case "d":
		mode = 0o755
	case "f":
		if n.size <= int64(len(n.start)) {
			s += " " + strconv.Quote(n.start)
		} else {
			s += fmt.Sprintf(" %d:%x", n.size, n.digest[:8])
		}
	case "l":
		mode = 0o777
		s += " -> " + word(n.target)
	case "c", "b":
		s += " " + n.rdev
	}
	if n.mode&rafs.ModePerm != mode {
		s += fmt.Sprintf(" mode=%#o", n.mode&rafs.ModePerm)
	}
	if n.uid != 0 {
		s += fmt.Sprintf(" uid=%d", n.uid)
	}
	if n.gid != 0 {
		s += fmt.Sprintf(" gid=%d", n.gid)
	}
	switch {
	case n.nsec != 0:
		s += fmt.Sprintf(" mtime=%d+%d", n.sec, n.nsec)
	case n.sec != 1700000000:
		s += fmt.Sprintf(" mtime=%d", n.sec)
	}
	for _, x := range n.xattrs {
		s += " " + word(x)
	}
	return s
}

// word quotes s when the notation needs it.
func word(s string) string {
	if len(s) > 120 {
		return fmt.Sprintf("%d*%x", len(s), sha256.Sum256([]byte(s)))[:24]
	}
	if s == "" || strings.ContainsAny(s, " \"\\") || strconv.Quote(s) != `"`+s+`"` {
		return strconv.Quote(s)
	}
	return s
}

// content says what a file of these bytes looks like in the notation.
func content(s string) string {
	if len(s) <= 64 {
		return strconv.Quote(s)
	}
	sum := sha256.Sum256([]byte(s))
	return fmt.Sprintf("%d:%x", len(s), sum[:8])
}

// normal trims the lines of an expected tree and drops empty ones.
func normal(s string) string {
	var b strings.Builder
	for l := range strings.SplitSeq(s, "\n") {
		if l = strings.TrimSpace(l); l != "" {
			b.WriteString(l + "\n")
		}
	}
	return b.String()
}

func (n *node) setContent(t testing.TB, r io.Reader) {
	t.Helper()
	h := sha256.New()
	var start bytes.Buffer
	size, err := io.Copy(h, io.TeeReader(r, &headWriter{&start, 64}))
	if err != nil {
		t.Fatalf("%s: %v", n.path, err)
	}
	if size != n.size {
		t.Errorf("%s has %d bytes of content, its size is %d", n.path, size, n.size)
	}
	n.digest, n.start = [sha256.Size]byte(h.Sum(nil)), start.String()
}

// headWriter keeps the first bytes of what is written.
type headWriter struct {
	b    *bytes.Buffer
	most int
}

func (w *headWriter) Write(p []byte) (int, error) {
	w.b.Write(p[:min(len(p), w.most-w.b.Len())])
	return len(p), nil
}

// decoded lists what a bootstrap says, with contents from get.
func decoded(t testing.TB, tr *rafs.Tree, get func(chunk.Digest) []byte) []node {
	t.Helper()
	var nodes []node
	names := map[*rafs.Inode]uint64{}
	err := tr.Walk(func(path string, in *rafs.Inode) error {
		names[in]++
		n := node{
			path: strings.TrimPrefix(path, "/"), mode: in.Mode, uid: in.UID, gid: in.GID,
			sec: in.Mtime, nsec: in.MtimeNsec, rdev: fmt.Sprintf("%d,%d", in.Major(), in.Minor()),
			target: in.Target, size: in.Size, inode: in,
		}
		for _, x := range in.Xattrs {
			n.xattrs = append(n.xattrs, x.Name+"="+string(x.Value))
		}
		if in.IsRegular() {
			var b bytes.Buffer
			for _, d := range in.Chunks {
				b.Write(get(d))
			}
			n.setContent(t, &b)
		}
		nodes = append(nodes, n)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range nodes {
		in := nodes[i].inode.(*rafs.Inode)
		nodes[i].nlink = names[in]
		if in.IsDir() {
			nodes[i].nlink = 2
			for _, d := range in.Entries {
				if d.Inode.IsDir() {
					nodes[i].nlink++
				}
			}
		}
	}
	return nodes
}

// listDisk lists a folder as the kernel shows it. It goes from descriptor to
// descriptor, since paths may be longer than a system call takes.
func listDisk(t testing.TB, dir string) []node {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), dir)
	defer f.Close()
	return append(listFolder(t, f, ""), statNode(t, f, ".", ""))
}

func listFolder(t testing.TB, dir *os.File, path string) (nodes []node) {
	t.Helper()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		sub := path + name
		n := statNode(t, dir, name, sub)
		nodes = append(nodes, n)
		isDir := n.mode&rafs.ModeType == rafs.ModeDir
		if !isDir && n.mode&rafs.ModeType != rafs.ModeRegular {
			continue
		}
		fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW, 0)
		if err != nil {
			t.Fatalf("open %q: %v", sub, err)
		}
		f := os.NewFile(uintptr(fd), sub)
		if isDir {
			nodes = append(nodes, listFolder(t, f, sub+"/")...)
		} else {
			nodes[len(nodes)-1].setContent(t, f)
		}
		f.Close()
	}
	return nodes
}

func statNode(t testing.TB, dir *os.File, name, path string) node {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		t.Fatalf("stat %q: %v", path, err)
	}
	n := node{
		path: path, mode: st.Mode, uid: st.Uid, gid: st.Gid, sec: st.Mtim.Sec, nsec: uint32(st.Mtim.Nsec),
		rdev: fmt.Sprintf("%d,%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), inode: st.Ino, nlink: st.Nlink,
	}
	buf := make([]byte, 1<<16)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		n.size = st.Size
	case unix.S_IFLNK:
		size, err := unix.Readlinkat(int(dir.Fd()), name, buf)
		if err != nil || int64(size) != st.Size {
			t.Fatalf("readlink %q: %d of %d bytes, %v", path, size, st.Size, err)
		}
		n.target = string(buf[:size])
	}
	proc := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
	size, err := unix.Llistxattr(proc, buf)
	if err != nil {
		t.Fatalf("listxattr %q: %v", path, err)
	}
	value := make([]byte, 1<<16)
	names := strings.FieldsFunc(string(buf[:size]), func(r rune) bool { return r == 0 })
	slices.Sort(names)
	for _, x := range names {
		size, err := unix.Lgetxattr(proc, x, value) // by its name alone, not as the list has it
		if err != nil {
			t.Fatalf("getxattr %q of %q: %v", x, path, err)
		}
		n.xattrs = append(n.xattrs, x+"="+string(value[:size]))
	}
	return n
}
