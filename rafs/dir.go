package rafs

import "errors"

// withDots appends to dst the entries of directory n as they are stored: sorted
// bytewise, with "." and ".." in their places, which need not be the first two.
func withDots(dst []Dirent, n, parent *Inode) []Dirent {
	dots := [...]Dirent{{".", n}, {"..", parent}}
	next := 0
	for _, d := range n.Entries {
		for next < len(dots) && dots[next].Name < d.Name {
			dst = append(dst, dots[next])
			next++
		}
		dst = append(dst, d)
	}
	return append(dst, dots[next:]...)
}

// dirBlock returns how many of ds the next directory block takes and the bytes
// they need: blocks are filled in order, an entry never crosses one.
func dirBlock(ds []Dirent) (n, used int) {
	for n < len(ds) && used+direntSize+len(ds[n].Name) <= blockSize {
		used += direntSize + len(ds[n].Name)
		n++
	}
	return n, used
}

// dirSize is i_size of a directory with the stored entries ds.
func dirSize(ds []Dirent) int64 {
	var size int64
	for len(ds) > 0 {
		n, used := dirBlock(ds)
		if ds = ds[n:]; len(ds) > 0 {
			used = blockSize
		}
		size += int64(used)
	}
	return size
}

// putDirents writes one directory block to b, which is zero. nids are those of
// the entries, and may be more.
func putDirents(b []byte, ds []Dirent, nids []uint64) {
	nameOff := len(ds) * direntSize
	for i, d := range ds {
		rec := b[i*direntSize:]
		le.PutUint64(rec, nids[i])
		le.PutUint16(rec[8:], uint16(nameOff))
		rec[10] = dirType(d.Inode)
		nameOff += copy(b[nameOff:], d.Name)
	}
}

// dirType is the file type as directory entries tell it.
func dirType(n *Inode) byte {
	switch n.Type() {
	case ModeRegular:
		return 1
	case ModeDir:
		return 2
	case ModeChar:
		return 3
	case ModeBlock:
		return 4
	case ModeFIFO:
		return 5
	case ModeSocket:
		return 6
	default:
		return 7 // symlink
	}
}

// rawDirent is an entry of a directory block before its inode is known.
type rawDirent struct {
	name string
	nid  uint64
}

// readDirents reads one directory block. Names come out 1 to 255 bytes long;
// whether they are allowed and sorted, checkInode says.
func readDirents(dst []rawDirent, b []byte) ([]rawDirent, error) {
	if len(b) < direntSize {
		return nil, errors.New("directory block is shorter than an entry")
	}
	first := int(le.Uint16(b[8:]))
	if first < direntSize || first%direntSize != 0 || first > len(b) {
		return nil, errors.New("first name of a directory block is at no entry's end")
	}
	names := string(b[first:])
	for at := 0; at < first; at += direntSize {
		start, end := int(le.Uint16(b[at+8:]))-first, len(names)
		if next := at + direntSize; next < first {
			end = int(le.Uint16(b[next+8:])) - first
		} else {
			for end > 0 && names[end-1] == 0 {
				end--
			}
		}
		if start < 0 || end > len(names) || start >= end || end-start > MaxName {
			return nil, errors.New("directory entry's name is empty, too long or outside its block")
		}
		dst = append(dst, rawDirent{name: names[start:end], nid: le.Uint64(b[at:])})
	}
	return dst, nil
}
