package blockdev

import (
	"sort"
	"sync"

	"quarry/rafs"
)

// paths knows the first file that uses a chunk. Its table is made when somebody
// asks: most devices never need it.
type paths struct{ table func() []ownedFrom }

// ownedFrom says that a file is the first to use the chunks from number first on,
// up to the next file's.
type ownedFrom struct {
	first int
	path  string
}

func newPaths(m *rafs.Image) paths {
	return paths{sync.OnceValue(func() (table []ownedFrom) {
		if m.Tree == nil || m.Blob == nil {
			return nil
		}
		next := 0
		m.Walk(func(path string, n *rafs.Inode) error { // whose function returns no error
			if was := next; owns(m.Blob.Chunks, n, &next) {
				table = append(table, ownedFrom{was, path})
			}
			return nil
		})
		return table
	})}
}

// of returns the path of the first file that uses chunk i, or "".
func (p paths) of(i int) string {
	t := p.table()
	k := sort.Search(len(t), func(k int) bool { return t[k].first > i })
	if k == 0 {
		return ""
	}
	return t[k-1].path
}

// owns reports whether a file is the first to use any chunk, and moves next, the
// first number not used yet, past its chunks: chunks are numbered in the order
// of Walk.
func owns(chunks []rafs.Chunk, n *rafs.Inode, next *int) bool {
	was := *next
	for _, d := range n.Chunks {
		if *next < len(chunks) && chunks[*next].Digest == d {
			*next++
		}
	}
	return *next > was
}

// groups are runs of chunks that are fetched together: neighbours in the chunk
// table whose files are in one directory, of at most a number of bytes.
type groups struct{ starts func() []int32 }

func newGroups(m *rafs.Image, size int64) groups {
	return groups{sync.OnceValue(func() []int32 {
		if size <= 0 || m.Blob == nil {
			return nil
		}
		return groupStarts(m.Blob.Chunks, directories(m), size)
	})}
}

// groupStarts returns the first chunk of every group. They begin at directories,
// so they do not depend on what else is in an image.
func groupStarts(chunks []rafs.Chunk, dirs []int32, size int64) (starts []int32) {
	var bytes int64
	for i, c := range chunks {
		newDir := len(dirs) > 0 && dirs[0] == int32(i)
		if newDir {
			dirs = dirs[1:]
		}
		if bytes += int64(c.Len); i == 0 || newDir || bytes > size {
			starts, bytes = append(starts, int32(i)), int64(c.Len)
		}
	}
	return starts
}

// directories returns the numbers of the chunks whose file is in another directory
// than that of the chunk before; without a tree there are none.
func directories(m *rafs.Image) (dirs []int32) {
	if m.Tree == nil {
		return nil
	}
	next, last := 0, (*rafs.Inode)(nil)
	var walk func(dir *rafs.Inode)
	walk = func(dir *rafs.Inode) {
		for _, e := range dir.Entries {
			was := next
			if owns(m.Blob.Chunks, e.Inode, &next) && dir != last {
				dirs, last = append(dirs, int32(was)), dir
			}
			if e.Inode.IsDir() {
				walk(e.Inode)
			}
		}
	}
	walk(m.Tree.Root)
	return dirs
}

// of returns the group of chunk i, [from, to) of n chunks.
func (g groups) of(i, n int) (from, to int) {
	s := g.starts()
	k := sort.Search(len(s), func(k int) bool { return int(s[k]) > i })
	if k == 0 {
		return i, i + 1
	}
	if k < len(s) {
		n = int(s[k])
	}
	return int(s[k-1]), n
}
