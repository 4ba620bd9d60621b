package rafs

import (
	"errors"
	"fmt"
	"strings"

	"quarry/store/chunk"
)

// TreeError says which file of a tree cannot be stored in a bootstrap, and why.
type TreeError struct {
	Path string // "/" is the root
	Err  error
}

func (e *TreeError) Error() string {
	return fmt.Sprintf("encode %q: %v", shorten(e.Path), e.Err)
}

func (e *TreeError) Unwrap() error { return e.Err }

// shorten keeps a message readable when a hostile image has a path of a megabyte.
func shorten(path string) string {
	const most = 512
	if len(path) <= most {
		return path
	}
	return path[:most/2] + "…" + path[len(path)-most/2:]
}

// FormatError says at which byte a bootstrap leaves our profile, and how.
type FormatError struct {
	Off int64
	Err error
}

func (e *FormatError) Error() string {
	return fmt.Sprintf("bootstrap at byte %d: %v", e.Off, e.Err)
}

func (e *FormatError) Unwrap() error { return e.Err }

func formatErrorf(off int64, format string, args ...any) *FormatError {
	return &FormatError{Off: off, Err: fmt.Errorf(format, args...)}
}

// checkInode holds n against the limits of the format and the promises of
// Inode's fields. Encoding and decoding both call it, so they agree on what a
// tree is. It does not look into the inodes of n.Entries.
func checkInode(n *Inode, chunkSize uint32) error {
	if n.Mode&^(ModeType|ModePerm) != 0 {
		return fmt.Errorf("mode %#o has bits above its 16", n.Mode)
	}
	if n.MtimeNsec >= 1e9 {
		return fmt.Errorf("mtime has %d ns, want less than 1e9", n.MtimeNsec)
	}
	if err := checkXattrs(n.Xattrs); err != nil {
		return err
	}
	isDevice := false
	switch n.Type() {
	case ModeDir:
		if err := checkEntries(n.Entries); err != nil {
			return err
		}
	case ModeRegular:
		if err := checkChunks(n, chunkSize); err != nil {
			return err
		}
	case ModeSymlink:
		if err := checkTarget(n.Target); err != nil {
			return err
		}
	case ModeChar, ModeBlock:
		isDevice = true
	case ModeFIFO, ModeSocket:
	default:
		return fmt.Errorf("mode %#o has no known file type", n.Mode)
	}
	return checkOtherTypes(n, isDevice)
}

// checkOtherTypes refuses fields that belong to another file type: they would be
// lost without a word.
func checkOtherTypes(n *Inode, isDevice bool) error {
	switch {
	case !n.IsDir() && len(n.Entries) != 0:
		return errors.New("has directory entries but is no directory")
	case !n.IsRegular() && (n.Size != 0 || len(n.Chunks) != 0):
		return errors.New("has a size or chunks but is no regular file")
	case n.Type() != ModeSymlink && n.Target != "":
		return errors.New("has a target but is no symlink")
	case !isDevice && n.Rdev != 0:
		return errors.New("has a device number but is no device")
	}
	return nil
}

func checkChunks(n *Inode, chunkSize uint32) error {
	if n.Size < 0 || n.Size/int64(chunkSize) > MaxBootstrap/indexSize {
		return fmt.Errorf("size %d is outside 0 to %d", n.Size, int64(chunkSize)*(MaxBootstrap/indexSize))
	}
	if want := chunk.Count(n.Size, int64(chunkSize)); int64(len(n.Chunks)) != want {
		return fmt.Errorf("has %d chunks, its size %d needs %d", len(n.Chunks), n.Size, want)
	}
	return nil
}

func checkTarget(target string) error {
	if target == "" || len(target) > MaxTarget {
		return fmt.Errorf("symlink target has %d bytes, want 1 to %d", len(target), MaxTarget)
	}
	if strings.IndexByte(target, 0) >= 0 {
		return fmt.Errorf("symlink target %q has a NUL", target)
	}
	return nil
}

func checkEntries(ds []Dirent) error {
	for i, d := range ds {
		if err := checkName(d.Name); err != nil {
			return err
		}
		if i > 0 && ds[i-1].Name >= d.Name {
			return fmt.Errorf("entry %q does not sort after %q", d.Name, ds[i-1].Name)
		}
		if d.Inode == nil {
			return fmt.Errorf("entry %q has no inode", d.Name)
		}
	}
	return nil
}

func checkName(name string) error {
	if len(name) == 0 || len(name) > MaxName {
		return fmt.Errorf("entry name %q has %d bytes, want 1 to %d", shorten(name), len(name), MaxName)
	}
	if name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("entry name %q is not allowed", name)
	}
	return nil
}
