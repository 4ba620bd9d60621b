package interop_test

import (
	"archive/tar"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"quarry/internal/testimage"
	"quarry/store/chunk"
)

// acl is a POSIX ACL as xattrs hold it: owner rwx, user 5 r, group r-x, mask
// r-x, other r.
const acl = "\x02\x00\x00\x00" +
	"\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\x05\x00\x00\x00" + "\x04\x00\x05\x00\xff\xff\xff\xff" +
	"\x10\x00\x05\x00\xff\xff\xff\xff" + "\x20\x00\x04\x00\xff\xff\xff\xff"

// oddImages are images at the edges of the format, each as small as it can be.
func oddImages(t *testing.T) map[string]*testimage.Layout {
	t.Helper()
	return map[string]*testimage.Layout{
		"empty":       testimage.Build(t),
		"empty-files": layout(t, testimage.File("a", ""), testimage.Dir("d"), testimage.File("d/b", "")),
		"links":       layout(t, linkEntries()...),
		"xattrs":      layout(t, xattrEntries()...),
		"acls":        layout(t, aclEntries()...),
		"metadata":    layout(t, metadataEntries()...),
		"names":       layout(t, nameEntries()...),
		"deep":        layout(t, testimage.File(strings.Repeat("d/", 300)+"bottom", "deep")),
		"borders":     layout(t, borderEntries()...),
		"duplicates":  layout(t, duplicateEntries()...),
	}
}

// layout is an image of one layer. Its root has attributes of its own, or it
// would be of 1970, which nydusd shows otherwise.
func layout(t *testing.T, entries ...testimage.Entry) *testimage.Layout {
	t.Helper()
	entries = append([]testimage.Entry{testimage.Dir("./")}, entries...)
	return testimage.Build(t, testimage.Layer{Entries: entries, Codec: "none"})
}

func linkEntries() []testimage.Entry {
	return []testimage.Entry{
		testimage.File("file", "three names"), testimage.Hardlink("hard1", "file"), testimage.Dir("d"), testimage.Hardlink("d/hard2", "file"),
		testimage.Symlink("sym", "../../etc/hosts"), testimage.Hardlink("d/symtoo", "sym"),
		testimage.Symlink("dangling", "no/such/file"), testimage.Symlink("self", "self"), testimage.Symlink("dir", "d"),
		testimage.Symlink("long", strings.Repeat("t/", 2047)),
		// Inline tails end where the next inode would cross a block.
		testimage.Symlink("block", strings.Repeat("b", 4000)), testimage.Symlink("half", strings.Repeat("h", 2000)),
		device("fifo", tar.TypeFifo, 0, 0), testimage.Hardlink("fifotoo", "fifo"),
		device("null", tar.TypeChar, 1, 3), testimage.Hardlink("d/nulltoo", "null"),
		device("big", tar.TypeChar, 4095, 1048575), device("minor256", tar.TypeBlock, 10, 256), device("zero", tar.TypeChar, 0, 0),
	}
}

func device(name string, typeflag byte, major, minor int64) testimage.Entry {
	return testimage.Device(name, typeflag, major, minor)
}

func xattrEntries() []testimage.Entry {
	big := strings.Repeat("v", 60<<10)
	full := testimage.File("full", "y")
	for _, name := range []string{"user.1", "user.2", "user.3", "user.4"} {
		full = full.WithXattr(name, big)
	}
	return []testimage.Entry{
		testimage.Dir("./").WithXattr("user.root", "1"),
		testimage.File("small", "x").WithXattr("user.mime_type", "text/plain").WithXattr("user.empty", "").WithXattr("trusted.t", "2"),
		testimage.File("capability", "x").WithXattr("security.capability", "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"),
		testimage.File("big", "x").WithXattr("user.big", big), full,
		testimage.Dir("name255").WithXattr("user."+strings.Repeat("k", 250), "longest name"),
		testimage.Symlink("link", "nowhere").WithXattr("trusted.x", "y").WithXattr("security.x", ""),
	}
}

func aclEntries() []testimage.Entry {
	return []testimage.Entry{
		testimage.File("file", "").WithXattr("system.posix_acl_access", acl),
		testimage.Dir("dir").WithXattr("system.posix_acl_access", acl).WithXattr("system.posix_acl_default", acl),
	}
}

func metadataEntries() []testimage.Entry {
	var entries []testimage.Entry
	for _, sec := range []int64{1, -1, 1 << 32, 253402300800, -1 << 40} {
		entries = append(entries, testimage.File(fmt.Sprint("t", sec), "x").WithMtime(time.Unix(sec, 999999999)))
	}
	for _, mode := range []int64{0, 0o1, 0o4755, 0o2755, 0o1644, 0o7777} {
		f, d := testimage.File(fmt.Sprintf("f%o", mode), "x").WithMode(mode), testimage.Dir(fmt.Sprintf("d%o", mode)).WithMode(mode)
		f.Uid, f.Gid, d.Uid, d.Gid = 1<<32-2, 70000, 65535, 65536
		entries = append(entries, f, d)
	}
	return entries
}

func nameEntries() []testimage.Entry {
	long := strings.Repeat("n", 255)
	entries := []testimage.Entry{
		testimage.File("!", "before the dots"), testimage.File("-x", ""), testimage.File("...", "behind them"), testimage.File(".a", ""),
		testimage.Dir(long), testimage.File(long+"/"+long, "long"), testimage.File("caf\u00e9", "NFC"), testimage.File("cafe\u0301", "NFD"),
		testimage.File("a b\tc\\d\"e", "blanks"), testimage.File("new\nline", ""), testimage.Dir("none"), testimage.Dir("many"),
	}
	// 3000 names of mixed lengths are some 20 directory blocks.
	for i := range 3000 {
		entries = append(entries, testimage.File(fmt.Sprintf("many/%0*d", 4+i%40, i), ""))
	}
	return entries
}

func borderEntries() []testimage.Entry {
	const size = chunk.DefaultSize
	var entries []testimage.Entry
	for _, n := range []int{1, 511, 512, 4095, 4096, 4097, size - 1, size, size + 1, 2 * size, 1<<20 - 1, 1 << 20, 1<<20 + 1, 3*size + 5, 9*size - 1} {
		entries = append(entries, testimage.File(fmt.Sprint("size", n), string(noise(uint64(n), n))))
	}
	return entries
}

// duplicateEntries share chunks within a file, between files, and out of order,
// so that chunk numbers do not rise along a file.
func duplicateEntries() []testimage.Entry {
	a, b, c := string(noise(1, chunk.DefaultSize)), string(noise(2, chunk.DefaultSize)), string(noise(3, 1000))
	zeros := string(make([]byte, chunk.DefaultSize))
	return []testimage.Entry{
		testimage.File("abc", a+b+c), testimage.File("ba", b+a), testimage.File("aaaa", a+a+a+a), testimage.File("copy", a+b+c), testimage.File("c", c),
		testimage.File("zeros", zeros+zeros+zeros+zeros), testimage.File("zero-ab", zeros+a+b), testimage.File("bza", b+zeros+a), testimage.File("short-zeros", zeros[:70000]),
	}
}

// noise is n bytes that do not compress, always the same for a seed.
func noise(seed uint64, n int) []byte {
	var key [32]byte
	key[0], key[1], key[2], key[3], key[4] = byte(seed), byte(seed>>8), byte(seed>>16), byte(seed>>24), byte(seed>>32)
	p := make([]byte, n)
	if _, err := io.ReadFull(rand.NewChaCha8(key), p); err != nil {
		panic(err) // ChaCha8 has no end
	}
	return p
}
