package rafs_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sort"
	"strings"
	"testing"

	"quarry/rafs"
	"quarry/store/chunk"
)

// sample is a tree together with the content of its chunks.
type sample struct {
	tree *rafs.Tree
	data map[chunk.Digest][]byte
}

func newSample(chunkSize uint32) *sample {
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755, Mtime: 1700000000, MtimeNsec: 1}
	return &sample{&rafs.Tree{ChunkSize: chunkSize, Root: root}, map[chunk.Digest][]byte{}}
}

// file returns a regular file with the given content.
func (s *sample) file(p []byte) *rafs.Inode {
	n := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Mtime: 1600000000, Size: int64(len(p))}
	for len(p) > 0 {
		c := p[:min(len(p), int(s.tree.ChunkSize))]
		d := chunk.Sum(c)
		s.data[d] = c
		n.Chunks = append(n.Chunks, d)
		p = p[len(c):]
	}
	return n
}

// content is what reading the regular file n must give.
func (s *sample) content(n *rafs.Inode) []byte {
	var p []byte
	for _, d := range n.Chunks {
		p = append(p, s.data[d]...)
	}
	return p
}

// dataDevice is the data device of the blob.
func (s *sample) dataDevice(b *rafs.Blob) []byte {
	dev := make([]byte, b.DevSize())
	for _, c := range b.Chunks {
		copy(dev[c.DevOff:], s.data[c.Digest])
	}
	return dev
}

// virtualBlob is the whole virtual blob.
func (s *sample) virtualBlob(b *rafs.Blob) []byte {
	var p []byte
	for _, c := range b.Chunks {
		p = append(p, s.data[c.Digest]...)
	}
	return append(p, b.Tail()...)
}

// flatten is the one device that holds bootstrap and data.
func (s *sample) flatten(boot []byte, m *rafs.Image) []byte {
	flat := make([]byte, m.DeviceSize())
	copy(flat, boot)
	if m.Blob != nil {
		copy(flat[m.Blob.MappedOff:], s.dataDevice(m.Blob))
	}
	return flat
}

func dir(mode uint32, children map[string]*rafs.Inode) *rafs.Inode {
	n := &rafs.Inode{Mode: rafs.ModeDir | mode, Mtime: 1500000000}
	for name, child := range children {
		n.Entries = append(n.Entries, rafs.Dirent{Name: name, Inode: child})
	}
	sort.Slice(n.Entries, func(i, j int) bool { return n.Entries[i].Name < n.Entries[j].Name })
	return n
}

func link(target string) *rafs.Inode {
	return &rafs.Inode{Mode: rafs.ModeSymlink | 0o777, Mtime: 1400000000, Target: target}
}

func special(kind, rdev uint32) *rafs.Inode {
	return &rafs.Inode{Mode: kind | 0o600, Mtime: 1300000000, Rdev: rdev}
}

func withXattrs(n *rafs.Inode, kv ...string) *rafs.Inode {
	for i := 0; i < len(kv); i += 2 {
		n.Xattrs = append(n.Xattrs, rafs.Xattr{Name: kv[i], Value: []byte(kv[i+1])})
	}
	sort.Slice(n.Xattrs, func(i, j int) bool { return n.Xattrs[i].Name < n.Xattrs[j].Name })
	return n
}

// acl is a POSIX ACL as xattrs hold it, version 2: owner rwx, user 1 r, group x,
// mask r-x, other none.
const acl = "\x02\x00\x00\x00" +
	"\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\x01\x00\x00\x00" + "\x04\x00\x01\x00\xff\xff\xff\xff" +
	"\x10\x00\x05\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff"

// smallSample has one of everything; the golden file shows it.
func smallSample() *sample {
	s := newSample(chunk.MinSize)
	hello := s.file([]byte("hello, quarry\n"))
	hello.UID, hello.GID, hello.MtimeNsec = 1000, 100, 123456789
	two := s.file(bytes.Repeat([]byte("0123456789abcdef"), 300)) // 4096 + 704 bytes
	withXattrs(two, "user.mime_type", "text/plain", "security.capability",
		"\x01\x00\x00\x02\x00 \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	again := s.file(bytes.Repeat([]byte("0123456789abcdef"), 256)) // the first chunk of two
	setuid := s.file(nil)
	setuid.Mode |= 0o4111
	early := link("../hello")
	early.Mtime, early.MtimeNsec = -2, 500000000
	s.tree.Root = dir(0o755, map[string]*rafs.Inode{
		"-before-dot": setuid,
		"dev": dir(0o1777, map[string]*rafs.Inode{
			"null": special(rafs.ModeChar, rafs.Makedev(1, 3)),
			"sda1": special(rafs.ModeBlock, rafs.Makedev(8, 1)),
			"pipe": special(rafs.ModeFIFO, 0),
			"sock": special(rafs.ModeSocket, 0),
		}),
		"hello": hello,
		"hard":  hello,
		"sub": dir(0o700, map[string]*rafs.Inode{
			"again": again, "link": early, "two": two,
		}),
	})
	return s
}

// edgeSample has what stood at a limit in somebody's bug report.
func edgeSample() *sample {
	s := newSample(chunk.DefaultSize)
	long := strings.Repeat("n", rafs.MaxName)
	sym, fifo, node := link("/etc/hosts"), special(rafs.ModeFIFO, 0), special(rafs.ModeChar, rafs.Makedev(1, 3))
	big := strings.Repeat("v", rafs.MaxXattrValue)
	hard := s.file([]byte("three names"))
	files := map[string]*rafs.Inode{"empty": s.file(nil)}
	for _, size := range []int{1, 4095, 4096, 4097, chunk.DefaultSize - 1, chunk.DefaultSize, chunk.DefaultSize + 1, 3*chunk.DefaultSize + 5} {
		files[fmt.Sprint("size", size)] = s.file(randomBytes(uint64(size), size))
	}
	times := map[string]*rafs.Inode{}
	for _, sec := range []int64{0, -1, 1 << 33, 253402300800, -1 << 63, 1<<63 - 1} {
		n := s.file(nil)
		n.Mtime, n.MtimeNsec = sec, 999999999
		times[fmt.Sprint("t", sec)] = n
	}
	modes := map[string]*rafs.Inode{}
	for _, m := range []uint32{0o4755, 0o2755, 0o6711, 0o1644, 0, 0o7777} {
		modes[fmt.Sprintf("f%o", m)] = &rafs.Inode{Mode: rafs.ModeRegular | m, UID: 1<<32 - 2, GID: 70000}
		modes[fmt.Sprintf("d%o", m)] = dir(m, nil)
	}
	s.tree.Root = withXattrs(dir(0o755, map[string]*rafs.Inode{
		long: dir(0o755, map[string]*rafs.Inode{long: link(strings.Repeat("t", rafs.MaxTarget)), "\xff\xfe": s.file([]byte("bytes"))}),
		"!":  s.file([]byte("before the dots")), "...": s.file([]byte("behind the dots")), ".!": link("."),
		"files": dir(0o755, files), "times": dir(0o755, times), "modes": dir(0o755, modes),
		"links": dir(0o755, map[string]*rafs.Inode{"s1": sym, "s2": sym, "p1": fifo, "p2": fifo, "c1": node, "c2": node, "h1": hard,
			"sub": dir(0o755, map[string]*rafs.Inode{"h2": hard, "h3": hard})}),
		"dev": dir(0o755, map[string]*rafs.Inode{
			"big": special(rafs.ModeChar, rafs.Makedev(4095, 1048575)), "minor256": special(rafs.ModeBlock, rafs.Makedev(10, 256))}),
		"xattrs": dir(0o755, map[string]*rafs.Inode{
			"big":     withXattrs(s.file([]byte("x")), "user.big", big),
			"full":    withXattrs(s.file([]byte("y")), "user.1", big, "user.2", big, "user.3", big, "user.4", big[:rafs.MaxXattrValue-24]),
			"name255": withXattrs(dir(0o755, nil), "user."+strings.Repeat("k", 250), "", "trusted.foo", "2", "user.x", "3"),
			"acl":     withXattrs(s.file(nil), "system.posix_acl_access", acl, "security.selinux", "system_u:object_r:bin_t:s0\x00"),
			"acldir":  withXattrs(dir(0o755, nil), "system.posix_acl_default", acl, "system.posix_acl_access", acl),
			"link":    withXattrs(link("nowhere"), "trusted.overlay.x", "y", "security.x", ""),
			"linkbig": withXattrs(link(strings.Repeat("z", 100)), "trusted.big", big[:4000]),
			"fifo":    withXattrs(special(rafs.ModeFIFO, 0), "security.y", big[:5000]),
		}),
	}), "user.root", "1")
	return s
}

// sweepSample moves inode, xattrs and tails through every 32-byte step of a block.
func sweepSample() *sample {
	s := newSample(chunk.MinSize)
	dirs, files, links, exact := map[string]*rafs.Inode{}, map[string]*rafs.Inode{}, map[string]*rafs.Inode{}, map[string]*rafs.Inode{}
	for i := 1; i <= 400; i++ {
		children, one := map[string]*rafs.Inode{}, special(rafs.ModeFIFO, 0)
		for k := range i {
			children[fmt.Sprintf("%0*d", 3+(i+k)%30, k)] = one
		}
		dirs[fmt.Sprint(i)] = sweepXattrs(dir(0o755, children), i)
	}
	for i := 1; i <= 4096; i++ {
		files[fmt.Sprint(i)] = sweepXattrs(s.file(randomBytes(uint64(i), i)), i)
		if i <= rafs.MaxTarget {
			links[fmt.Sprint(i)] = sweepXattrs(link(strings.Repeat("l", i)), i)
		}
	}
	// "." and ".." take 27 bytes: fill one and two blocks to the byte, and around.
	for _, blocks := range []int{1, 2, 3} {
		for d := -33; d <= 33; d++ {
			exact[fmt.Sprint(blocks, d)] = exactDir(4096*blocks-27+d, blocks)
		}
	}
	s.tree.Root.Entries = dir(0, map[string]*rafs.Inode{
		"dirs": dir(0o755, dirs), "files": dir(0o755, files), "links": dir(0o755, links), "exact": dir(0o755, exact)}).Entries
	return s
}

// sweepXattrs gives n 0 to 8 xattrs of different lengths.
func sweepXattrs(n *rafs.Inode, i int) *rafs.Inode {
	for k := range i % 9 {
		withXattrs(n, fmt.Sprint("trusted.k", k), strings.Repeat("v", (i*k)%61))
	}
	return n
}

// exactDir has entries that need the given number of bytes, without the dots.
func exactDir(size, salt int) *rafs.Inode {
	children, one := map[string]*rafs.Inode{}, special(rafs.ModeFIFO, 0)
	for i := 0; size > 0; i++ {
		take := min(size, 12+52)
		if rest := size - take; rest > 0 && rest < 12+6 {
			take -= 18 // so that the last name is long enough to be unique
		}
		name := fmt.Sprintf("%04d%d", i, salt)
		children[name+strings.Repeat("e", max(0, take-12-len(name)))] = one
		size -= take
	}
	return dir(0o755, children)
}

func randomBytes(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}

// randomSample makes a tree of about n inodes from a seed.
func randomSample(seed uint64, n int) *sample {
	r := rand.New(rand.NewPCG(seed, 2))
	s := newSample(chunk.MinSize << r.IntN(5))
	dirs, others := []*rafs.Inode{s.tree.Root}, []*rafs.Inode{s.file([]byte("first"))}
	used := map[*rafs.Inode]map[string]bool{}
	for i := range n {
		child := s.randomInode(r)
		if r.IntN(10) == 0 {
			child = others[r.IntN(len(others))] // a hard link
		}
		parent := dirs[r.IntN(min(len(dirs), 1+r.IntN(len(dirs))))]
		name := randomName(r, i)
		if used[parent] == nil {
			used[parent] = map[string]bool{}
		}
		if used[parent][name] {
			continue
		}
		used[parent][name] = true
		parent.Entries = append(parent.Entries, rafs.Dirent{Name: name, Inode: child})
		if child.IsDir() {
			dirs = append(dirs, child)
		} else {
			others = append(others, child)
		}
	}
	for _, d := range dirs {
		sort.Slice(d.Entries, func(i, j int) bool { return d.Entries[i].Name < d.Entries[j].Name })
	}
	return s
}

func randomName(r *rand.Rand, i int) string {
	switch r.IntN(6) {
	case 0:
		return fmt.Sprint(strings.Repeat("long", r.IntN(60)), i)
	case 1:
		return fmt.Sprintf("%c%d", "!-.~\xff\x01"[r.IntN(6)], r.IntN(50))
	default:
		return fmt.Sprintf("name%d", i)
	}
}

func (s *sample) randomInode(r *rand.Rand) *rafs.Inode {
	var n *rafs.Inode
	switch r.IntN(8) {
	case 0, 1:
		n = dir(0, nil)
	case 2:
		n = link(strings.Repeat("target/", 1+r.IntN(80)))
	case 3:
		kinds := []uint32{rafs.ModeChar, rafs.ModeBlock, rafs.ModeFIFO, rafs.ModeSocket}
		k := r.IntN(4)
		if n = special(kinds[k], 0); k < 2 {
			n.Rdev = r.Uint32()
		}
	default:
		size := r.IntN(1 << r.IntN(18))
		p := randomBytes(uint64(r.IntN(40)), size+16) // few seeds: equal first chunks
		n = s.file(p)
	}
	n.Mode = n.Type() | r.Uint32()&rafs.ModePerm
	n.UID, n.GID = r.Uint32()>>1, uint32(r.IntN(1000))
	n.Mtime, n.MtimeNsec = int64(r.Uint64()>>20)-1<<40, uint32(r.IntN(1e9))
	for k := range r.IntN(12) - 8 {
		prefix := []string{"trusted.", "security.x"}[r.IntN(2)]
		withXattrs(n, fmt.Sprint(prefix, k), strings.Repeat("v", r.IntN(1<<r.IntN(10))))
	}
	return n
}

// encode returns the bootstrap of s and what it decodes to.
func (s *sample) encode(t testing.TB) ([]byte, *rafs.Image) {
	t.Helper()
	boot, err := rafs.Encode(s.tree)
	if err != nil {
		t.Fatal(err)
	}
	m, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	return boot, m
}
