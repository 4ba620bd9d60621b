package e2e_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// knownTree is the content of an image by the sum of each file, so that no read
// of it can be wrong and pass.
type knownTree map[string]string // path below the root to SHA-256 in hexadecimal

// writeKnown writes n files of 1 byte to 700 KiB below root/tree, others for
// another seed, and returns them and their size.
func writeKnown(t *testing.T, root string, n int, seed byte) (tree knownTree, size int64) {
	t.Helper()
	tree = knownTree{}
	rnd := rand.NewChaCha8([32]byte{seed})
	if err := os.MkdirAll(filepath.Join(root, "tree"), 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		p := make([]byte, 1+rnd.Uint64()%(700<<10))
		rnd.Read(p)
		name := fmt.Sprintf("tree/f%02d", i)
		if err := os.WriteFile(filepath.Join(root, name), p, 0o644); err != nil {
			t.Fatal(err)
		}
		tree[name] = sumOf(p)
		size += int64(len(p))
	}
	return tree, size
}

func sumOf(p []byte) string {
	s := sha256.Sum256(p)
	return hex.EncodeToString(s[:])
}

// addBusybox gives a root the commands of the scripts that run in it.
func addBusybox(t *testing.T, root string) {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), raw, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sh", "sha256sum", "echo", "cat", "sleep", "true", "seq", "printf"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
}

// writeLayout makes an OCI layout of one layer from a folder.
func writeLayout(t *testing.T, layout, root string) {
	t.Helper()
	for _, args := range [][]string{
		{"tar", "-C", root, "--numeric-owner", "--owner=0", "--group=0", "--sort=name", "--mtime=@0", "-cf", layout + ".tar", "."},
		{"umoci", "init", "--layout", layout},
		{"umoci", "new", "--image", layout + ":latest"},
		{"umoci", "raw", "add-layer", "--image", layout + ":latest", layout + ".tar"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
}

// found is what reads of a tree have come to.
type found struct {
	right, eio int
	wrong      []string // files with other bytes than the image's
	other      []error  // errors that are not EIO
}

func (f found) String() string {
	return fmt.Sprintf("%d right, %d EIO, wrong %v, other errors %v", f.right, f.eio, f.wrong, f.other)
}

// readKnown reads every file of a tree past the page cache, several at a time,
// and compares it. each is told after every file how many there have been; no file
// is begun meanwhile.
func readKnown(root string, tree knownTree, each func(n int)) found {
	const readers = 12
	names := make(chan string)
	var f found
	var mu sync.Mutex // guards f
	var wg sync.WaitGroup
	for range readers {
		wg.Go(func() {
			for name := range names {
				got, err := sumOfFile(filepath.Join(root, name))
				mu.Lock()
				switch {
				case errors.Is(err, syscall.EIO):
					f.eio++
				case err != nil:
					f.other = append(f.other, err)
				case got != tree[name]:
					f.wrong = append(f.wrong, name)
				default:
					f.right++
				}
				if each != nil {
					each(f.right + f.eio + len(f.wrong) + len(f.other))
				}
				mu.Unlock()
			}
		})
	}
	for name := range tree {
		names <- name
	}
	close(names)
	wg.Wait()
	return f
}

// sumOfFile reads a file in pieces, as a program does, none of them from the page
// cache.
func sumOfFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return "", err
	}
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	p := make([]byte, info.Size())
	for off := 0; off < len(p); {
		n, err := f.ReadAt(p[off:min(off+64<<10, len(p))], int64(off))
		if err != nil && off+n < len(p) {
			return "", err
		}
		off += n
	}
	return sumOf(p), nil
}

// isMount reports whether something is mounted on a folder.
func isMount(dir string) bool {
	var here, above unix.Stat_t
	if err := unix.Stat(dir, &here); err != nil {
		// A dead file system cannot be looked at, and is one.
		return !errors.Is(err, fs.ErrNotExist)
	}
	return unix.Stat(filepath.Dir(dir), &above) == nil && here.Dev != above.Dev
}
