package main

import (
	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// target makes what a share is mounted on, and says where it really is: the mount
// itself follows no link.
func (h *helper) target() error {
	h.q.Flags |= wire.FlagMkDirs
	p, err := final(h.q.Path)
	if err != nil {
		return fail(err, h.q.Path)
	}
	dir, base, _ := split(p)
	if base == "" || base == "." || base == ".." {
		return code(wire.CodeType, p)
	}
	fd, err := h.parent(dir)
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
	if st.Mode&unix.S_IFMT != want {
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

// unmount removes a share, and nothing else that is mounted.
func (h *helper) unmount() error {
	var st unix.Statfs_t
	if err := unix.Statfs(h.q.Path, &st); err != nil {
		return fail(err, h.q.Path)
	}
	if uint32(st.Type) != erofsMagic {
		return code(wire.CodeType, h.q.Path)
	}
	// Who has a file of it open keeps that file; the path leads there no more.
	if err := unix.Unmount(h.q.Path, unix.MNT_DETACH); err != nil {
		return fail(err, h.q.Path)
	}
	h.send(wire.KindEnd, nil)
	return nil
}
