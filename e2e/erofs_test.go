package e2e_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/rafs"
)

// erofsImages makes what the stories about the kernel's EROFS under runsc convert,
// and returns the variables that name it:
//
//	SWEEP   a layout whose inodes stand at all places of a block
//	ODD     a layer, as a tar file, with one of each kind that runsc could show otherwise
func erofsImages(t *testing.T) map[string]string {
	t.Helper()
	sweep := testimage.Build(t, testimage.Layer{Entries: sweepEntries(t), Codec: "none"})
	odd := filepath.Join(t.TempDir(), "odd.tar")
	if err := os.WriteFile(odd, testimage.Tar(t, oddEntries(t)...), 0o644); err != nil {
		t.Fatal(err)
	}
	return map[string]string{"SWEEP": sweep.Source(""), "ODD": odd}
}

// program is a program of this machine as an entry: static, or in an image with
// the same libraries.
func program(t *testing.T, name, tool string) testimage.Entry {
	t.Helper()
	raw, err := os.ReadFile(need.Tool(t, tool))
	if err != nil {
		t.Fatal(err)
	}
	return testimage.File(name, string(raw)).WithMode(0o755)
}

// withXattrs gives e its first n attributes of eight.
func withXattrs(e testimage.Entry, n int) testimage.Entry {
	prefix := "user."
	if e.Typeflag == tar.TypeSymlink {
		prefix = "security." // what a symlink can have and any root can see
	}
	for i := range n {
		e = e.WithXattr(fmt.Sprint(prefix, strings.Repeat("n", 1+i), i), strings.Repeat("v", i*5))
	}
	return e
}

// sweepEntries are files, symlinks and directories of all sizes that an inode's
// place can depend on, with 0 to 8 attributes each, in random
// order, and the small ones often, because only they stand near the end of a block.
func sweepEntries(t *testing.T) []testimage.Entry {
	entries := []testimage.Entry{
		testimage.Dir("bin"), program(t, "bin/busybox", "busybox"), program(t, "bin/quarry", "quarry"),
		testimage.Dir("sweep"), testimage.File("sweep/many", "x"),
	}
	rnd := rand.NewChaCha8([32]byte{}) // the same every time
	add := func(kind string, size int, e testimage.Entry) {
		e.Name = fmt.Sprintf("sweep/%016x-%s%d", rnd.Uint64(), kind, size)
		entries = append(entries, withXattrs(e, max(0, int(rnd.Uint64()%17)-8))) // none for half of them
	}
	content := make([]byte, 4096)
	rnd.Read(content)
	target := strings.Repeat("t/", 2000)
	directory := func(names int) {
		add("d", names, testimage.Dir("?"))
		dir := entries[len(entries)-1].Name
		for i := range names {
			entries = append(entries, testimage.Hardlink(fmt.Sprintf("%s/%d%s", dir, i, strings.Repeat("x", (i*names)%40)), "sweep/many"))
		}
	}
	for size := 1; size <= 4096; size += 7 {
		add("f", size, testimage.File("?", string(content[:size])))
		add("l", size, testimage.Symlink("?", target[:min(size, 4000)]))
	}
	for n := 1; n <= 400; n += 1 + n/20 {
		directory(n)
	}
	for size := range 1500 {
		add("l", size, testimage.Symlink("?", target[:1+size%31]))
		directory(size % 3)
		add("f", size, testimage.File("?", string(content[:size%7])))
	}
	return entries
}

// capability is cap_net_raw=ep as the kernel stores it.
const capability = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// accessACL is an ACL of version 2: the owner, user 7, the group, a mask, others.
const accessACL = "\x02\x00\x00\x00" +
	"\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\x07\x00\x00\x00" +
	"\x04\x00\x04\x00\xff\xff\xff\xff" + "\x10\x00\x04\x00\xff\xff\xff\xff" + "\x20\x00\x04\x00\xff\xff\xff\xff"

// oddEntries are below /q, beside a Debian image's own files.
func oddEntries(t *testing.T) []testimage.Entry {
	label := "system_u:object_r:bin_t:s0\x00"
	entries := []testimage.Entry{
		testimage.Dir("q"), testimage.Dir("q/bin"),
		program(t, "q/bin/getcap", "getcap"), program(t, "q/bin/getfattr", "getfattr"), program(t, "q/bin/setfattr", "setfattr"),
		testimage.File("q/ping", "x").WithMode(0o755).WithXattr("security.capability", capability),
		testimage.File("q/attrs", "x").WithXattr("user.xyz", "1").WithXattr("user.x", "").WithXattr("trusted.foo", "2").
			WithXattr("security.selinux", label).WithXattr("user.long", strings.Repeat("v", 3000)),
		testimage.Symlink("q/attrs-link", "attrs").WithXattr("trusted.link", "3"),
		// Directories whose attributes a copy-up copies.
		testimage.Dir("q/d-plain"), testimage.File("q/d-plain/f", "plain"),
		testimage.Dir("q/d-user").WithXattr("user.a", "b"), testimage.File("q/d-user/f", "user").WithXattr("user.f", "g"),
		testimage.Dir("q/d-sec").WithXattr("security.selinux", label), testimage.File("q/d-sec/f", "sec").WithXattr("security.selinux", label),
		testimage.Dir("q/d-acl").WithXattr("system.posix_acl_access", accessACL).WithXattr("system.posix_acl_default", accessACL),
		testimage.File("q/d-acl/f", "acl").WithXattr("system.posix_acl_access", accessACL),
		testimage.Dir("q/d-trusted").WithXattr("trusted.foo", "bar"), testimage.File("q/d-trusted/f", "trusted").WithXattr("trusted.foo", "bar"),
		// What an overlay would obey.
		testimage.Dir("q/opaque").WithXattr("trusted.overlay.opaque", "y").WithXattr("user.overlay.opaque", "y"),
		testimage.File("q/opaque/a", "1"),
		testimage.Dir("q/redirect").WithXattr("trusted.overlay.redirect", "/etc"), testimage.File("q/redirect/a", "1"),
		testimage.File("q/origin", "1").WithXattr("user.overlay.origin", "00fb").WithXattr("user.kept", "k"),
		testimage.Device("q/opaque/null0", tar.TypeChar, 0, 0), testimage.Hardlink("q/opaque/null1", "q/opaque/null0"),
		// Numbers and modes.
		testimage.Dir("q/dev"), testimage.Device("q/dev/sda", tar.TypeBlock, 8, 1), testimage.Device("q/dev/null", tar.TypeChar, 1, 3),
		testimage.Device("q/dev/big", tar.TypeChar, 4095, 1048575), testimage.Device("q/dev/minor256", tar.TypeChar, 10, 256),
		testimage.Device("q/dev/fifo", tar.TypeFifo, 0, 0),
		testimage.Dir("q/modes"),
		// One inode with three names.
		testimage.File("q/hl-a", strings.Repeat("0123456789abcde\n", 64<<10)), testimage.Dir("q/hl"),
		testimage.Hardlink("q/hl/b", "q/hl-a"), testimage.Hardlink("q/hl/c", "q/hl-a"),
		testimage.Dir("q/thousand"),
	}
	for _, mode := range []int64{0o4755, 0o2755, 0o6711, 0o1644, 0, 0o644} {
		entries = append(entries, testimage.File(fmt.Sprintf("q/modes/f%04o", mode), "x").WithMode(mode).WithMtime(time.Unix(mode, mode)))
	}
	for _, mode := range []int64{0o1777, 0o2775, 0o3770} {
		entries = append(entries, testimage.Dir(fmt.Sprintf("q/modes/d%04o", mode)).WithMode(mode).WithMtime(time.Unix(mode, mode)))
	}
	for i := range 1000 {
		entries = append(entries, testimage.File(fmt.Sprintf("q/thousand/%d", i), fmt.Sprint(i)))
	}
	return entries
}

// inodePlaces wants inodes at every place of a block: inodeplaces DIR. EROFS's
// inode number is the inode's offset in units of 32 bytes, 128 to a block.
func inodePlaces(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: inodeplaces DIR")
	}
	seen := map[uint32]map[uint64]bool{}
	ts.Check(filepath.WalkDir(ts.MkAbs(args[0]), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		typ := st.Mode & syscall.S_IFMT
		if seen[typ] == nil {
			seen[typ] = map[uint64]bool{}
		}
		seen[typ][st.Ino%128] = true
		return nil
	}))
	// An inode of 64 bytes does not cross a block, so it cannot stand at the last
	// place; nor at the one before with a target or directory inline.
	const want = 126
	for _, typ := range []uint32{syscall.S_IFREG, syscall.S_IFLNK, syscall.S_IFDIR} {
		if got := len(seen[typ]); got < want {
			ts.Fatalf("inodes of type %o stand at %d places of a block, want %d", typ, got, want)
		}
	}
}

// fsckErofs gives an attached device, cut into bootstrap and data, to fsck.erofs,
// which reads everything: fsckerofs DEVICE-GLOB BOOTSTRAP-GLOB.
func fsckErofs(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: fsckerofs DEVICE BOOTSTRAP")
	}
	var raw [2][]byte
	for i, arg := range args {
		files, err := filepath.Glob(ts.MkAbs(arg))
		ts.Check(err)
		if len(files) != 1 {
			ts.Fatalf("%s names %d files, want 1", arg, len(files))
		}
		raw[i], err = os.ReadFile(files[0])
		ts.Check(err)
	}
	device, boot := raw[0], raw[1]
	im, err := rafs.Decode(boot)
	ts.Check(err)
	if im.Blob == nil || !bytes.Equal(device[:len(boot)], boot) {
		ts.Fatalf("%s does not begin with %s, or has no data", args[0], args[1])
	}
	dir := ts.MkAbs(".")
	ts.Check(os.WriteFile(filepath.Join(dir, "fsck.boot"), device[:len(boot)], 0o644))
	ts.Check(os.WriteFile(filepath.Join(dir, "fsck.data"), device[im.Blob.MappedOff:], 0o644))
	cmd := exec.Command("fsck.erofs", "-d3", "--extract", "--device=fsck.data", "fsck.boot")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("No errors found")) {
		ts.Fatalf("fsck.erofs: %v: %s", err, out[max(0, len(out)-4096):])
	}
}
