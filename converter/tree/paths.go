package tree

import (
	"iter"
	"strings"

	"quarry/rafs"
)

// frame is a directory whose entries are being listed by paths.
type frame struct {
	dir     *rafs.Inode
	prefix  int   // length of the directory's path with its slash
	next    int   // entry to come
	pending []int // directories passed over, the next one last
}

// paths yields every path of a tree, the root first as "". Paths are in
// bytewise order with a slash behind those of directories: a-b, a/, a/b, a0.
// What is in a directory follows it at once, which GNU tar needs to give
// directories their times, and the names of a tar are sorted as they stand.
func paths(root *rafs.Inode) iter.Seq2[string, *rafs.Inode] {
	return func(yield func(string, *rafs.Inode) bool) {
		if !yield("", root) {
			return
		}
		var path []byte
		stack := []frame{{dir: root}}
		for len(stack) > 0 {
			f := &stack[len(stack)-1]
			path = path[:f.prefix]
			d, ok := f.entry()
			if !ok {
				stack = stack[:len(stack)-1]
				continue
			}
			path = append(path, d.Name...)
			if !yield(string(path), d.Inode) {
				return
			}
			if d.Inode.IsDir() {
				path = append(path, '/')
				stack = append(stack, frame{dir: d.Inode, prefix: len(path)})
			}
		}
	}
}

// entry takes the next entry off f. Entries are sorted by their bare names, so
// a directory waits while those behind it that sort before its slash pass.
func (f *frame) entry() (rafs.Dirent, bool) {
	for f.next < len(f.dir.Entries) {
		d := f.dir.Entries[f.next]
		if w, ok := f.waiting(); ok {
			rest, ok := strings.CutPrefix(d.Name, w.Name)
			if !ok || rest[0] > '/' {
				break
			}
		}
		f.next++
		if !d.Inode.IsDir() {
			return d, true
		}
		f.pending = append(f.pending, f.next-1)
	}
	d, ok := f.waiting()
	if ok {
		f.pending = f.pending[:len(f.pending)-1]
	}
	return d, ok
}

// waiting returns the last directory passed over. It is the first of them in
// order, since its name begins with the names of the others.
func (f *frame) waiting() (rafs.Dirent, bool) {
	if len(f.pending) == 0 {
		return rafs.Dirent{}, false
	}
	return f.dir.Entries[f.pending[len(f.pending)-1]], true
}

// linked returns the files of a tree that have more than one name.
func linked(root *rafs.Inode) map[*rafs.Inode]bool {
	seen := map[*rafs.Inode]bool{}
	dirs := []*rafs.Inode{root}
	for len(dirs) > 0 {
		d := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		for _, e := range d.Entries {
			if e.Inode.IsDir() {
				dirs = append(dirs, e.Inode)
				continue
			}
			_, again := seen[e.Inode]
			seen[e.Inode] = again
		}
	}
	for n, again := range seen {
		if !again {
			delete(seen, n)
		}
	}
	return seen
}
