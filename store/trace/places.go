package trace

import (
	"slices"
	"strings"

	"quarry/rafs"
	"quarry/store/chunk"
)

// Place is what a chunk of a list is in every image: its content, and where the
// first file that has it has it.
type Place struct {
	Digest chunk.Digest
	Path   string // "" when no file was found
	Index  int    // of the chunk in the file
}

// Places says of each number of a list what it is in the image.
func Places(im *rafs.Image, list []uint32) []Place {
	if im.Blob == nil {
		return nil
	}
	var out []Place
	at := map[chunk.Digest]int{}
	for _, n := range list {
		if int64(n) < int64(len(im.Blob.Chunks)) {
			d := im.Blob.Chunks[n].Digest
			at[d] = len(out)
			out = append(out, Place{Digest: d})
		}
	}
	im.Walk(func(path string, n *rafs.Inode) error { // fails only when this does
		for i, d := range n.Chunks {
			if k, ok := at[d]; ok && out[k].Path == "" {
				out[k].Path, out[k].Index = path, i
			}
		}
		return nil
	})
	return out
}

// In returns the list that places are in an image: each chunk that the image has,
// else the one at its path and index. Places that are neither are left out.
func In(im *rafs.Image, places []Place) []uint32 {
	if im.Blob == nil {
		return nil
	}
	wanted := make(map[chunk.Digest][]int, len(places)) // places by the digest they have here
	for i, p := range places {
		wanted[p.Digest] = append(wanted[p.Digest], i)
	}
	numbers := make([]int64, len(places))
	for i := range numbers {
		numbers[i] = -1
	}
	take := func() {
		for n, c := range im.Blob.Chunks {
			for _, i := range wanted[c.Digest] {
				numbers[i] = int64(n)
			}
		}
	}
	take()
	clear(wanted)
	for i, p := range places {
		if numbers[i] >= 0 {
			continue
		}
		if f := lookup(im.Tree.Root, p.Path); f != nil && p.Index < len(f.Chunks) {
			wanted[f.Chunks[p.Index]] = append(wanted[f.Chunks[p.Index]], i)
		}
	}
	take()
	var list []uint32
	seen := map[int64]bool{-1: true}
	for _, n := range numbers {
		if !seen[n] {
			seen[n] = true
			list = append(list, uint32(n))
		}
	}
	return list
}

// lookup returns the file at a path of Walk, or nil.
func lookup(dir *rafs.Inode, path string) *rafs.Inode {
	if path == "" {
		return nil
	}
	for name := range strings.SplitSeq(path[1:], "/") {
		i, ok := slices.BinarySearchFunc(dir.Entries, name, func(e rafs.Dirent, name string) int { return strings.Compare(e.Name, name) })
		if !ok {
			return nil
		}
		dir = dir.Entries[i].Inode
	}
	return dir
}
