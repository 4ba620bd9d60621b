package worker

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// root looks things up inside a mounted image. Symlinks and .. are resolved as
// a process in the sandbox would see them: the kernel clamps them at the root.
type root struct{ fd int }

func openRoot(dir string) (*root, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open image root %s: %w", dir, err)
	}
	return &root{fd}, nil
}

func (r *root) close() { unix.Close(r.fd) }

func (r *root) open(name string, flags uint64) (*os.File, error) {
	rel := strings.TrimLeft(name, "/")
	if rel == "" {
		rel = "."
	}
	fd, err := unix.Openat2(r.fd, rel, &unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open in image", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// stat follows symlinks.
func (r *root) stat(name string) (unix.Stat_t, error) {
	var st unix.Stat_t
	f, err := r.open(name, unix.O_PATH)
	if err != nil {
		return st, err
	}
	defer f.Close()
	err = unix.Fstat(int(f.Fd()), &st)
	return st, err
}

// isDir reports whether the folder is there; something else in its place is an
// error.
func (r *root) isDir(name string) (bool, error) {
	st, err := r.stat(name)
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, err
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return false, &os.PathError{Op: "open in image", Path: name, Err: unix.ENOTDIR}
	}
	return true, nil
}

// checkCommand tells a missing command from one that cannot be executed before
// a sandbox is made, the way a shell does: a name with a slash is a path, any
// other is searched on the PATH.
func (r *root) checkCommand(name, cwd string, env []string) error {
	candidates := []string{name}
	switch {
	case !strings.Contains(name, "/"):
		candidates = searchPath(name, env)
	case !path.IsAbs(name):
		candidates = []string{path.Join(cwd, name)}
	}
	found := false
	for _, c := range candidates {
		st, err := r.stat(c)
		if err != nil {
			if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
				continue
			}
			return err
		}
		found = true
		if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o111 != 0 {
			return nil
		}
	}
	if found {
		return fmt.Errorf("command %q: %w", name, ErrNotExecutable)
	}
	return fmt.Errorf("command %q: %w", name, ErrCommandNotFound)
}

func searchPath(name string, env []string) []string {
	var out []string
	for _, kv := range env {
		dirs, ok := strings.CutPrefix(kv, "PATH=")
		if !ok {
			continue
		}
		for dir := range strings.SplitSeq(dirs, ":") {
			out = append(out, path.Join("/", dir, name))
		}
	}
	return out
}

// identity is a user as the image's own passwd and group files describe it.
type identity struct {
	uid, gid uint32
	groups   []uint32
	home     string
}

// maxAccountLine and maxAccountFile bound passwd and group: the image is hostile.
const (
	maxAccountLine = 64 << 10
	maxAccountFile = 4 << 20
)

// ErrNoUser says that a user or group is in neither of the two files.
var ErrNoUser = errors.New("not in the image's /etc/passwd or /etc/group")

// errNoAccounts says that passwd or group is not a file to look users up in. An
// image that names no user runs without it.
var errNoAccounts = errors.New("no user can be looked up")

// accounts reads a passwd or group file; a missing one is empty.
func (r *root) accounts(name string) ([][]string, error) {
	f, err := r.open(name, unix.O_RDONLY|unix.O_NONBLOCK)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return nil, fmt.Errorf("%w: %w", errNoAccounts, err)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > maxAccountFile {
		return nil, fmt.Errorf("%w: %s in the image must be a regular file of at most %d bytes", errNoAccounts, name, maxAccountFile)
	}
	return parseAccounts(f, name)
}

func parseAccounts(r io.Reader, name string) ([][]string, error) {
	var out [][]string
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxAccountLine)
	for lines.Scan() {
		const fields = 3 // name, password, id: what both files begin with
		if f := strings.Split(lines.Text(), ":"); len(f) > fields {
			out = append(out, f)
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return nil, fmt.Errorf("%w: %s in the image has a line of more than %d bytes", errNoAccounts, name, maxAccountLine)
	}
	return out, lines.Err()
}

// lookupUser resolves user[:group] as docker does: names come from the image's
// /etc/passwd and /etc/group; numbers need no entry; empty is root.
func (r *root) lookupUser(spec string) (identity, error) {
	passwd, err := r.accounts("/etc/passwd")
	if spec != "" && err != nil || err != nil && !errors.Is(err, errNoAccounts) {
		return identity{home: "/"}, err
	}
	group, err := r.accounts("/etc/group")
	if spec != "" && err != nil || err != nil && !errors.Is(err, errNoAccounts) {
		return identity{home: "/"}, err
	}
	return lookupIn(spec, passwd, group)
}

func lookupIn(spec string, passwd, group [][]string) (id identity, err error) {
	userName, groupName, hasGroup := strings.Cut(spec, ":")
	if userName == "" {
		userName = "0"
	}
	id.home = "/"
	entry := findAccount(passwd, userName)
	if entry == nil {
		if id.uid, err = parseID(userName); err != nil {
			return id, fmt.Errorf("user %q: %w", userName, ErrNoUser)
		}
	} else if err := id.fromPasswd(entry, group); err != nil {
		return id, err
	}
	if hasGroup && groupName != "" {
		id.groups = nil
		if g := findAccount(group, groupName); g != nil {
			groupName = g[2]
		}
		if id.gid, err = parseID(groupName); err != nil {
			return id, fmt.Errorf("group %q: %w", groupName, ErrNoUser)
		}
	}
	return id, nil
}

func (id *identity) fromPasswd(entry []string, group [][]string) (err error) {
	if id.uid, err = parseID(entry[2]); err != nil {
		return fmt.Errorf("/etc/passwd of the image, user %q: %w", entry[0], err)
	}
	if id.gid, err = parseID(entry[3]); err != nil {
		return fmt.Errorf("/etc/passwd of the image, user %q: %w", entry[0], err)
	}
	const homeField = 5
	if len(entry) > homeField && entry[homeField] != "" {
		id.home = entry[homeField]
	}
	for _, g := range group {
		for member := range strings.SplitSeq(g[3], ",") {
			if gid, err := parseID(g[2]); err == nil && member == entry[0] {
				id.groups = append(id.groups, gid)
			}
		}
	}
	return nil
}

// findAccount finds an entry by name, or by number when no name matches.
func findAccount(entries [][]string, key string) []string {
	for _, column := range []int{0, 2} {
		for _, e := range entries {
			if e[column] == key {
				return e
			}
		}
	}
	return nil
}

func parseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	return uint32(n), err
}
