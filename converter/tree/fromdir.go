package tree

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"quarry/rafs"
	"quarry/store/chunk"
)

// FromDir returns the tree of a folder on disk, with file content split and
// hashed but not kept. It is how a mounted image or an unpacked one is compared
// with a stored tree: xattrs that a Merger would leave out are left out here
// too. It follows no symlink below dir, crosses mounts, and needs to be root to
// see every file and trusted xattrs.
func FromDir(ctx context.Context, dir string, chunkSize uint32) (*rafs.Tree, error) {
	if !chunk.ValidSize(int64(chunkSize)) {
		return nil, fmt.Errorf("read folder %s: chunk size %d is not a power of two from %d to %d", dir, chunkSize, chunk.MinSize, chunk.MaxSize)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0) + 1) // one of them scans
	s := &scanner{
		group: g, dir: dir, chunkSize: int64(chunkSize),
		links: map[fileID]*rafs.Inode{},
		names: make([]byte, rafs.MaxXattrNames),
		value: make([]byte, 1<<16), // XATTR_SIZE_MAX
	}
	t := &rafs.Tree{ChunkSize: chunkSize}
	g.Go(func() (err error) {
		t.Root, err = s.scan(gctx)
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, fmt.Errorf("read folder %s: %w", dir, err)
	}
	return t, nil
}

// fileID names an inode on this machine.
type fileID struct{ dev, ino uint64 }

type scanner struct {
	group     *errgroup.Group // hashes content
	dir       string
	chunkSize int64
	links     map[fileID]*rafs.Inode // files with several names that were met
	names     []byte                 // scratch for listxattr
	value     []byte                 // scratch for getxattr and readlink
}

// level is an open directory. Every file is reached through the descriptor of
// its directory, so that a directory renamed or replaced by a symlink while
// it is scanned leads nowhere else, and a path may be longer than PATH_MAX.
type level struct {
	file  *os.File
	path  string // for messages
	inode *rafs.Inode
	names []string // still to come
}

func (s *scanner) scan(ctx context.Context) (*rafs.Inode, error) {
	fd, err := unix.Open(s.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	root, err := s.enter(fd, "")
	if err != nil {
		return nil, err
	}
	stack := []level{root}
	defer func() {
		for _, l := range stack {
			l.file.Close()
		}
	}()
	for len(stack) > 0 {
		l := &stack[len(stack)-1]
		if len(l.names) == 0 {
			l.file.Close()
			stack = stack[:len(stack)-1]
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		name := l.names[0]
		l.names = l.names[1:]
		sub, err := s.add(ctx, l, name)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", filepath.Join(l.path, name), err)
		}
		if sub != nil {
			stack = append(stack, *sub)
		}
	}
	return root.inode, nil
}

// enter takes an open directory and reads its attributes and names.
func (s *scanner) enter(fd int, path string) (level, error) {
	l := level{file: os.NewFile(uintptr(fd), path), path: path}
	err := func() error {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return err
		}
		l.inode = newInode(&st)
		var err error
		if l.names, err = l.file.Readdirnames(-1); err != nil {
			return err
		}
		slices.Sort(l.names)
		l.inode.Entries = make([]rafs.Dirent, 0, len(l.names))
		return s.readXattrs(fmt.Sprintf("/proc/self/fd/%d/.", fd), l.inode)
	}()
	if err != nil {
		l.file.Close()
	}
	return l, err
}

// add adds the file name to its directory. For a directory it returns its
// level, which is to be scanned next.
func (s *scanner) add(ctx context.Context, l *level, name string) (*level, error) {
	dirfd := int(l.file.Fd())
	var st unix.Stat_t
	if err := unix.Fstatat(dirfd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	id := fileID{st.Dev, st.Ino}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		fd, err := unix.Openat(dirfd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		sub, err := s.enter(fd, filepath.Join(l.path, name))
		if err != nil {
			return nil, err
		}
		l.inode.Entries = append(l.inode.Entries, rafs.Dirent{Name: name, Inode: sub.inode})
		return &sub, nil
	}
	n := s.links[id]
	if n == nil {
		var err error
		if n, err = s.readFile(ctx, dirfd, name, &st); err != nil {
			return nil, err
		}
		if st.Nlink > 1 {
			s.links[id] = n
		}
	}
	l.inode.Entries = append(l.inode.Entries, rafs.Dirent{Name: name, Inode: n})
	return nil, nil
}

// newInode returns an inode with the attributes that stat tells.
func newInode(st *unix.Stat_t) *rafs.Inode {
	n := &rafs.Inode{
		Mode: st.Mode, UID: st.Uid, GID: st.Gid,
		Mtime: st.Mtim.Sec, MtimeNsec: uint32(st.Mtim.Nsec),
	}
	if t := n.Type(); t == rafs.ModeChar || t == rafs.ModeBlock {
		n.Rdev = rafs.Makedev(unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	return n
}

// readFile reads what is not a directory; content is hashed in the background.
func (s *scanner) readFile(ctx context.Context, dirfd int, name string, st *unix.Stat_t) (*rafs.Inode, error) {
	n := newInode(st)
	if err := s.readXattrs(fmt.Sprintf("/proc/self/fd/%d/%s", dirfd, name), n); err != nil {
		return nil, err
	}
	switch n.Type() {
	case rafs.ModeSymlink:
		size, err := unix.Readlinkat(dirfd, name, s.value)
		if err != nil {
			return nil, err
		}
		n.Target = string(s.value[:size])
	case rafs.ModeRegular:
		n.Size = st.Size
		if n.Size == 0 {
			break
		}
		fd, err := unix.Openat(dirfd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		f := os.NewFile(uintptr(fd), name)
		s.group.Go(func() error { return hashFile(ctx, f, fileID{st.Dev, st.Ino}, n, s.chunkSize) })
	}
	return n, nil
}

// readXattrs reads the attributes that a Merger would keep, sorted. The path's
// last component is not followed. The calls that take a descriptor would need
// the file opened, which a symlink or a device must not be.
func (s *scanner) readXattrs(path string, n *rafs.Inode) error {
	size, err := unix.Llistxattr(path, s.names)
	if err == unix.ENOTSUP {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list xattrs: %w", err)
	}
	for names := s.names[:size]; len(names) > 0; {
		name := unix.ByteSliceToString(names)
		names = names[len(name)+1:]
		if dropReason(name, n.Type()) != "" {
			continue
		}
		size, err := unix.Lgetxattr(path, name, s.value)
		if err != nil {
			return fmt.Errorf("read xattr %q: %w", name, err)
		}
		n.Xattrs = append(n.Xattrs, rafs.Xattr{Name: name, Value: slices.Clone(s.value[:size])})
	}
	sortXattrs(n.Xattrs)
	return nil
}

// hashFile sets n.Chunks to the digests of f's chunks and closes f. It fails
// when f is not the file that id names, or changes its length meanwhile.
func hashFile(ctx context.Context, f *os.File, id fileID, n *rafs.Inode, chunkSize int64) error {
	defer f.Close()
	fail := func(err error) error { return fmt.Errorf("read %q: %w", f.Name(), err) }
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fail(err)
	}
	if id != (fileID{st.Dev, st.Ino}) || st.Size != n.Size {
		return fail(errors.New("it was replaced or changed while it was read"))
	}
	buf := make([]byte, min(chunkSize, n.Size))
	n.Chunks = make([]chunk.Digest, chunk.Count(n.Size, chunkSize))
	for k := range n.Chunks {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := buf[:chunk.Len(int64(k), n.Size, chunkSize)]
		if _, err := f.ReadAt(p, int64(k)*chunkSize); err != nil {
			return fail(err)
		}
		n.Chunks[k] = chunk.Sum(p)
	}
	return nil
}
