package rafs_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"quarry/rafs"
	"quarry/store/chunk"
)

func TestDecodeGivesTheTreeBack(t *testing.T) {
	for name, s := range oracleSamples() {
		_, m := s.encode(t)
		if err := sameTree(m.Tree, s.tree); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got, want := groups(m.Tree), groups(s.tree); !slices.Equal(got, want) {
			t.Errorf("%s: got hard links %v, want %v", name, got, want)
		}
	}
}

// sameTree compares two trees path by path.
func sameTree(got, want *rafs.Tree) error {
	type file struct {
		path string
		n    *rafs.Inode
	}
	var files []file
	got.Walk(func(path string, n *rafs.Inode) error {
		files = append(files, file{path, n})
		return nil
	})
	i := 0
	err := want.Walk(func(path string, n *rafs.Inode) error {
		if i == len(files) || files[i].path != path || !sameInode(files[i].n, n) {
			return fmt.Errorf("path %d is not %q or differs", i, path)
		}
		i++
		return nil
	})
	if err == nil && (i != len(files) || got.ChunkSize != want.ChunkSize) {
		err = fmt.Errorf("got %d paths and chunk size %d, want %d and %d", len(files), got.ChunkSize, i, want.ChunkSize)
	}
	return err
}

// sameInode compares everything but directory entries.
func sameInode(a, b *rafs.Inode) bool {
	return a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID && a.Mtime == b.Mtime && a.MtimeNsec == b.MtimeNsec &&
		a.Rdev == b.Rdev && a.Size == b.Size && a.Target == b.Target && slices.Equal(a.Chunks, b.Chunks) &&
		slices.EqualFunc(a.Xattrs, b.Xattrs, func(x, y rafs.Xattr) bool { return x.Name == y.Name && bytes.Equal(x.Value, y.Value) })
}

// groups lists the paths of each inode that has several.
func groups(t *rafs.Tree) []string {
	paths := map[*rafs.Inode][]string{}
	var order []*rafs.Inode
	t.Walk(func(path string, n *rafs.Inode) error {
		if paths[n] == nil {
			order = append(order, n)
		}
		paths[n] = append(paths[n], path)
		return nil
	})
	var all []string
	for _, n := range order {
		if len(paths[n]) > 1 {
			all = append(all, strings.Join(paths[n], " "))
		}
	}
	return all
}

// TestEqualTreesHaveEqualBytes encodes trees that are equal but share no memory.
func TestEqualTreesHaveEqualBytes(t *testing.T) {
	for seed := range uint64(5) {
		a, _ := randomSample(seed, 300).encode(t)
		b, _ := randomSample(seed, 300).encode(t)
		if !bytes.Equal(a, b) {
			t.Errorf("seed %d: bootstraps differ", seed)
		}
	}
}

func TestNoDataNoBlob(t *testing.T) {
	s := newSample(4096)
	s.tree.Root = dir(0o755, map[string]*rafs.Inode{"a": s.file(nil), "b": link("a")})
	boot, m := s.encode(t)
	if m.Blob != nil || m.DeviceSize() != m.Size || m.Size != int64(len(boot)) {
		t.Errorf("got blob %v, device of %d bytes, want none and %d", m.Blob, m.DeviceSize(), len(boot))
	}
	if blocks, devices := le.Uint32(boot[1024+36:]), le.Uint16(boot[1024+86:]); blocks != 0 || devices != 0 {
		t.Errorf("got %d blocks and %d extra devices, want 0 and 0", blocks, devices)
	}
}

// TestTreesThatCannotBeStored has one tree for each rule; the message must name
// the path and what is wrong with it.
func TestTreesThatCannotBeStored(t *testing.T) {
	s := newSample(4096)
	regular := func(change func(*rafs.Inode)) *rafs.Inode {
		n := s.file([]byte("data"))
		change(n)
		return n
	}
	big := strings.Repeat("v", rafs.MaxXattrValue)
	var names []string
	for i := range 300 {
		names = append(names, fmt.Sprintf("user.%0250d", i), "")
	}
	twice := dir(0o755, nil)
	unsorted := dir(0o755, map[string]*rafs.Inode{"a": s.file(nil), "b": s.file(nil)})
	unsorted.Entries[0], unsorted.Entries[1] = unsorted.Entries[1], unsorted.Entries[0]
	loop := dir(0o755, nil)
	loop.Entries = []rafs.Dirent{{Name: "loop", Inode: loop}}
	named := func(name string) *rafs.Inode { return dir(0o755, map[string]*rafs.Inode{name: s.file(nil)}) }
	for want, n := range map[string]*rafs.Inode{
		`xattr "btrfs.x" cannot be stored in RAFS v6`:         withXattrs(s.file(nil), "btrfs.x", "1"),
		`xattr "user." cannot`:                                withXattrs(s.file(nil), "user.", "1"),
		`xattr "system.posix_acl_access2" cannot`:             withXattrs(s.file(nil), "system.posix_acl_access2", "1"),
		`xattr "user.a\x00b" cannot`:                          withXattrs(s.file(nil), "user.a\x00b", "1"),
		strings.Repeat("k", 251) + `" cannot be stored`:       withXattrs(s.file(nil), "user."+strings.Repeat("k", 251), "1"),
		`xattr "user.big" has a value of 65536 bytes`:         withXattrs(s.file(nil), "user.big", big+"v"),
		`xattr "user.4" brings the xattrs to 262152 bytes`:    withXattrs(s.file(nil), "user.1", big, "user.2", big, "user.3", big, "user.4", big[:rafs.MaxXattrValue-23]),
		`brings the list of xattr names to 65792`:             withXattrs(s.file(nil), names[:2*257]...),
		`xattr "user.a" does not sort after "user.a"`:         withXattrs(s.file(nil), "user.a", "1", "user.a", "2"),
		`entry "a" does not sort after "b"`:                   unsorted,
		`symlink target has 0 bytes`:                          link(""),
		`symlink target has 4096 bytes, want 1 to 4095`:       link(strings.Repeat("t", 4096)),
		`symlink target "a\x00" has a NUL`:                    link("a\x00"),
		`has no known file type`:                              {Mode: 0o644},
		`has bits above its 16`:                               {Mode: 1<<16 | rafs.ModeFIFO},
		`mtime has 1000000000 ns`:                             regular(func(n *rafs.Inode) { n.MtimeNsec = 1e9 }),
		`has 1 chunks, its size 4097 needs 2`:                 regular(func(n *rafs.Inode) { n.Size = 4097 }),
		`size -1 is outside`:                                  regular(func(n *rafs.Inode) { n.Size = -1 }),
		`size 9223372036854775807 is outside`:                 regular(func(n *rafs.Inode) { n.Size = 1<<63 - 1 }),
		`with 5 bytes, elsewhere in the tree it has 4`:        regular(func(n *rafs.Inode) { n.Size = 5 }),
		`has a target but is no symlink`:                      regular(func(n *rafs.Inode) { n.Target = "x" }),
		`has a device number but is no device`:                special(rafs.ModeFIFO, 5),
		`has a size or chunks but is no regular file`:         {Mode: rafs.ModeFIFO, Size: 1},
		`has directory entries but is no directory`:           {Mode: rafs.ModeFIFO, Entries: unsorted.Entries},
		`has 256 bytes, want 1 to 255`:                        named(strings.Repeat("n", 256)),
		`entry name "" has 0 bytes`:                           named(""),
		`entry name "." is not allowed`:                       named("."),
		`entry name ".." is not allowed`:                      named(".."),
		`entry name "a/b" is not allowed`:                     named("a/b"),
		`entry name "a\x00" is not allowed`:                   named("a\x00"),
		`entry "nil" has no inode`:                            {Mode: rafs.ModeDir, Entries: []rafs.Dirent{{Name: "nil"}}},
		`"/bad/loop": the directory has another path already`: loop,
		`"/bad/two": the directory has another path already`:  dir(0o755, map[string]*rafs.Inode{"one": twice, "two": twice}),
		`chunk 1 is sha256:00`:                                regular(func(n *rafs.Inode) { n.Chunks = make([]chunk.Digest, 2); n.Size = 4097 }),
	} {
		checkRefused(t, s, n, want)
	}
}

func checkRefused(t *testing.T, s *sample, n *rafs.Inode, want string) {
	t.Helper()
	s.tree.Root = dir(0o755, map[string]*rafs.Inode{"a": s.file([]byte("data")), "bad": n})
	b, err := rafs.Encode(s.tree)
	var bad *rafs.TreeError
	if b != nil || !errors.As(err, &bad) || !strings.HasPrefix(bad.Path, "/bad") || !strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want one about /bad with %q", err, want)
	}
}

func TestTreesWithoutRoot(t *testing.T) {
	for want, tree := range map[string]*rafs.Tree{
		"the root is no directory":      {ChunkSize: 4096, Root: link("x")},
		"\"/\": the root":               {ChunkSize: 4096},
		"chunk size 5000 is not a powe": {ChunkSize: 5000, Root: dir(0, nil)},
	} {
		if _, err := rafs.Encode(tree); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestSizeLimits builds trees of more than 1 TiB of data and more than 1 GiB of
// metadata; neither needs the data itself.
func TestSizeLimits(t *testing.T) {
	s := newSample(chunk.MaxSize)
	s.tree.Root = dir(0o755, map[string]*rafs.Inode{"big": bigFile(1<<40/chunk.MaxSize, 1<<40)})
	if _, err := rafs.Encode(s.tree); err == nil || !strings.Contains(err.Error(), "over the limit of 1099511627776") {
		t.Errorf("got %v, want an error about the virtual blob", err)
	}
	s.tree.Root = dir(0o755, map[string]*rafs.Inode{"big": bigFile(1<<40/chunk.MaxSize-1, 1<<40-chunk.MaxSize)})
	if _, m := s.encode(t); m.Blob.DataSize() != 1<<40-chunk.MaxSize {
		t.Errorf("got %d bytes of data", m.Blob.DataSize())
	}
	var many []*rafs.Inode
	for range rafs.MaxBootstrap / rafs.MaxXattrs {
		n := special(rafs.ModeFIFO, 0)
		n.Xattrs = edgeXattrs
		many = append(many, n)
	}
	s.tree.Root = dir(0o755, nil)
	for i, n := range many {
		s.tree.Root.Entries = append(s.tree.Root.Entries, rafs.Dirent{Name: fmt.Sprintf("%05d", i), Inode: n})
	}
	if _, err := rafs.Encode(s.tree); err == nil || !strings.Contains(err.Error(), "over the limit of 1073741824") {
		t.Errorf("got %v, want an error about the bootstrap", err)
	}
}

// edgeXattrs fill the xattr area to its limit.
var edgeXattrs = edgeInode().Xattrs

func edgeInode() *rafs.Inode {
	big := strings.Repeat("v", rafs.MaxXattrValue)
	return withXattrs(special(rafs.ModeFIFO, 0), "user.1", big, "user.2", big, "user.3", big, "user.4", big[:rafs.MaxXattrValue-24])
}

func bigFile(chunks int, size int64) *rafs.Inode {
	n := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: size}
	for i := range chunks {
		var d chunk.Digest
		le.PutUint64(d[:], uint64(i))
		n.Chunks = append(n.Chunks, d)
	}
	return n
}

func TestDeepTrees(t *testing.T) {
	s := newSample(4096)
	s.tree.Root = deepDir(rafs.MaxDepth - 1)
	s.encode(t)
	s.tree.Root = deepDir(rafs.MaxDepth)
	if _, err := rafs.Encode(s.tree); err == nil || !strings.Contains(err.Error(), "nested deeper than the limit of 4096") {
		t.Errorf("got %v, want an error about the depth", err)
	} else if len(err.Error()) > 1000 {
		t.Errorf("the message has %d bytes", len(err.Error()))
	}
}

// deepDir nests depth directories below the one it returns, and a symlink at the end.
func deepDir(depth int) *rafs.Inode {
	n := dir(0o755, map[string]*rafs.Inode{"l": link(strings.Repeat("t", 27))})
	for range depth {
		n = dir(0o755, map[string]*rafs.Inode{"d": n})
	}
	return n
}

func TestCanStoreXattr(t *testing.T) {
	for name, want := range map[string]bool{
		"user.a": true, "trusted.a": true, "security.capability": true, "system.posix_acl_access": true, "system.posix_acl_default": true,
		"user.": false, "userx.y": false, "btrfs.compression": false, "com.apple.provenance": false, "": false, "system.nfs4_acl": false,
		"user." + strings.Repeat("k", 250): true, "user." + strings.Repeat("k", 251): false, "user.\x00": false,
	} {
		if got := rafs.CanStoreXattr(name); got != want {
			t.Errorf("%q: got %v, want %v", name, got, want)
		}
	}
}
