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

// xattrs returns e's attributes that a file of type typ keeps and reports the
// others.
func (m *Merger) xattrs(e *image.Entry, typ uint32) ([]rafs.Xattr, error) {
	var kept []rafs.Xattr
	for _, x := range e.Xattrs {
		if reason := dropReason(x.Name, typ); reason != "" {
			m.cfg.Warn(Warning{Layer: m.layer, Name: e.Name, Xattr: x.Name, Reason: reason})
			continue
		}
		if err := checkXattr(x); err != nil {
			return nil, err
		}
		kept = append(kept, x)
	}
	return kept, nil
}

func checkXattr(x rafs.Xattr) error {
	switch {
	case len(x.Name) > rafs.MaxXattrName:
		return fmt.Errorf("the name of xattr %q has %d bytes, at most %d are possible", x.Name, len(x.Name), rafs.MaxXattrName)
	case strings.IndexByte(x.Name, 0) >= 0:
		return fmt.Errorf("the name of xattr %q holds a NUL byte", x.Name)
	case len(x.Value) > rafs.MaxXattrValue:
		return fmt.Errorf("the value of xattr %q has %d bytes, at most %d are possible", x.Name, len(x.Value), rafs.MaxXattrValue)
	}
	return nil
}

// mergeXattrs returns old with those of add set over it, sorted by name. Of
// two with the same name the later one counts.
func mergeXattrs(old, add []rafs.Xattr) ([]rafs.Xattr, error) {
	if len(add) == 0 {
		return old, nil
	}
	byName := make(map[string][]byte, len(old)+len(add))
	for _, x := range slices.Concat(old, add) {
		byName[x.Name] = x.Value
	}
	merged := make([]rafs.Xattr, 0, len(byName))
	names, area := 0, xattrHeader
	for name, value := range byName {
		merged = append(merged, rafs.Xattr{Name: name, Value: value})
		names += len(name) + 1
		area += (4 + len(name) + len(value) + 3) &^ 3 // EROFS stores less of the name
	}
	if names > rafs.MaxXattrNames || area > rafs.MaxXattrs {
		return nil, fmt.Errorf("its %d xattrs take %d bytes, %d of them names; at most %d and %d are possible",
			len(merged), area, names, rafs.MaxXattrs, rafs.MaxXattrNames)
	}
	sortXattrs(merged)
	return merged, nil
}

func sortXattrs(xs []rafs.Xattr) {
	slices.SortFunc(xs, func(a, b rafs.Xattr) int { return strings.Compare(a.Name, b.Name) })
}
