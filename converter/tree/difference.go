package tree

import (
	"bytes"
	"slices"
	"strings"

	"quarry/rafs"
)

// Difference says in words where two trees differ first, in path order, "" when they
// do not. It is for people: trees are the same when their digests are.
func Difference(a, b *rafs.Tree) string {
	if a.ChunkSize != b.ChunkSize {
		return "the chunk size"
	}
	if d := difference("/", a.Root, b.Root); d != "" {
		return d
	}
	if Digest(a) != Digest(b) {
		return "which files are hard links of one another"
	}
	return ""
}

func difference(path string, a, b *rafs.Inode) string {
	if what := attributes(a, b); what != "" {
		return what + " of " + path
	}
	below := strings.TrimSuffix(path, "/") + "/"
	i, j := 0, 0
	for i < len(a.Entries) || j < len(b.Entries) {
		switch {
		case j == len(b.Entries) || i < len(a.Entries) && a.Entries[i].Name < b.Entries[j].Name:
			return below + a.Entries[i].Name + ", which is missing"
		case i == len(a.Entries) || b.Entries[j].Name < a.Entries[i].Name:
			return below + b.Entries[j].Name + ", which should not be there"
		}
		if d := difference(below+a.Entries[i].Name, a.Entries[i].Inode, b.Entries[j].Inode); d != "" {
			return d
		}
		i, j = i+1, j+1
	}
	return ""
}

// attributes says what of a file differs beside its entries.
func attributes(a, b *rafs.Inode) string {
	switch {
	case a.Mode != b.Mode:
		return "the mode"
	case a.UID != b.UID || a.GID != b.GID:
		return "the owner"
	case a.Size != b.Size || !slices.Equal(a.Chunks, b.Chunks):
		return "the content"
	case a.Mtime != b.Mtime || a.MtimeNsec != b.MtimeNsec:
		return "the mtime"
	case a.Rdev != b.Rdev:
		return "the device number"
	case a.Target != b.Target:
		return "the target"
	case !slices.EqualFunc(a.Xattrs, b.Xattrs, func(x, y rafs.Xattr) bool { return x.Name == y.Name && bytes.Equal(x.Value, y.Value) }):
		return "an xattr"
	}
	return ""
}
