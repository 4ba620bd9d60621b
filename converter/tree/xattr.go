package tree

import (
	"fmt"
	"slices"
	"strings"

	"quarry/rafs"
	"quarry/store/image"
)

// xattrHeader is what an area of xattrs takes before the first.
const xattrHeader = 12

// dropReason says why an attribute of a file of type typ is left out of a
// tree; "" means that it is kept. It leaves out what the kernel or docker
// would not have set and what overlayfs would obey, and nothing else.
func dropReason(name string, typ uint32) string {
	hasUserAttrs := typ == rafs.ModeRegular || typ == rafs.ModeDir
	prefix, rest, _ := strings.Cut(name, ".")
	switch {
	case strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay."):
		return "it is private to overlayfs, which would obey it"
	case name == "system.posix_acl_access" && typ != rafs.ModeSymlink:
		return ""
	case name == "system.posix_acl_default" && typ == rafs.ModeDir:
		return ""
	case strings.HasPrefix(name, "system.posix_acl_"):
		return "files of this type have no such ACL"
	case prefix != "user" && prefix != "trusted" && prefix != "security":
		return "its name has no known prefix"
	case rest == "":
		return "its name is only a prefix"
	case prefix == "user" && !hasUserAttrs:
		return "only regular files and directories have user attributes"
	}
	return ""
}

// setXattrs sets e's attributes on f one by one, as setxattr(2) does: of two
// with one name the later counts. What f cannot have is left out and reported.
// An attribute costs a binary search, and a new one moves those behind it, so
// that hard links by the million which set one each on a file with thousands
// cost little more than as many files.
func (m *Merger) setXattrs(f *file, e *image.Entry) error {
	for _, x := range e.Xattrs {
		m.steps++
		if reason := dropReason(x.Name, f.Type()); reason != "" {
			m.cfg.Warn(Warning{Layer: m.layer, Name: e.Name, Xattr: x.Name, Reason: reason})
			continue
		}
		if err := m.checkXattr(x); err != nil {
			return err
		}
		m.steps += f.setXattr(x)
		most := m.cfg.Limits.XattrBytes
		if f.xattrArea > most || f.xattrNames > rafs.MaxXattrNames {
			return fmt.Errorf("with %s its %d xattrs take %d bytes, %d of them names; at most %d (limit XattrBytes) and %d are possible",
				image.Quote(x.Name), len(f.Xattrs), f.xattrArea, f.xattrNames, most, rafs.MaxXattrNames)
		}
	}
	return nil
}

// setXattr sets x on f, whose attributes stay sorted and are f's alone. It
// returns how many of them it moved.
func (f *file) setXattr(x rafs.Xattr) (moved int64) {
	if len(f.Xattrs) == 0 {
		f.xattrArea = xattrHeader
	}
	i, has := slices.BinarySearchFunc(f.Xattrs, x.Name, func(have rafs.Xattr, name string) int {
		return strings.Compare(have.Name, name)
	})
	f.xattrArea += xattrSize(x)
	if has {
		f.xattrArea -= xattrSize(f.Xattrs[i])
		f.Xattrs[i] = x
		return 0
	}
	f.xattrNames += len(x.Name) + 1
	f.Xattrs = slices.Insert(f.Xattrs, i, x)
	return int64(len(f.Xattrs) - 1 - i)
}

// xattrSize is what x takes at most; EROFS stores less of the name.
func xattrSize(x rafs.Xattr) int { return (4 + len(x.Name) + len(x.Value) + 3) &^ 3 }

func (m *Merger) checkXattr(x rafs.Xattr) error {
	switch l := &m.cfg.Limits; {
	case len(x.Name) > l.XattrNameBytes:
		return fmt.Errorf("the name of xattr %s has %d bytes, at most %d are possible (limit XattrNameBytes)", image.Quote(x.Name), len(x.Name), l.XattrNameBytes)
	case strings.IndexByte(x.Name, 0) >= 0:
		return fmt.Errorf("the name of xattr %q holds a NUL byte", x.Name)
	case len(x.Value) > l.XattrValueBytes:
		return fmt.Errorf("the value of xattr %q has %d bytes, at most %d are possible (limit XattrValueBytes)", x.Name, len(x.Value), l.XattrValueBytes)
	}
	return nil
}

func sortXattrs(xs []rafs.Xattr) {
	slices.SortFunc(xs, func(a, b rafs.Xattr) int { return strings.Compare(a.Name, b.Name) })
}
