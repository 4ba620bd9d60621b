package vm_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"quarry/api/client"
	"quarry/e2e/lab"
	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
)

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

// runTests builds the programs when nobody did. They are static: a guest has
// nothing but them.
func runTests(m *testing.M) int {
	if os.Getenv("QUARRY_BIN") == "" {
		dir, err := os.MkdirTemp("", "quarry-bin")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		cmd := exec.Command("go", "build", "-o", dir+"/", "quarry/cmd/quarry", "quarry/cmd/quarry-shim", "quarry/cmd/quarry-guest")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			panic(fmt.Sprintf("build the programs: %v: %s", err, out))
		}
		os.Setenv("QUARRY_BIN", dir)
	}
	os.Setenv("PATH", os.Getenv("QUARRY_BIN")+string(os.PathListSeparator)+os.Getenv("PATH"))
	return m.Run()
}

// oddEntries is a tree with one of everything that a file system has and 300
// plain files, and busybox to run. Content differs with the seed.
func oddEntries(t *testing.T, seed byte) []testimage.Entry {
	busybox, err := os.ReadFile(need.Tool(t, "busybox"))
	if err != nil {
		t.Fatal(err)
	}
	const s = chunk.DefaultSize
	old := time.Unix(1, 1)
	entries := []testimage.Entry{
		testimage.Dir("./").WithMode(0o755).WithXattr("user.root", "of the root"),
		testimage.Dir("bin"),
		testimage.File("bin/busybox", string(busybox)).WithMode(0o755),
		testimage.Symlink("bin/sh", "busybox"),
		testimage.File("empty", "").WithMtime(old),
		testimage.File("hello", "hello from the image\n").WithMtime(time.Unix(1_600_000_000, 999_999_999)),
		testimage.Hardlink("hello2", "hello"),
		testimage.File("suid", "x").WithMode(0o4755),
		testimage.File("none", "x").WithMode(0),
		testimage.Dir("sticky").WithMode(0o1777),
		testimage.Dir("setgid").WithMode(0o3770),
		testimage.Device("null", tar.TypeChar, 1, 3),
		testimage.Device("big", tar.TypeChar, 4095, 1048575),
		testimage.Device("minor256", tar.TypeBlock, 10, 256),
		testimage.Device("zero", tar.TypeChar, 0, 0),
		testimage.Device("fifo", tar.TypeFifo, 0, 0),
		testimage.Hardlink("fifo2", "fifo"),
		testimage.Hardlink("sh2", "bin/sh"),
		testimage.Symlink("long-target", strings.Repeat("t/", 2000)),
		testimage.File(strings.Repeat("n", 255), "a long name"),
		testimage.File("odd \xff\x01name", "not UTF-8"),
		testimage.File("attrs", "x").WithXattr("user.a", "1").WithXattr("user.empty", "").WithXattr("trusted.b", "2\x00").
			WithXattr("security.selinux", "system_u:object_r:bin_t:s0\x00").WithXattr("user.large", strings.Repeat("v", 3000)),
		testimage.File("holes", strings.Repeat("\x00", 3*s)+"end"),
		testimage.File("all-hole", strings.Repeat("\x00", 2*s)),
	}
	// Sizes at the borders of blocks and chunks, of bytes that do not repeat.
	for i, size := range []int{1, 4095, 4096, 4097, s - 1, s, s + 1, 2*s - 4096, 2 * s, 3*s + 5} {
		p := make([]byte, size)
		rand.NewChaCha8([32]byte{byte(i), seed}).Read(p)
		entries = append(entries, testimage.File(fmt.Sprintf("size-%d", size), string(p)))
	}
	entries = append(entries, testimage.Dir("many"))
	for i := range 300 {
		name := fmt.Sprintf("many/%03d-%s", i, strings.Repeat("x", i%200))
		entries = append(entries, testimage.File(name, strings.Repeat(fmt.Sprint(i+int(seed)), i*7)).WithMtime(time.Unix(int64(i), int64(i))))
	}
	return entries
}

// diskImage is a converted image as files that a kernel mounts.
type diskImage struct {
	name string
	tree chunk.Digest // what the signed statement says
}

// signedImage returns a store's image, as its statement says.
func signedImage(t *testing.T, c *client.Client, keys, name string) *image.Verified {
	t.Helper()
	trust, err := signer.LoadTrust(keys)
	check(t, err)
	ref, err := image.ParseRef(name)
	check(t, err)
	doc, err := c.Image(t.Context(), ref, image.HostPlatform())
	check(t, err)
	v, err := image.Verify(doc.Image, doc.Name, image.Want{Ref: ref, Platform: image.HostPlatform(), Trust: trust})
	check(t, err)
	return v
}

// writeDisk writes an image of a store as NAME.boot, NAME.data and NAME.flat.
func writeDisk(t *testing.T, url, keys, ref, dir, name string) diskImage {
	t.Helper()
	c, err := client.New(client.Config{URL: url})
	check(t, err)
	defer c.Close()
	v := signedImage(t, c, keys, ref)
	boot, err := c.Bootstrap(t.Context(), v.Statement.Bootstrap, v.Statement.BootstrapSize)
	check(t, err)
	im, err := rafs.Decode(boot)
	check(t, err)
	d, err := blockdev.New(blockdev.Config{Bootstrap: boot, Image: im, Chunks: c})
	check(t, err)
	defer d.Close()
	flat := filepath.Join(dir, name+".flat")
	check(t, copyDevice(t.Context(), d, flat))
	// Kernels before Linux 6.4 take bootstrap and data as two devices.
	check(t, copyPart(flat, 0, int64(len(boot)), filepath.Join(dir, name+".boot")))
	check(t, copyPart(flat, im.Blob.MappedOff, d.Size(), filepath.Join(dir, name+".data")))
	return diskImage{name, v.Statement.Tree}
}

// copyDevice writes a device to a file.
func copyDevice(ctx context.Context, d nbd.Device, to string) error {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	p := make([]byte, 4<<20)
	for off := int64(0); off < d.Size(); off += int64(len(p)) {
		p = p[:min(int64(len(p)), d.Size()-off)]
		if err := d.ReadAt(ctx, p, off); err != nil {
			return err
		}
		if _, err := f.Write(p); err != nil {
			return err
		}
	}
	return f.Close()
}

// copyPart writes the bytes [off, end) of a file to another.
func copyPart(from string, off, end int64, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if _, err := in.Seek(off, io.SeekStart); err != nil {
		return err
	}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	if _, err := io.CopyN(out, in, end-off); err != nil {
		return err
	}
	return out.Close()
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// share is what the guests of a test have in common: the programs, and a folder.
type share struct {
	lab      *lab.Lab
	dir      string
	programs []string
}

func newShare(t *testing.T) share {
	t.Helper()
	need.Root(t)
	l, err := lab.New()
	check(t, err)
	t.Cleanup(func() { check(t, l.Close()) })
	s := share{lab: l, dir: l.Path("share")}
	check(t, os.Mkdir(s.dir, 0o755))
	for _, program := range []string{"quarry", "quarry-shim", "quarry-guest", "runsc"} {
		s.programs = append(s.programs, need.Tool(t, program))
	}
	return s
}

// rig is a share with the images as files, and a data folder for the worker.
type rig struct {
	share
	disks []diskImage
}

func newRig(t *testing.T) rig {
	debian := filepath.Join(os.Getenv("QUARRY_IMAGES"), "debian")
	if _, err := os.Stat(filepath.Join(debian, "index.json")); err != nil || !filepath.IsAbs(debian) {
		need.Missing(t, "the Debian image (make images makes it; QUARRY_IMAGES names its folder)")
	}
	r := rig{share: newShare(t)}
	odd := testimage.Build(t, testimage.Layer{Entries: oddEntries(t, 0)})
	part := testimage.Build(t, testimage.Layer{Tar: partOf(t, debian), Codec: "none"})
	for _, im := range []struct{ name, source string }{
		{"odd", odd.Source("")}, {"part", part.Source("")}, {"debian", "oci:" + debian},
	} {
		data := filepath.Join(r.dir, im.name+".store")
		_, err := r.lab.Convert(t.Context(), data, im.source, "t/"+im.name)
		check(t, err)
		s, err := r.lab.Serve(t.Context(), data)
		check(t, err)
		r.disks = append(r.disks, writeDisk(t, s.URL, filepath.Join(data, "keys"), "t/"+im.name, r.dir, im.name))
		check(t, s.Stop())
	}
	return r
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	raw, err := os.ReadFile(from)
	check(t, err)
	check(t, os.WriteFile(to, raw, 0o755))
}

// part is what the guests have of the Debian image: 2000 files of all sizes, and
// an emulated machine reads them in seconds.
var part = regexp.MustCompile(`^\./([^/]*/?$|(etc|usr/sbin|usr/share/perl5|var/lib/dpkg)(/|$)|(usr|usr/share|var|var/lib)/$)`)

// partOf cuts a tar archive from the one layer of an OCI layout.
func partOf(t *testing.T, layout string) []byte {
	t.Helper()
	blobs, err := filepath.Glob(filepath.Join(layout, "blobs", "sha256", "*"))
	check(t, err)
	largest, size := "", int64(0)
	for _, path := range blobs {
		info, err := os.Stat(path)
		check(t, err)
		if info.Size() > size {
			largest, size = path, info.Size()
		}
	}
	f, err := os.Open(largest)
	check(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	check(t, err)
	in := tar.NewReader(z)
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	n := 0
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		check(t, err)
		if !part.MatchString(h.Name) {
			continue
		}
		n++
		check(t, out.WriteHeader(h))
		_, err = io.Copy(out, in)
		check(t, err)
	}
	check(t, out.Close())
	if n < 1000 {
		t.Fatalf("the part of the Debian image has %d entries, want 1000 or more", n)
	}
	t.Logf("the part of the Debian image has %d entries in %d bytes", n, b.Len())
	return b.Bytes()
}
