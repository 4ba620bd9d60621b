package main

import (
	"bytes"
	"crypto/sha256"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// maxLinks is how many symlinks a path may lead over, as in Linux.
const maxLinks = 40

// final follows the symlinks that the last element of a path may be, also one that
// leads to nothing yet.
func final(p string) (string, error) {
	for range maxLinks {
		if len(p) >= wire.MaxPath {
			return "", unix.ENAMETOOLONG
		}
		var st unix.Stat_t
		err := unix.Lstat(p, &st)
		if err == unix.ENOENT {
			return p, nil
		}
		if err != nil {
			return "", err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFLNK {
			return p, nil
		}
		target, err := readlink(unix.AT_FDCWD, p)
		if err != nil {
			return "", err
		}
		if target[0] != '/' {
			dir, _, _ := split(p)
			target = dir + "/" + target
		}
		p = target
	}
	return "", unix.ELOOP
}

// mkdirs makes a folder and what is missing above it, as the request's owner.
func (h *helper) mkdirs(dir string) error {
	for i := 1; i <= len(dir); i++ {
		if i < len(dir) && dir[i] != '/' {
			continue
		}
		err := unix.Mkdir(dir[:i], 0o755)
		if err == nil {
			err = unix.Lchown(dir[:i], int(h.q.UID), int(h.q.GID))
		}
		if err != nil && err != unix.EEXIST {
			return fail(err, dir[:i])
		}
	}
	return nil
}

// parent opens the folder in which a file is to be made.
func (h *helper) parent(dir string) (int, error) {
	fd, err := openFolder(unix.AT_FDCWD, dir, true)
	if err == unix.ENOENT && h.q.Flags&wire.FlagMkDirs != 0 {
		if err := h.mkdirs(dir); err != nil {
			return -1, err
		}
		fd, err = openFolder(unix.AT_FDCWD, dir, true)
	}
	return fd, fail(err, dir)
}

func (h *helper) write() error {
	p, err := final(h.q.Path)
	if err != nil {
		return fail(err, h.q.Path)
	}
	dir, base, slash := split(p)
	if slash || base == "" || base == "." || base == ".." {
		return code(wire.CodeType, p)
	}
	fd, err := h.parent(dir)
	if err != nil {
		return err
	}
	mode, uid, gid := h.q.Mode, h.q.UID, h.q.GID
	var st unix.Stat_t
	switch err := unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case err == unix.ENOENT:
	case err != nil:
		return fail(err, p)
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return code(wire.CodeType, p)
	default:
		uid, gid = st.Uid, st.Gid
		if h.q.Flags&wire.FlagMode == 0 {
			mode = st.Mode & 0o7777
		}
	}
	n, err := h.begin(fd)
	if err != nil {
		return fail(err, dir)
	}
	h.send(wire.KindReady, nil)
	h.flush()
	if err := h.receive(n.fd); err != nil {
		n.drop()
		return fail(err, p)
	}
	if err := n.finish(base, mode, uid, gid); err != nil {
		return fail(err, p)
	}
	e, err := entryAt(fd, base, h.q.Path, &st)
	if err != nil {
		return err
	}
	h.send(wire.KindEntry, e.Encode())
	return nil
}

// newFile is a file under a name that nobody looks for, until it is whole.
type newFile struct {
	dir, fd int
	name    string
}

func (h *helper) begin(dir int) (*newFile, error) {
	name := h.tempName()
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	return &newFile{dir, fd, name}, nil
}

// tempName is another name each time, and no guess of what runs beside.
func (h *helper) tempName() string {
	var b [8]byte
	unix.Getrandom(b[:], 0)
	const digits = "0123456789abcdef"
	name := []byte(".quarry-")
	for _, x := range b {
		name = append(name, digits[x>>4], digits[x&15])
	}
	return string(name)
}

func (n *newFile) drop() {
	unix.Close(n.fd)
	unix.Unlinkat(n.dir, n.name, 0)
}

// finish gives the file its owner, mode and name, in this order: a new owner takes
// setuid away, and nobody is to see the file without.
func (n *newFile) finish(base string, mode, uid, gid uint32) error {
	err := unix.Fchown(n.fd, int(uid), int(gid))
	if err == nil {
		err = unix.Fchmod(n.fd, mode)
	}
	if cerr := unix.Close(n.fd); err == nil {
		err = cerr
	}
	if err == nil {
		err = unix.Renameat(n.dir, n.name, n.dir, base)
	}
	if err != nil {
		unix.Unlinkat(n.dir, n.name, 0)
	}
	return err
}

// receive writes what comes until the sum, and is no error only if it is that.
func (h *helper) receive(fd int) error {
	digest, size := sha256.New(), int64(0)
	for {
		k, p, err := h.in.Next()
		if err != nil {
			return code(wire.CodeProtocol, "data ends early")
		}
		switch k {
		case wire.KindData:
			digest.Write(p)
			size += int64(len(p))
			if size > h.q.MaxBytes {
				return code(wire.CodeMany, h.q.Path)
			}
			if err := writeAll(fd, p); err != nil {
				return err
			}
		case wire.KindSum:
			sum, err := wire.DecodeSum(p)
			if err != nil {
				return code(wire.CodeProtocol, "sum")
			}
			if sum.Size != size || !bytes.Equal(sum.SHA256[:], digest.Sum(nil)) {
				return code(wire.CodeSum, h.q.Path)
			}
			return nil
		default:
			return code(wire.CodeProtocol, "data")
		}
	}
}

func writeAll(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return unix.EIO
		}
		b = b[n:]
	}
	return nil
}

func (h *helper) remove() error {
	dir, base, _ := split(h.q.Path)
	if base == "" || base == "." || base == ".." {
		return fail(unix.EBUSY, h.q.Path)
	}
	fd, err := openFolder(unix.AT_FDCWD, dir, true)
	if err != nil {
		return fail(err, h.q.Path)
	}
	r := &remover{h: h, cur: fd, levels: []removing{{names: []string{base}}}}
	if err := r.run(); err != nil {
		return err
	}
	h.send(wire.KindEnd, nil)
	return nil
}
