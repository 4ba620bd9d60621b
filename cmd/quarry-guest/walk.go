package main

import (
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// maxDepth bounds the open folders of a walk: each level is one, and the top is one more
// than a tar up makes. A path of MaxPath bytes has at most twice as many levels, of names
// of one byte.
const maxDepth = wire.MaxFolders + 1

// walker goes through folders. It opens each by its name in the one above, and
// follows no link.
type walker struct {
	h     *helper
	base  string // before the paths of entries
	depth uint32
	count uint64
	bytes int64
	// first is the first name of each file that has several.
	first map[[2]uint64]string
	file  func(dir int, name string, e wire.Entry, st *unix.Stat_t) error
}

func (h *helper) list() error {
	fd, err := openFolder(unix.AT_FDCWD, h.q.Path, true)
	if err != nil {
		return fail(err, h.q.Path)
	}
	base := strings.TrimRight(h.q.Path, "/") + "/"
	w := &walker{h: h, base: base, depth: min(h.q.Depth, maxDepth)}
	w.file = func(_ int, _ string, e wire.Entry, _ *unix.Stat_t) error {
		h.send(wire.KindEntry, e.Encode())
		return nil
	}
	if err := w.folder(fd, "", 1); err != nil {
		return err
	}
	h.send(wire.KindEnd, nil)
	return nil
}

// openFolder opens a folder to read it. Without follow it opens none by a link: gVisor
// looks at O_NOFOLLOW of a folder only with O_PATH.
func openFolder(dir int, name string, follow bool) (int, error) {
	const flags = unix.O_DIRECTORY | unix.O_CLOEXEC
	if follow {
		return unix.Openat(dir, name, unix.O_RDONLY|flags, 0)
	}
	at, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|flags, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(at)
	return unix.Openat(at, ".", unix.O_RDONLY|flags, 0)
}

// found is one name of a folder.
type found struct {
	name string
	e    wire.Entry
	st   unix.Stat_t
	key  string // sorts as the name does in a tar, where folders end with a slash
}

// folder sends what an open folder holds, in order of names, and closes it.
func (w *walker) folder(fd int, rel string, level uint32) error {
	defer unix.Close(fd)
	all, err := w.look(fd, rel)
	if err != nil {
		return err
	}
	for i := range all {
		f := &all[i]
		if err := w.file(fd, f.name, f.e, &f.st); err != nil {
			return err
		}
		if f.e.Type != wire.TypeFolder || level >= w.depth {
			continue
		}
		if level >= maxDepth {
			return code(wire.CodeDeep, f.e.Path)
		}
		sub, err := openFolder(fd, f.name, false)
		if gone(err) {
			continue
		}
		if err != nil {
			return fail(err, f.e.Path)
		}
		if err := w.folder(sub, rel+f.name+"/", level+1); err != nil {
			return err
		}
		f.e, f.st = wire.Entry{}, unix.Stat_t{}
	}
	return nil
}

// look reads the names of a folder and what they are, and sorts them.
func (w *walker) look(fd int, rel string) ([]found, error) {
	names, err := readNames(fd, w.h.q.MaxCount-w.count)
	if err != nil {
		return nil, fail(err, w.base+rel)
	}
	all := make([]found, 0, len(names))
	for _, name := range names {
		if w.excluded(rel+name, name) {
			continue
		}
		p := w.base + rel + name
		if len(p) >= wire.MaxPath {
			return nil, code(wire.CodeDeep, w.base+rel)
		}
		f := found{name: name, key: name}
		e, err := entryAt(fd, name, p, &f.st)
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		f.e = e
		if e.Type == wire.TypeFolder {
			f.key += "/"
		}
		all = append(all, f)
	}
	w.count += uint64(len(all))
	slices.SortFunc(all, func(a, b found) int { return strings.Compare(a.key, b.key) })
	return all, nil
}

// gone reports whether something went away, or became something else, since its name
// was read: as if it had not been there.
func gone(err error) bool {
	if f, ok := err.(*failure); ok {
		err = unix.Errno(f.number)
	}
	return err == unix.ENOENT || err == unix.ESRCH || err == unix.ENOTDIR || err == unix.ELOOP
}

func (w *walker) excluded(rel, name string) bool {
	for _, x := range w.h.q.Exclude {
		if x == "" {
			continue
		}
		if ok, _ := path.Match(x, rel); ok {
			return true
		}
		if ok, _ := path.Match(x, name); ok {
			return true
		}
	}
	return false
}

// readNames reads the names of a folder, limit at most.
func readNames(fd int, limit uint64) ([]string, error) {
	var names []string
	b := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n <= 0 {
			return names, nil
		}
		_, _, names = unix.ParseDirent(b[:n], -1, names)
		if uint64(len(names)) > limit {
			return nil, code(wire.CodeMany, "files")
		}
	}
}

func (h *helper) tarDown() error {
	var st unix.Stat_t
	dir, name, _ := split(h.q.Path)
	if err := unix.Stat(h.q.Path, &st); err != nil {
		return fail(err, h.q.Path)
	}
	w := &walker{h: h, depth: maxDepth + 1, first: map[[2]uint64]string{}, file: nil}
	w.file = w.take
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		fd, err := openFolder(unix.AT_FDCWD, dir, true)
		if err != nil {
			return fail(err, dir)
		}
		e, err := entryAt(fd, name, name, &st)
		if err != nil {
			return err
		}
		if err := w.take(fd, name, e, &st); err != nil {
			return err
		}
		h.send(wire.KindEnd, nil)
		return nil
	}
	fd, err := openFolder(unix.AT_FDCWD, h.q.Path, true)
	if err != nil {
		return fail(err, h.q.Path)
	}
	if err := w.folder(fd, "", 1); err != nil {
		return err
	}
	h.send(wire.KindEnd, nil)
	return nil
}

// take sends one file of a tar, with its content.
func (w *walker) take(dir int, name string, e wire.Entry, st *unix.Stat_t) error {
	h := w.h
	if h.out != nil {
		return h.out
	}
	if e.Shared {
		id := [2]uint64{uint64(st.Dev), st.Ino}
		if first, ok := w.first[id]; ok {
			e.Type, e.Shared, e.Size, e.Target = wire.TypeHardLink, false, 0, first
			h.send(wire.KindEntry, e.Encode())
			return nil
		}
		w.first[id] = e.Path
	}
	if e.Type != wire.TypeFile {
		h.send(wire.KindEntry, e.Encode())
		return nil
	}
	w.bytes += e.Size
	if e.Size > h.q.MaxBytes || w.bytes > h.q.MaxBytes {
		return code(wire.CodeMany, e.Path)
	}
	was := *st
	fd, err := openFile(dir, name, false, st)
	if err != nil {
		if gone(err) {
			err = code(wire.CodeChanged, e.Path)
		}
		return fail(err, e.Path)
	}
	defer unix.Close(fd)
	if st.Dev != was.Dev || st.Ino != was.Ino || st.Size != was.Size {
		return code(wire.CodeChanged, e.Path)
	}
	h.send(wire.KindEntry, e.Encode())
	sum, err := h.sendData(fd, 0, e.Size)
	if err != nil {
		return fail(err, e.Path)
	}
	if err := unix.Fstat(fd, st); err != nil || st.Size != e.Size {
		return code(wire.CodeChanged, e.Path)
	}
	h.send(wire.KindSum, sum.Encode())
	return nil
}
