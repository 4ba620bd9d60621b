package layer

import (
	"archive/tar"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strings"

	"quarry/rafs"
	"quarry/store/image"
)

const (
	permBits = 0o7777             // the type bits that some writers add are ignored
	maxID    = math.MaxUint32 - 1 // the number above is chown's "leave it", which no file can have
)

// entryTypes maps tar's type flags to ours. Everything else is refused: GNU's
// D, M and V are parts of backups, and a flag nobody knows is not a file.
var entryTypes = map[byte]byte{
	tar.TypeReg:       image.TypeReg,
	tar.TypeCont:      image.TypeReg,
	tar.TypeGNUSparse: image.TypeReg,
	tar.TypeLink:      image.TypeLink,
	tar.TypeSymlink:   image.TypeSymlink,
	tar.TypeChar:      image.TypeChar,
	tar.TypeBlock:     image.TypeBlock,
	tar.TypeDir:       image.TypeDir,
	tar.TypeFifo:      image.TypeFIFO,
}

// normalise makes an Entry without content of a header. A regular file whose
// name ends in a slash stays a regular file, as docker, containerd and umoci
// have it (GNU tar makes a directory of it); for the old flag NUL archive/tar
// has already made it a directory, as all do.
func normalise(h *tar.Header) (image.Entry, error) {
	var e image.Entry
	typ, ok := entryTypes[h.Typeflag]
	if !ok {
		return e, fmt.Errorf("tar type %q is not supported", h.Typeflag)
	}
	if err := checkNumbers(h); err != nil {
		return e, err
	}
	name := cleanName(h.Name)
	switch {
	case typ == image.TypeDir:
	case h.Name == "":
		return e, errors.New("entry has no name")
	case name == "":
		return e, errors.New("the root of the image must be a directory")
	}
	e = image.Entry{
		Name: name, Type: typ, Mode: uint32(h.Mode & permBits),
		UID: uint32(h.Uid), GID: uint32(h.Gid),
		Mtime: h.ModTime.Unix(), MtimeNsec: uint32(h.ModTime.Nanosecond()),
	}
	switch typ {
	case image.TypeReg:
		e.Size = h.Size
	case image.TypeLink, image.TypeSymlink:
		if h.Linkname == "" {
			return e, errors.New("link without a target")
		}
		e.Link = h.Linkname
	case image.TypeChar, image.TypeBlock:
		e.Major, e.Minor = uint32(h.Devmajor), uint32(h.Devminor)
	}
	var err error
	e.Xattrs, err = xattrs(h.PAXRecords)
	return e, err
}

// checkNumbers refuses what does not fit, since cutting it would give a file
// to another owner.
func checkNumbers(h *tar.Header) error {
	switch {
	case h.Size < 0:
		return fmt.Errorf("size %d is negative", h.Size)
	case h.Uid < 0 || h.Uid > maxID:
		return fmt.Errorf("uid %d is out of range", h.Uid)
	case h.Gid < 0 || h.Gid > maxID:
		return fmt.Errorf("gid %d is out of range", h.Gid)
	}
	if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock {
		if h.Devmajor < 0 || h.Devmajor > image.MaxMajor || h.Devminor < 0 || h.Devminor > image.MaxMinor {
			return fmt.Errorf("device number %d:%d is out of range (at most %d:%d)", h.Devmajor, h.Devminor, image.MaxMajor, image.MaxMinor)
		}
	}
	_, err := sparsePAX(h.PAXRecords)
	return err
}

// cleanName drops what does not change the meaning: leading slashes, empty and
// "." parts, a trailing slash. ".." stays, for whoever knows the tree. A
// directory without a name is the root, as it is to docker.
func cleanName(name string) string {
	parts := strings.Split(name, "/")
	parts = slices.DeleteFunc(parts, func(p string) bool { return p == "" || p == "." })
	return strings.Join(parts, "/")
}

const (
	schilyXattr     = "SCHILY.xattr."
	libarchiveXattr = "LIBARCHIVE.xattr."
)

// xattrs gathers extended attributes, sorted by name. bsdtar writes each twice;
// SCHILY's, which is exact and which GNU tar reads too, wins.
func xattrs(records map[string]string) ([]rafs.Xattr, error) {
	var list []rafs.Xattr
	for k, v := range records {
		name, ok := strings.CutPrefix(k, schilyXattr)
		if ok {
			list = append(list, rafs.Xattr{Name: name, Value: []byte(v)})
			continue
		}
		name, ok = strings.CutPrefix(k, libarchiveXattr)
		if !ok {
			continue
		}
		x, err := libarchive(name, v)
		if err != nil {
			return nil, err
		}
		if _, twice := records[schilyXattr+x.Name]; !twice {
			list = append(list, x)
		}
	}
	slices.SortFunc(list, func(a, b rafs.Xattr) int { return cmp.Compare(a.Name, b.Name) })
	for i, x := range list {
		if x.Name == "" {
			return nil, errors.New("xattr has no name")
		}
		if i > 0 && x.Name == list[i-1].Name {
			return nil, fmt.Errorf("xattr %s is given twice", image.Quote(x.Name))
		}
	}
	return list, nil
}

// libarchive decodes libarchive's own form: URL-encoded name, base64 value,
// which it writes without padding.
func libarchive(name, value string) (rafs.Xattr, error) {
	plain, err := url.PathUnescape(name)
	if err != nil {
		return rafs.Xattr{}, fmt.Errorf("xattr %s: %w", image.Quote(name), err)
	}
	v, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(value, "="))
	if err != nil {
		return rafs.Xattr{}, fmt.Errorf("xattr %s: %w", image.Quote(plain), err)
	}
	return rafs.Xattr{Name: plain, Value: v}, nil
}
