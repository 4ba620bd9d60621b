package main

import (
	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// entryOf makes an entry of what was asked of the kernel. A symlink has no target yet.
func entryOf(st *unix.Stat_t, path string) wire.Entry {
	e := wire.Entry{
		Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid, Path: path,
		Sec: int64(st.Mtim.Sec), Nsec: uint32(st.Mtim.Nsec) % 1e9,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		e.Type = wire.TypeFolder
	case unix.S_IFLNK:
		e.Type = wire.TypeSymlink
	case unix.S_IFIFO:
		e.Type = wire.TypeFIFO
	case unix.S_IFSOCK:
		e.Type = wire.TypeSocket
	case unix.S_IFCHR:
		e.Type = wire.TypeChar
	case unix.S_IFBLK:
		e.Type = wire.TypeBlock
	default:
		e.Type = wire.TypeFile
		e.Size = max(st.Size, 0)
		e.Shared = st.Nlink > 1
	}
	if e.Type == wire.TypeChar || e.Type == wire.TypeBlock {
		e.Major, e.Minor = unix.Major(uint64(st.Rdev)), unix.Minor(uint64(st.Rdev))
	}
	return e
}

// entryAt is the entry of a name in an open folder; links are not followed.
func entryAt(dir int, name, path string, st *unix.Stat_t) (wire.Entry, error) {
	if err := unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return wire.Entry{}, fail(err, path)
	}
	e := entryOf(st, path)
	if e.Type == wire.TypeSymlink {
		target, err := readlink(dir, name)
		if err != nil {
			return wire.Entry{}, fail(err, path)
		}
		e.Target = target
	}
	return e, nil
}

func readlink(dir int, name string) (string, error) {
	b := make([]byte, wire.MaxPath+1)
	n, err := unix.Readlinkat(dir, name, b)
	switch {
	case err != nil:
		return "", err
	case n > wire.MaxPath:
		return "", unix.ENAMETOOLONG
	case n == 0:
		return "", unix.ENOENT // the kernel follows no such link either
	}
	return string(b[:n]), nil
}

func (h *helper) stat() error {
	var st unix.Stat_t
	e, err := entryAt(unix.AT_FDCWD, h.q.Path, h.q.Path, &st)
	if err != nil {
		return err
	}
	h.send(wire.KindEntry, e.Encode())
	return nil
}

// openFile opens a regular file to read it, and nothing else: what has another type
// is not opened, and when it comes in between, opening it does not wait.
func openFile(dir int, name string, follow bool, st *unix.Stat_t) (int, error) {
	flags, at := unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NOFOLLOW, unix.AT_SYMLINK_NOFOLLOW
	if follow {
		flags, at = flags&^unix.O_NOFOLLOW, 0
	}
	if err := unix.Fstatat(dir, name, st, at); err != nil {
		return -1, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return -1, code(wire.CodeType, name)
	}
	fd, err := unix.Openat(dir, name, flags, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Fstat(fd, st); err != nil {
		unix.Close(fd)
		return -1, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		unix.Close(fd)
		return -1, code(wire.CodeType, name)
	}
	return fd, nil
}
