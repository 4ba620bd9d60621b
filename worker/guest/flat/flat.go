// Package flat writes a file or folder of the host as a plain EROFS image: one device,
// no chunks, no compression, every file in blocks of its own. This is the only EROFS
// that the Sentry mounts, and it can do that in a guest that runs already.
package flat

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
)

// Limits bound what goes into an image.
type Limits struct {
	Files int   // files and folders
	Bytes int64 // of the image
}

// Errors that callers branch on.
var (
	ErrTooLarge = errors.New("too much for an image")
	ErrType     = errors.New("neither file nor folder nor symlink")
	ErrChanged  = errors.New("it changed while it was read")
)

const (
	block     = 4096
	inodeSize = 64
	// maxDepth bounds folders in folders: a path of Linux has no more levels.
	maxDepth = 2048
)

// node is one file of the image.
type node struct {
	path     string // below the top; "." is the top
	mode     uint32 // with the type, as in stat
	uid, gid uint32
	sec      int64
	nsec     uint32
	size     int64
	nlink    uint32
	index    uint32 // of its inode
	addr     uint32 // first block of its data
	target   string
	parent   *node
	children []*node // of a folder, by name
	dirents  []byte  // of a folder, once the children have their inodes
}

// Write writes the image of what name is, a file or a folder, to w, which is empty,
// and returns its size. Symlinks are taken as such, the top one is followed. Setuid
// and setgid are left out: what is given to a guest is to be read.
func Write(w io.WriterAt, name string, l Limits) (int64, error) {
	t := &tree{limits: l}
	st, err := os.Stat(name)
	if err != nil {
		return 0, err
	}
	var root *os.Root
	if st.IsDir() {
		if root, err = os.OpenRoot(name); err != nil {
			return 0, err
		}
		defer root.Close()
	}
	top, err := t.add(nil, ".", st)
	if err != nil {
		return 0, err
	}
	if root != nil {
		if err := t.walk(root, top, 0); err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
	}
	size, err := t.layout()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	open := func(n *node) (*os.File, error) {
		if root == nil {
			return os.Open(name)
		}
		return root.Open(n.path)
	}
	return size, t.write(w, size, open)
}

// tree is what goes into an image, parents before children.
type tree struct {
	limits Limits
	nodes  []*node
	blocks int64
}

func (t *tree) add(parent *node, p string, st fs.FileInfo) (*node, error) {
	if len(t.nodes) >= t.limits.Files {
		return nil, fmt.Errorf("%w: more than %d files", ErrTooLarge, t.limits.Files)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, fmt.Errorf("%s: %w", p, errors.ErrUnsupported)
	}
	n := &node{
		path: p, mode: sys.Mode &^ (syscall.S_ISUID | syscall.S_ISGID), uid: sys.Uid, gid: sys.Gid, parent: parent,
		sec: sys.Mtim.Sec, nsec: uint32(sys.Mtim.Nsec), size: st.Size(), nlink: 1, index: uint32(len(t.nodes)),
	}
	switch sys.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		n.size, n.nlink = 0, 2
		if parent != nil {
			parent.nlink++
		}
	case syscall.S_IFREG, syscall.S_IFLNK:
	default:
		return nil, fmt.Errorf("%q is %v: %w", p, st.Mode().Type(), ErrType)
	}
	t.nodes = append(t.nodes, n)
	return n, nil
}

func (n *node) is(kind uint32) bool { return n.mode&syscall.S_IFMT == kind }

// walk adds what a folder holds.
func (t *tree) walk(root *os.Root, dir *node, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%w: folders deeper than %d", ErrTooLarge, maxDepth)
	}
	f, err := root.Open(dir.path)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		names, err := f.Readdirnames(1024)
		for _, name := range names {
			if err := t.child(root, dir, name); err != nil {
				return err
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	f.Close()
	slices.SortFunc(dir.children, func(a, b *node) int { return strings.Compare(a.path, b.path) })
	for _, c := range dir.children {
		if c.is(syscall.S_IFDIR) {
			if err := t.walk(root, c, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *tree) child(root *os.Root, dir *node, name string) error {
	p := path.Join(dir.path, name)
	st, err := root.Lstat(p)
	if err != nil {
		return err
	}
	n, err := t.add(dir, p, st)
	if err != nil {
		return err
	}
	if n.is(syscall.S_IFLNK) {
		if n.target, err = root.Readlink(p); err != nil {
			return err
		}
		n.size = int64(len(n.target))
	}
	dir.children = append(dir.children, n)
	return nil
}

// layout says where everything stands: the superblock's block, the inodes, and then
// the data of one file after another. It returns the image's size.
func (t *tree) layout() (int64, error) {
	// Inodes are numbered in order of path, so that the same files are the same bytes.
	slices.SortFunc(t.nodes, func(a, b *node) int { return cmp.Compare(a.path, b.path) })
	i := slices.IndexFunc(t.nodes, func(n *node) bool { return n.parent == nil })
	t.nodes[0], t.nodes[i] = t.nodes[i], t.nodes[0]
	for i, n := range t.nodes {
		n.index = uint32(i)
	}
	next := 1 + blocks(int64(len(t.nodes))*inodeSize)
	for _, n := range t.nodes {
		if n.is(syscall.S_IFDIR) {
			n.dirents = n.encodeDirents()
			n.size = int64(len(n.dirents))
		}
		if n.size > t.limits.Bytes || next*block > t.limits.Bytes-n.size || next+blocks(n.size) > 1<<32-1 {
			return 0, fmt.Errorf("%w: more than %d bytes", ErrTooLarge, t.limits.Bytes)
		}
		n.addr = uint32(next)
		if n.size == 0 {
			n.addr = 1 // the Sentry wants a block that is there, also for no bytes
		}
		next += blocks(n.size)
	}
	t.blocks = next
	return next * block, nil
}

func blocks(n int64) int64 { return (n + block - 1) / block }

// write writes everything.
func (t *tree) write(w io.WriterAt, size int64, open func(*node) (*os.File, error)) error {
	// The last byte: blocks end with zeros that are there.
	if _, err := w.WriteAt([]byte{0}, size-1); err != nil {
		return err
	}
	if _, err := w.WriteAt(t.superblock(), 0); err != nil {
		return err
	}
	inodes := make([]byte, 0, 1<<20)
	at := int64(block)
	for _, n := range t.nodes {
		if len(inodes)+inodeSize > cap(inodes) {
			if _, err := w.WriteAt(inodes, at); err != nil {
				return err
			}
			at, inodes = at+int64(len(inodes)), inodes[:0]
		}
		inodes = n.appendInode(inodes)
	}
	if _, err := w.WriteAt(inodes, at); err != nil {
		return err
	}
	for _, n := range t.nodes {
		if err := n.writeData(w, open); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) writeData(w io.WriterAt, open func(*node) (*os.File, error)) error {
	at := int64(n.addr) * block
	switch {
	case n.is(syscall.S_IFDIR):
		_, err := w.WriteAt(n.dirents, at)
		return err
	case n.is(syscall.S_IFLNK):
		_, err := w.WriteAt([]byte(n.target), at)
		return err
	}
	f, err := open(n)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || st.Size() != n.size {
		return fmt.Errorf("%q: %w", n.path, ErrChanged)
	}
	copied, err := io.Copy(io.NewOffsetWriter(w, at), io.LimitReader(f, n.size))
	if err != nil {
		return err
	}
	if st, err = f.Stat(); err != nil || copied != n.size || st.Size() != n.size {
		return fmt.Errorf("%q: %w", n.path, ErrChanged)
	}
	return nil
}
