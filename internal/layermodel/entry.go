package layermodel

import (
	"archive/tar"
	"errors"
	"fmt"
	"strings"

	"quarry/internal/testimage"
)

// The maxima of what a file may have.
const (
	maxID         = 1<<32 - 2
	maxMajor      = 1<<12 - 1
	maxMinor      = 1<<20 - 1
	maxName       = 255
	maxTarget     = 4095
	maxXattrName  = 255
	maxXattrValue = 1<<16 - 1
)

// types are the type flags of tar that make files; those that mean a regular
// file are one.
var types = map[byte]byte{
	tar.TypeReg: tar.TypeReg, tar.TypeCont: tar.TypeReg,
	tar.TypeLink: tar.TypeLink, tar.TypeSymlink: tar.TypeSymlink,
	tar.TypeChar: tar.TypeChar, tar.TypeBlock: tar.TypeBlock,
	tar.TypeDir: tar.TypeDir, tar.TypeFifo: tar.TypeFifo,
}

// checkEntry refuses what is wrong whatever the tree is.
func checkEntry(e testimage.Entry) error {
	typ, known := types[e.Typeflag]
	switch {
	case !known:
		return fmt.Errorf("type %q", e.Typeflag)
	case strings.Contains(e.Name, "\x00") || strings.Contains(e.Linkname, "\x00"):
		return errors.New("a NUL in a name")
	case clean(e.Name) == "" && typ != tar.TypeDir:
		return errors.New("the root is a directory")
	case e.Uid < 0 || e.Uid > maxID || e.Gid < 0 || e.Gid > maxID:
		return errors.New("an id out of range")
	case (typ == tar.TypeChar || typ == tar.TypeBlock) &&
		(e.Devmajor < 0 || e.Devmajor > maxMajor || e.Devminor < 0 || e.Devminor > maxMinor):
		return errors.New("a device number out of range")
	case (typ == tar.TypeLink || typ == tar.TypeSymlink) && e.Linkname == "":
		return errors.New("a link to nothing")
	case typ == tar.TypeSymlink && len(e.Linkname) > maxTarget && markerOf(clean(e.Name)) == none:
		return errors.New("a long target")
	}
	if err := checkXattrs(e, typ); err != nil {
		return err
	}
	return checkMarkers(clean(e.Name))
}

func checkXattrs(e testimage.Entry, typ byte) error {
	p := clean(e.Name)
	if markerOf(p) != none && !isLinkSource(p, typ) {
		return nil // of a marker nothing but its name counts
	}
	for k, v := range xattrs(e, typ) {
		if len(k) > maxXattrName || len(v) > maxXattrValue {
			return fmt.Errorf("xattr %.300q of %d bytes", k, len(v))
		}
	}
	return nil
}

func checkComponent(name string) error {
	if len(name) > maxName {
		return fmt.Errorf("a name of %d bytes", len(name))
	}
	if strings.HasPrefix(name, ".wh.") {
		return fmt.Errorf("%q would hide a file", name)
	}
	return nil
}

// newNode makes the file that an entry describes.
func newNode(e testimage.Entry) *Node {
	typ := types[e.Typeflag]
	n := &Node{
		Type: typ, Mode: e.Mode & 0o7777, UID: int64(e.Uid), GID: int64(e.Gid),
		Mtime: e.ModTime.Unix(), Nsec: int64(e.ModTime.Nanosecond()), Xattrs: xattrs(e, typ),
	}
	switch typ {
	case tar.TypeReg:
		n.Body = e.Body
	case tar.TypeSymlink:
		n.Mode, n.Target = 0o777, e.Linkname
	case tar.TypeChar, tar.TypeBlock:
		n.Major, n.Minor = e.Devmajor, e.Devminor
	}
	return n
}

// xattrs returns the attributes that a file of a type gets from an entry.
func xattrs(e testimage.Entry, typ byte) map[string]string {
	kept := map[string]string{}
	for k, v := range e.PAXRecords {
		if key, ok := strings.CutPrefix(k, "SCHILY.xattr."); ok && keeps(key, typ) {
			kept[key] = v
		}
	}
	return kept
}

func keeps(key string, typ byte) bool {
	for _, overlay := range []string{"trusted.overlay.", "user.overlay."} {
		if strings.HasPrefix(key, overlay) {
			return false
		}
	}
	prefix, rest, _ := strings.Cut(key, ".")
	switch {
	case key == "system.posix_acl_access":
		return typ != tar.TypeSymlink
	case key == "system.posix_acl_default":
		return typ == tar.TypeDir
	case rest == "":
		return false
	case prefix == "user":
		return typ == tar.TypeReg || typ == tar.TypeDir || typ == tar.TypeLink
	}
	return prefix == "trusted" || prefix == "security"
}
