package main

import (
	"strings"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// target makes what a share is mounted on, and says where it really is. Symlinks are
// the guest's, which could have the share land anywhere: none is followed unless the
// host asks for it, of a guest in which nothing has run.
func (h *helper) target() error {
	h.q.Flags |= wire.FlagMkDirs
	p, open := h.q.Path, h.plainParent
	if h.q.Flags&wire.FlagLinks != 0 {
		var err error
		if p, err = final(p); err != nil {
			return fail(err, h.q.Path)
		}
		open = h.parent
	}
	dir, base, _ := split(p)
	if base == "" || base == "." || base == ".." {
		return code(wire.CodeType, p)
	}
	fd, err := open(dir)
	if err != nil {
		return err
	}
	want := uint32(unix.S_IFREG)
	if h.q.Flags&wire.FlagFolder != 0 {
		want = unix.S_IFDIR
	}
	var st unix.Stat_t
	err = unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		if want == unix.S_IFDIR {
			err = unix.Mkdirat(fd, base, 0o755)
		} else {
			err = unix.Mknodat(fd, base, unix.S_IFREG|0o644, 0)
		}
		if err == nil {
			err = unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		}
	}
	if err != nil {
		return fail(err, p)
	}
	switch st.Mode & unix.S_IFMT {
	case want:
	case unix.S_IFLNK:
		return code(wire.CodeLink, p)
	default:
		return code(wire.CodeType, p)
	}
	real, err := where(fd)
	if err != nil {
		return fail(err, dir)
	}
	e := entryOf(&st, join(real, base))
	h.send(wire.KindEntry, e.Encode())
	return nil
}

// plainParent is parent without a symlink on the way.
func (h *helper) plainParent(dir string) (int, error) {
	fd, err := openFolder(unix.AT_FDCWD, "/", true)
	if err != nil {
		return -1, fail(err, "/")
	}
	at := ""
	for name := range strings.SplitSeq(dir, "/") {
		if name == "" || name == "." {
			continue
		}
		at += "/" + name
		next, err := openFolder(fd, name, false)
		if err == unix.ENOENT && h.q.Flags&wire.FlagMkDirs != 0 {
			if err = unix.Mkdirat(fd, name, 0o755); err == nil || err == unix.EEXIST {
				next, err = openFolder(fd, name, false)
			}
		}
		if err != nil {
			var st unix.Stat_t
			if unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
				err = code(wire.CodeLink, at)
			}
			unix.Close(fd)
			return -1, fail(err, at)
		}
		unix.Close(fd)
		fd = next
	}
	return fd, nil
}

// where says the path of an open folder.
func where(fd int) (string, error) {
	if err := unix.Fchdir(fd); err != nil {
		return "", err
	}
	b := make([]byte, wire.MaxPath+1)
	n, err := unix.Getcwd(b)
	if err != nil {
		return "", err
	}
	if n < 2 || b[0] != '/' {
		return "", unix.ENOENT
	}
	return string(b[:n-1]), nil
}

func join(dir, base string) string {
	if dir == "/" {
		return "/" + base
	}
	return dir + "/" + base
}

// erofsMagic is what statfs(2) says of an EROFS.
const erofsMagic = 0xe0f5e1e2

// unmount removes a share, and nothing else that is mounted. It follows no symlink.
func (h *helper) unmount() error {
	dir, base, _ := split(h.q.Path)
	if base == "" || base == "." || base == ".." {
		return code(wire.CodeType, h.q.Path)
	}
	fd, err := h.plainParent(dir)
	if err != nil {
		return err
	}
	if err := unix.Fchdir(fd); err != nil {
		return fail(err, dir)
	}
	at, err := unix.Open(base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err, h.q.Path)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(at, &st); err != nil {
		return fail(err, h.q.Path)
	}
	unix.Close(at)
	if uint32(st.Type) != erofsMagic {
		return code(wire.CodeType, h.q.Path)
	}
	// Who has a file of it open keeps that file; the path leads there no more.
	if err := unix.Unmount(base, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fail(err, h.q.Path)
	}
	h.send(wire.KindEnd, nil)
	return nil
}
