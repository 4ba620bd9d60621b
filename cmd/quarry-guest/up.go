package main

import (
	"strings"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// up unpacks below one folder, the top. It resolves every name itself, folder by
// folder from the top on, so that no link leads out of it, also none that somebody
// makes meanwhile.
type up struct {
	h     *helper
	top   int
	root  bool // the top is the guest's root: an absolute link stays inside
	count uint64
	bytes int64
	late  []wire.Entry // folders, whose mtimes are set at the end
	// dir is the open folder of the entry before, dirName its name: files of one
	// folder follow one another.
	dir     int
	dirName string
	// way are the folders above it, open from the top on, so that the next one is not
	// looked for from there: else many that are nested take a time that is the square of
	// their number. No link is among them, and no entry replaces a folder.
	way []level
}

// level is an open folder in the one before.
type level struct {
	name string
	fd   int
}

func (h *helper) tarUp() error {
	h.q.Flags |= wire.FlagMkDirs
	fd, err := h.parent(strings.TrimRight(h.q.Path, "/") + "/")
	if err != nil {
		return err
	}
	u := &up{h: h, top: fd, dir: -1}
	var top, root unix.Stat_t
	if err := unix.Fstat(fd, &top); err != nil {
		return fail(err, h.q.Path)
	}
	if err := unix.Stat("/", &root); err != nil {
		return fail(err, "/")
	}
	u.root = top.Dev == root.Dev && top.Ino == root.Ino
	h.send(wire.KindReady, nil)
	h.flush()
	for {
		k, p, err := h.in.Next()
		if err != nil {
			return code(wire.CodeProtocol, "entries end early")
		}
		if k == wire.KindEnd {
			break
		}
		if k != wire.KindEntry {
			return code(wire.CodeProtocol, "entry")
		}
		e, err := wire.DecodeEntry(p)
		if err != nil {
			return code(wire.CodeProtocol, "entry")
		}
		if err := u.entry(e); err != nil {
			return fail(err, e.Path)
		}
	}
	for i := len(u.late) - 1; i >= 0; i-- {
		if err := u.setFolderTime(u.late[i]); err != nil {
			return fail(err, u.late[i].Path)
		}
	}
	h.send(wire.KindEnd, nil)
	return nil
}

// elements cuts a name of a tar, which the host has checked already.
func elements(name string) ([]string, error) {
	parts := strings.Split(name, "/")
	for _, p := range parts {
		if p == "" || p == "." || p == ".." {
			return nil, code(wire.CodeProtocol, name)
		}
	}
	return parts, nil
}

// in opens the folder that holds a name.
func (u *up) in(name string) (int, string, error) {
	parts, err := elements(name)
	if err != nil {
		return -1, "", err
	}
	base := parts[len(parts)-1]
	dirName := name[:len(name)-len(base)]
	if u.dir >= 0 && dirName == u.dirName {
		return u.dir, base, nil
	}
	fd, err := u.open(parts[:len(parts)-1])
	if err != nil {
		return -1, "", err
	}
	u.forget()
	u.dir, u.dirName = fd, dirName
	return fd, base, nil
}

// forget closes the folder of the entry before: its name may mean another one now.
func (u *up) forget() {
	if u.dir >= 0 {
		unix.Close(u.dir)
	}
	u.dir = -1
}

// open opens a folder below the top and makes what is missing. The names of a tar are its
// own, and have neither "." nor "..".
func (u *up) open(names []string) (int, error) {
	if len(names) > wire.MaxFolders {
		return -1, code(wire.CodeDeep, strings.Join(names, "/"))
	}
	n := 0
	for n < len(names) && n < len(u.way) && u.way[n].name == names[n] {
		n++
	}
	u.leave(n)
	for ; n < len(names); n++ {
		fd, target, err := u.step(u.last(), names[n])
		if err != nil {
			return -1, err
		}
		if target != "" {
			return u.follow(names)
		}
		u.way = append(u.way, level{names[n], fd})
	}
	return duplicate(u.last())
}

// last is the last folder of the way.
func (u *up) last() int {
	if len(u.way) == 0 {
		return u.top
	}
	return u.way[len(u.way)-1].fd
}

// leave goes back to the first n folders of the way.
func (u *up) leave(n int) {
	for _, l := range u.way[n:] {
		unix.Close(l.fd)
	}
	u.way = u.way[:n]
}

func duplicate(fd int) (int, error) {
	return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
}

// follow is open where a symlink is on the way. ".." in a link goes
// back to a folder that is open, so that one that is moved meanwhile leads nowhere.
func (u *up) follow(todo []string) (int, error) {
	top, err := duplicate(u.top)
	if err != nil {
		return -1, err
	}
	stack := []int{top}
	pop := func(n int) {
		for len(stack) > n {
			unix.Close(stack[len(stack)-1])
			stack = stack[:len(stack)-1]
		}
	}
	defer func() { pop(0) }()
	links := 0
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		if name == "" || name == "." {
			continue
		}
		if name == ".." {
			if len(stack) == 1 && !u.root {
				return -1, code(wire.CodeEscape, name)
			}
			pop(max(len(stack)-1, 1))
			continue
		}
		if len(stack) > wire.MaxFolders {
			return -1, code(wire.CodeDeep, name)
		}
		fd, target, err := u.step(stack[len(stack)-1], name)
		if err != nil {
			return -1, err
		}
		if target == "" {
			stack = append(stack, fd)
			continue
		}
		if links++; links > maxLinks {
			return -1, unix.ELOOP
		}
		if target[0] == '/' {
			if !u.root {
				return -1, code(wire.CodeEscape, name)
			}
			pop(1)
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	last := stack[len(stack)-1]
	stack = stack[:len(stack)-1]
	return last, nil
}

// step opens a folder in another, or says where the symlink in its place leads.
func (u *up) step(dir int, name string) (fd int, target string, err error) {
	fd, err = openFolder(dir, name, false)
	switch err {
	case nil:
		return fd, "", nil
	case unix.ENOENT:
		err := unix.Mkdirat(dir, name, 0o755)
		if err == nil {
			err = unix.Fchownat(dir, name, int(u.h.q.UID), int(u.h.q.GID), unix.AT_SYMLINK_NOFOLLOW)
		}
		if err != nil && err != unix.EEXIST {
			return -1, "", err
		}
		fd, err = openFolder(dir, name, false)
		return fd, "", err
	case unix.ELOOP, unix.ENOTDIR:
		target, rerr := readlink(dir, name)
		if rerr != nil {
			return -1, "", unix.ENOTDIR
		}
		return -1, target, nil
	}
	return -1, "", err
}

// entry unpacks one entry.
func (u *up) entry(e wire.Entry) error {
	u.count++
	u.bytes += e.Size
	if u.count > u.h.q.MaxCount || e.Size > u.h.q.MaxBytes || u.bytes > u.h.q.MaxBytes {
		return code(wire.CodeMany, e.Path)
	}
	dir, base, err := u.in(e.Path)
	if err != nil {
		return err
	}
	if err := replaceable(dir, base); err != nil {
		return err
	}
	switch e.Type {
	case wire.TypeFile:
		return u.file(dir, base, e)
	case wire.TypeFolder:
		return u.folder(dir, base, e)
	case wire.TypeHardLink:
		return u.hardLink(dir, base, e)
	case wire.TypeSymlink:
		tmp := u.h.tempName()
		if err := unix.Symlinkat(e.Target, dir, tmp); err != nil {
			return err
		}
		defer u.forget() // a link may stand now where the folder was reached
		return u.settle(dir, tmp, base, e)
	case wire.TypeFIFO:
		tmp := u.h.tempName()
		if err := unix.Mknodat(dir, tmp, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
		return u.settle(dir, tmp, base, e)
	}
	return code(wire.CodeProtocol, e.Path)
}

// replaceable refuses to take away what no tar can make again: a device or a socket.
func replaceable(dir int, name string) error {
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return nil // what is wrong with it is told by what comes next
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR, unix.S_IFBLK, unix.S_IFSOCK:
		return code(wire.CodeType, name)
	}
	return nil
}

func (u *up) file(dir int, base string, e wire.Entry) error {
	n, err := u.h.begin(dir)
	if err != nil {
		return err
	}
	err = u.h.receive(n.fd)
	if err != nil {
		n.drop()
		return err
	}
	if err := unix.Close(n.fd); err != nil {
		unix.Unlinkat(dir, n.name, 0)
		return err
	}
	return u.settle(dir, n.name, base, e)
}

// settle gives what was made under another name its owner, mode, time and name.
func (u *up) settle(dir int, tmp, base string, e wire.Entry) error {
	err := unix.Fchownat(dir, tmp, int(e.UID), int(e.GID), unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && e.Type != wire.TypeSymlink {
		err = unix.Fchmodat(dir, tmp, e.Mode, 0)
	}
	if err == nil {
		err = setTime(dir, tmp, e)
	}
	if err == nil {
		err = unix.Renameat(dir, tmp, dir, base)
	}
	if err != nil {
		unix.Unlinkat(dir, tmp, 0)
	}
	if err == unix.EISDIR || err == unix.ENOTEMPTY {
		err = unix.EEXIST
	}
	return err
}

func setTime(dir int, name string, e wire.Entry) error {
	ts := unix.Timespec{Sec: e.Sec, Nsec: int64(e.Nsec)}
	return unix.UtimesNanoAt(dir, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

// folder makes a folder. One that is there keeps what it holds; a link to one stays.
func (u *up) folder(dir int, base string, e wire.Entry) error {
	err := unix.Mkdirat(dir, base, 0o700)
	if err == unix.EEXIST {
		var st unix.Stat_t
		if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			err = nil
		case unix.S_IFLNK:
			parts, err := elements(e.Path)
			if err != nil {
				return err
			}
			fd, err := u.open(parts)
			if err == nil {
				unix.Close(fd)
			}
			return err
		}
	}
	if err != nil {
		return err
	}
	fd, err := openFolder(dir, base, false)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fchown(fd, int(e.UID), int(e.GID)); err != nil {
		return err
	}
	u.late = append(u.late, e)
	return unix.Fchmod(fd, e.Mode)
}

func (u *up) setFolderTime(e wire.Entry) error {
	dir, base, err := u.in(e.Path)
	if err != nil {
		return err
	}
	return setTime(dir, base, e)
}

// hardLink gives a file of this folder one more name.
func (u *up) hardLink(dir int, base string, e wire.Entry) error {
	parts, err := elements(e.Target)
	if err != nil {
		return err
	}
	from, err := u.open(parts[:len(parts)-1])
	if err != nil {
		return err
	}
	defer unix.Close(from)
	name := parts[len(parts)-1]
	var st, there unix.Stat_t
	if err := unix.Fstatat(from, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return code(wire.CodeType, e.Target)
	}
	if err := unix.Fstatat(dir, base, &there, unix.AT_SYMLINK_NOFOLLOW); err == nil {
		if there.Dev == st.Dev && there.Ino == st.Ino {
			return nil // removing it might remove the last one
		}
		if there.Mode&unix.S_IFMT == unix.S_IFDIR {
			return unix.EEXIST
		}
		if err := unix.Unlinkat(dir, base, 0); err != nil {
			return err
		}
	}
	return unix.Linkat(from, name, dir, base, 0)
}
