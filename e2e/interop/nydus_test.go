//go:build interop

package interop_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/rafs"
)

// nydus returns the path of a stock program, which make interop builds.
func nydus(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(os.Getenv("QUARRY_NYDUS"), "bin", name)
	if _, err := os.Stat(path); os.Getenv("QUARRY_NYDUS") == "" || err != nil {
		need.Missing(t, "the stock program "+name+" (make interop builds it)")
	}
	return path
}

// writeConfig writes a configuration by which stock Nydus reads data from the
// /v1/blobs route of a server and, with validate, checks every chunk's digest.
func writeConfig(t *testing.T, server string, validate bool) string {
	t.Helper()
	dir := t.TempDir()
	work, config := filepath.Join(dir, "cache"), filepath.Join(dir, "config.json")
	if err := os.Mkdir(work, 0o700); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{"version": 2, "id": "interop",
	"backend": {"type": "http-proxy", "http-proxy": {"addr": %q, "path": "/v1/blobs", "timeout": 30, "connect_timeout": 5}},
	"cache": {"type": "blobcache", "compressed": false, "validate": %t, "filecache": {"work_dir": %q}},
	"rafs": {"mode": "direct", "enable_xattr": true}}`, server, validate, work)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return config
}

// TestNydusCheck lets nydus-image validate each bootstrap: superblocks, tables,
// every inode, and every chunk through the chunk-info table; and again together
// with the virtual blob's tail, which it reads from the server.
func TestNydusCheck(t *testing.T) {
	program := nydus(t, "nydus-image")
	for _, cv := range images(t) {
		t.Run(cv.name, func(t *testing.T) {
			for _, mode := range [][]string{{"--bootstrap"}, {"--config", writeConfig(t, shared.server.URL, true)}} {
				checkBootstrap(t, cv, program, mode)
			}
		})
	}
}

func checkBootstrap(t *testing.T, cv *converted, program string, mode []string) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "check.json")
	args := slices.Concat([]string{"check", "--output-json", out}, mode, []string{cv.writeBoot(t)})
	text, err := exec.Command(program, args...).CombinedOutput()
	if cv.name == "acls" && bytes.Contains(text, []byte("invalid xattr key")) {
		// It takes the whole names of the two ACLs for prefixes that something must
		// follow, and so can neither check nor build such an image. nydusd reads it.
		t.Log("nydus-image 2.2.0 knows no POSIX ACL; later ones do")
		return
	}
	if err != nil || !bytes.Contains(text, []byte("RAFS filesystem metadata is valid")) {
		t.Fatalf("nydus-image %q: %v\n%s", args, err, tail(text))
	}
	var report struct{ Blobs []string }
	raw, err := os.ReadFile(out)
	if err == nil {
		err = json.Unmarshal(raw, &report)
	}
	var want []string
	if cv.hasData() {
		want = []string{cv.image.Blob.ID.Hex()}
	}
	if err != nil || !slices.Equal(report.Blobs, want) {
		t.Errorf("nydus-image %q reports the blobs %v (error %v), want %v", args, report.Blobs, err, want)
	}
}

// TestNydusUnpack lets nydus-image write each image as a tar, by way of the
// chunk-info table, which nydusd does not use.
func TestNydusUnpack(t *testing.T) {
	program := nydus(t, "nydus-image")
	for _, cv := range images(t) {
		if notUnpacked(cv) {
			continue
		}
		t.Run(cv.name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out.tar")
			args := []string{"unpack", "--bootstrap", cv.writeBoot(t), "--output", out}
			if cv.hasData() {
				args = append(args, "--blob", filepath.Join(cv.writeBlob(t), cv.image.Blob.ID.Hex()))
			}
			if text, err := exec.Command(program, args...).CombinedOutput(); err != nil {
				t.Fatalf("nydus-image unpack: %v\n%s", err, tail(text))
			}
			f, err := os.Open(out)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			want := unpacked(listTree(t, cv.image.Tree))
			compare(t, listTar(t, f, int64(cv.image.Tree.ChunkSize)), want, asNydusUnpacks)
		})
	}
}

// nydusd is a running stock daemon with an image mounted.
type nydusd struct {
	mnt string
	log string
	cmd *exec.Cmd
}

// mountNydusd starts nydusd with an image whose data it reads from a server.
func mountNydusd(t *testing.T, cv *converted, server string) *nydusd {
	t.Helper()
	d, err := startNydusd(t, cv, writeConfig(t, server, true))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// startNydusd is mountNydusd for a configuration that nydusd may refuse.
func startNydusd(t *testing.T, cv *converted, config string) (*nydusd, error) {
	t.Helper()
	program := nydus(t, "nydusd")
	dir := t.TempDir()
	d := &nydusd{mnt: filepath.Join(dir, "mnt"), log: filepath.Join(dir, "log")}
	if err := os.Mkdir(d.mnt, 0o700); err != nil {
		t.Fatal(err)
	}
	logFile, err := os.Create(d.log)
	if err != nil {
		t.Fatal(err)
	}
	defer logFile.Close()
	d.cmd = exec.Command(program, "--config", config, "--bootstrap", cv.writeBoot(t), "--mountpoint", d.mnt, "--rlimit-nofile", "0")
	d.cmd.Stdout, d.cmd.Stderr = logFile, logFile
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() { // ends with the daemon, which stop ends
		d.cmd.Wait() // how it ended is in its log
		close(exited)
	}()
	t.Cleanup(func() { d.stop(t, exited) })
	return d, d.wait(exited)
}

// wait returns when the mount answers, or cannot any more.
func (d *nydusd) wait(exited <-chan struct{}) error {
	timeout := time.After(30 * time.Second)
	for {
		var st unix.Statfs_t
		if err := unix.Statfs(d.mnt, &st); err == nil && st.Type == unix.FUSE_SUPER_MAGIC {
			return nil
		}
		select {
		case <-exited:
			return fmt.Errorf("nydusd ended:\n%s", d.output())
		case <-timeout:
			return fmt.Errorf("nydusd did not mount in 30 s:\n%s", d.output())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (d *nydusd) output() string {
	text, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	return string(tail(text))
}

// stop ends the daemon, by force when it does not go by itself.
func (d *nydusd) stop(t *testing.T, exited <-chan struct{}) {
	d.cmd.Process.Signal(unix.SIGTERM) // it may be gone already
	select {
	case <-exited:
	case <-time.After(20 * time.Second):
		t.Error("nydusd does not end at SIGTERM")
		d.cmd.Process.Kill()
		<-exited
	}
	if err := unix.Unmount(d.mnt, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Errorf("unmount %s: %v", d.mnt, err)
	}
	if t.Failed() {
		t.Logf("nydusd said:\n%s", d.output())
	}
}

// TestNydusdMounts compares every path and every byte of each image, mounted by
// stock nydusd over FUSE, with what was converted.
func TestNydusdMounts(t *testing.T) {
	for _, cv := range images(t) {
		t.Run(cv.name, func(t *testing.T) {
			d := mountNydusd(t, cv, shared.server.URL)
			compare(t, cv.listDir(t, d.mnt), listTree(t, cv.image.Tree), asNydusdShows)
		})
	}
}

// asNydusdShows evens out what nydusd shows in its own way: the root directory
// always has the permissions 0755, and a file of 1970-01-01 00:00:00 has the
// time at which nydusd was started.
func asNydusdShows(path string, got, want *entry) {
	if path == "/" {
		want.mode = want.mode&^0o777 | 0o755
	}
	if want.mtime == 0 {
		got.mtime = 0
	}
}

// TestNydusdTreeDigest has the same said by our command line, for an image whose
// root is 0755 and that has no file of 1970: the digests are equal as they are.
func TestNydusdTreeDigest(t *testing.T) {
	cv := byName(t, "debian")
	d := mountNydusd(t, cv, shared.server.URL)
	out, err := shared.lab.Quarry(t.Context(), "treedigest", d.mnt)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(out); got != cv.tree.String() {
		t.Errorf("quarry treedigest of nydusd's mount is %s, the image statement says %s", got, cv.tree)
	}
}

// notUnpacked says whether an image is none for a tar of nydus-image: the huge
// one's holes are written out, and it writes times before 1970 as numbers that
// no reader takes.
func notUnpacked(cv *converted) bool { return cv.name == "huge-sparse" || cv.name == "metadata" }

// unpacked is what nydus-image 2.2.0 writes of a tree: no root, and hard links
// of regular files only.
func unpacked(list map[string]entry) map[string]entry {
	for path, e := range list {
		if first := list[e.linkTo]; e.linkTo != "" && first.mode&rafs.ModeType != rafs.ModeRegular {
			list[path] = first
		}
	}
	delete(list, "/")
	return list
}

// asNydusUnpacks evens out that it writes no nanoseconds.
func asNydusUnpacks(_ string, _, want *entry) { want.nsec = 0 }

// listTar reads a tar as listTree reads a tree.
func listTar(t *testing.T, r io.Reader, chunkSize int64) map[string]entry {
	t.Helper()
	list := map[string]entry{}
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		path := "/" + strings.Trim(h.Name, "/")
		if h.Typeflag == tar.TypeLink {
			list[path] = entry{linkTo: "/" + strings.Trim(h.Linkname, "/")}
			continue
		}
		n := tarInode(h)
		if n.IsRegular() {
			if n.Chunks, err = chunksOf(tr, chunkSize); err != nil {
				t.Fatalf("%q: %v", path, err)
			}
		}
		list[path] = entryOf(n)
	}
}

func tarInode(h *tar.Header) *rafs.Inode {
	types := map[byte]uint32{tar.TypeReg: rafs.ModeRegular, tar.TypeDir: rafs.ModeDir, tar.TypeSymlink: rafs.ModeSymlink,
		tar.TypeChar: rafs.ModeChar, tar.TypeBlock: rafs.ModeBlock, tar.TypeFifo: rafs.ModeFIFO}
	n := &rafs.Inode{Mode: types[h.Typeflag] | uint32(h.Mode)&rafs.ModePerm, UID: uint32(h.Uid), GID: uint32(h.Gid), Size: h.Size, Target: h.Linkname}
	n.Mtime, n.MtimeNsec = h.ModTime.Unix(), uint32(h.ModTime.Nanosecond())
	n.Rdev = rafs.Makedev(uint32(h.Devmajor), uint32(h.Devminor))
	for key, value := range h.PAXRecords {
		if name, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok {
			n.Xattrs = append(n.Xattrs, rafs.Xattr{Name: name, Value: []byte(value)})
		}
	}
	sortXattrs(n)
	return n
}
