package main

import (
	"strings"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

// remover removes files, and folders with what is in them, however deep that is: what
// runs in the guest can nest more folders than there are descriptors, and than a path can
// name. It holds open the folder that it is in and no other. It goes back by "..", and
// goes on only if that is where it came from, so that a folder that is moved meanwhile
// leads to nothing else.
type remover struct {
	h      *helper
	cur    int
	levels []removing
}

// removing is one folder on the way to cur, the first and the last too.
type removing struct {
	id    [2]uint64 // of the folder, set when it is left for one of its own
	names []string  // what it still has to lose, the last first; the last is the one that was gone into
}

func (r *remover) run() error {
	for {
		l := &r.levels[len(r.levels)-1]
		if len(l.names) > 0 {
			if err := r.next(l); err != nil {
				return fail(err, r.path())
			}
			continue
		}
		if len(r.levels) == 1 {
			return nil
		}
		if err := r.back(); err != nil {
			return fail(err, r.path())
		}
	}
}

// next removes the last of the names, or goes into it.
func (r *remover) next(l *removing) error {
	name := l.names[len(l.names)-1]
	err := unix.Unlinkat(r.cur, name, 0)
	if err != unix.EISDIR && err != unix.EPERM {
		return r.removed(l, err)
	}
	fd, operr := openFolder(r.cur, name, false)
	if operr == unix.ENOTDIR || operr == unix.ELOOP {
		return err // it is none: the kernel had its reason
	}
	if operr != nil {
		return r.removed(l, operr)
	}
	names, err := readNames(fd, r.h.q.MaxCount)
	if err == nil {
		l.id, err = identity(r.cur)
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	unix.Close(r.cur)
	r.cur = fd
	r.levels = append(r.levels, removing{names: names})
	return nil
}

// back leaves an empty folder and removes it.
func (r *remover) back() error {
	fd, err := openFolder(r.cur, "..", true)
	if err != nil {
		return err
	}
	unix.Close(r.cur)
	r.cur = fd
	r.levels = r.levels[:len(r.levels)-1]
	l := &r.levels[len(r.levels)-1]
	id, err := identity(fd)
	if err != nil {
		return err
	}
	if id != l.id {
		return code(wire.CodeChanged, r.path())
	}
	return r.removed(l, unix.Unlinkat(fd, l.names[len(l.names)-1], unix.AT_REMOVEDIR))
}

// removed takes note of a name that is gone. Below the first it may have been somebody else.
func (r *remover) removed(l *removing, err error) error {
	if err == unix.ENOENT && len(r.levels) > 1 {
		err = nil
	}
	if err == nil {
		l.names = l.names[:len(l.names)-1]
	}
	return err
}

// path is what is being removed, as far as a message has room.
func (r *remover) path() string {
	dir, _, _ := split(r.h.q.Path)
	var b strings.Builder
	b.WriteString(strings.TrimRight(dir, "/"))
	for _, l := range r.levels {
		if len(l.names) > 0 && b.Len() < wire.MaxMessage {
			b.WriteString("/" + l.names[len(l.names)-1])
		}
	}
	return b.String()
}

// identity is what tells an open file from all others.
func identity(fd int) ([2]uint64, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return [2]uint64{uint64(st.Dev), st.Ino}, err
}
