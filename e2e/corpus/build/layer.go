package build

import (
	"archive/tar"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stamp tells whether a file is the one it was: any change of content or
// attributes moves the ctime, and a new file has another inode or a later one.
type stamp struct {
	ino   uint64
	ctime syscall.Timespec
}

// snapshot has the stamp of every path of a root.
type snapshot map[string]stamp

// layerTar writes what has changed since a snapshot as the tar of a layer, and
// takes the next one.
type layerTar struct {
	tw    *tar.Writer
	root  string
	order Order
	old   snapshot
	next  snapshot
	links map[uint64]string // files with several names, by inode
}

// writeLayer writes the tar of one layer to w.
func writeLayer(w io.Writer, root string, old snapshot, order Order) (snapshot, error) {
	l := &layerTar{tw: tar.NewWriter(w), root: root, order: order, old: old, next: snapshot{}, links: map[uint64]string{}}
	if err := l.folder(""); err != nil {
		return nil, err
	}
	if err := l.whiteouts(); err != nil {
		return nil, err
	}
	return l.next, l.tw.Close()
}

// folder writes what is in a folder, each subfolder before what is in it.
func (l *layerTar) folder(dir string) error {
	f, err := os.Open(filepath.Join(l.root, dir))
	if err != nil {
		return err
	}
	infos, err := f.Readdir(-1)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	switch l.order {
	case ByName:
		slices.SortFunc(infos, func(a, b fs.FileInfo) int { return strings.Compare(a.Name(), b.Name()) })
	case ByInode:
		slices.SortFunc(infos, func(a, b fs.FileInfo) int { return cmp.Compare(stat(a).Ino, stat(b).Ino) })
	}
	for _, fi := range infos {
		name := filepath.Join(dir, fi.Name())
		st := stat(fi)
		s := stamp{st.Ino, st.Ctim}
		l.next[name] = s
		if before, ok := l.old[name]; !ok || before != s {
			if err := l.file(name, fi); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		if fi.IsDir() {
			if err := l.folder(name); err != nil {
				return err
			}
		}
	}
	return nil
}

func stat(fi fs.FileInfo) *syscall.Stat_t { return fi.Sys().(*syscall.Stat_t) }

// file writes one entry as docker and containerd do: whole seconds, no names of
// owners.
func (l *layerTar) file(name string, fi fs.FileInfo) error {
	if fi.Mode()&fs.ModeSocket != 0 {
		return nil // tar has no type for it
	}
	path, target := filepath.Join(l.root, name), ""
	if fi.Mode()&fs.ModeSymlink != 0 {
		var err error
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(fi, target)
	if err != nil {
		return err
	}
	st := stat(fi)
	h.Name, h.Uname, h.Gname = name, "", ""
	h.ModTime = fi.ModTime().Truncate(time.Second)
	h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
	if fi.IsDir() {
		h.Name += "/"
	} else if st.Nlink > 1 {
		if first, ok := l.links[st.Ino]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return l.tw.WriteHeader(h)
		}
		l.links[st.Ino] = name
	}
	if err := addXattrs(h, path); err != nil {
		return err
	}
	if err := l.tw.WriteHeader(h); err != nil || h.Typeflag != tar.TypeReg {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(l.tw, f)
	return err
}

func addXattrs(h *tar.Header, path string) error {
	names := make([]byte, 64<<10) // the kernel's XATTR_LIST_MAX
	n, err := unix.Llistxattr(path, names)
	if err != nil {
		return fmt.Errorf("list xattrs: %w", err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10) // XATTR_SIZE_MAX
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return fmt.Errorf("xattr %s: %w", name, err)
		}
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords["SCHILY.xattr."+name] = string(value[:n])
	}
	return nil
}

// whiteouts writes a marker for what is gone, unless its folder is gone too.
func (l *layerTar) whiteouts() error {
	var gone []string
	for name := range l.old {
		_, still := l.next[name]
		_, parent := l.next[filepath.Dir(name)]
		if !still && (parent || filepath.Dir(name) == ".") {
			gone = append(gone, name)
		}
	}
	slices.Sort(gone)
	for _, name := range gone {
		h := &tar.Header{Name: filepath.Join(filepath.Dir(name), ".wh."+filepath.Base(name)), Typeflag: tar.TypeReg}
		if err := l.tw.WriteHeader(h); err != nil {
			return err
		}
	}
	return nil
}
