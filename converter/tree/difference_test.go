package tree_test

import (
	"testing"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/chunk"
)

func TestTheFirstDifferenceIsNamed(t *testing.T) {
	file := func() *rafs.Inode {
		return &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: 1, Mtime: 7, Chunks: []chunk.Digest{chunk.Sum([]byte("1"))}, Xattrs: []rafs.Xattr{{Name: "user.a", Value: []byte("1")}}}
	}
	root := func() *rafs.Inode {
		return &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{
			{Name: "a", Inode: file()},
			{Name: "d", Inode: &rafs.Inode{Mode: rafs.ModeDir | 0o755, Entries: []rafs.Dirent{{Name: "f", Inode: file()}}}},
			{Name: "l", Inode: &rafs.Inode{Mode: rafs.ModeSymlink | 0o777, Target: "a", Size: 1}},
		}}
	}
	inner := func(r *rafs.Inode) *rafs.Inode { return r.Entries[1].Inode.Entries[0].Inode }
	for want, change := range map[string]func(*rafs.Inode){
		"":                                          func(*rafs.Inode) {},
		"the mode of /":                             func(r *rafs.Inode) { r.Mode = rafs.ModeDir | 0o700 },
		"the owner of /d/f":                         func(r *rafs.Inode) { inner(r).GID = 1 },
		"the content of /d/f":                       func(r *rafs.Inode) { inner(r).Chunks[0] = chunk.Sum(nil) },
		"the mtime of /d/f":                         func(r *rafs.Inode) { inner(r).MtimeNsec = 1 },
		"an xattr of /d/f":                          func(r *rafs.Inode) { inner(r).Xattrs[0].Value = nil },
		"the device number of /a":                   func(r *rafs.Inode) { r.Entries[0].Inode.Rdev = 1 },
		"the target of /l":                          func(r *rafs.Inode) { r.Entries[2].Inode.Target = "b" },
		"/a, which is missing":                      func(r *rafs.Inode) { r.Entries = r.Entries[1:] },
		"/l, which is missing":                      func(r *rafs.Inode) { r.Entries = r.Entries[:2] },
		"/m, which should not be there":             func(r *rafs.Inode) { r.Entries = append(r.Entries, rafs.Dirent{Name: "m", Inode: file()}) },
		"/b, which should not be there":             func(r *rafs.Inode) { r.Entries[1].Name = "b" },
		"/d, which is missing":                      func(r *rafs.Inode) { r.Entries[1].Name = "e" },
		"which files are hard links of one another": func(r *rafs.Inode) { r.Entries[1].Inode.Entries[0].Inode = r.Entries[0].Inode },
	} {
		a, b := &rafs.Tree{ChunkSize: chunk.DefaultSize, Root: root()}, &rafs.Tree{ChunkSize: chunk.DefaultSize, Root: root()}
		change(b.Root)
		if got := tree.Difference(a, b); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	a, b := &rafs.Tree{ChunkSize: chunk.MinSize, Root: root()}, &rafs.Tree{ChunkSize: chunk.DefaultSize, Root: root()}
	if got := tree.Difference(a, b); got != "the chunk size" {
		t.Errorf("got %q", got)
	}
}
