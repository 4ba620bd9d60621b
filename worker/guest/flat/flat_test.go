package flat_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"encoding/hex"

	erofs "github.com/erofs/go-erofs"
	"github.com/google/go-cmp/cmp"

	"quarry/internal/need"
	"quarry/worker/guest/flat"
)

var update = flag.Bool("update", false, "write the goldens")

var limits = flat.Limits{Files: 10000, Bytes: 1 << 30}

func image(t *testing.T, name string, l flat.Limits) (string, error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, err := flat.Write(f, name, l)
	if err != nil {
		return "", err
	}
	if st, err := f.Stat(); err != nil || st.Size() != n || n%4096 != 0 {
		t.Errorf("%d bytes written, %d said (%v)", st.Size(), n, err)
	}
	return f.Name(), nil
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func content(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)})
	_, _ = r.Read(b)
	return b
}

// plant makes a folder with what an image can hold: sizes about a block, many names in
// one folder, odd ones, links.
func plant(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, n := range []int{0, 1, 4095, 4096, 4097, 1 << 20} {
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprint("size-", n)), content(n), 0o640))
	}
	must(t, os.MkdirAll(filepath.Join(dir, "a/b/c"), 0o755), os.Mkdir(filepath.Join(dir, "many"), 0o711))
	for i := range 700 {
		must(t, os.WriteFile(filepath.Join(dir, "many", fmt.Sprintf("%s-%d", strings.Repeat("n", i%200), i)), []byte(fmt.Sprint(i)), 0o644))
	}
	for _, n := range []string{" ", "!", "-x", "\xff", "a\nb", strings.Repeat("l", 255)} {
		must(t, os.WriteFile(filepath.Join(dir, "a", n), []byte(n), 0o600))
	}
	must(t, os.Symlink("../x", filepath.Join(dir, "link")), os.Symlink(strings.Repeat("y", 4000), filepath.Join(dir, "long")))
	must(t, os.Chtimes(filepath.Join(dir, "a"), time.Unix(1, 5), time.Unix(1_000_000_000, 123_456_789)))
	return dir
}

// tree says what a folder holds.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		s := st.Sys().(*syscall.Stat_t)
		rel, _ := filepath.Rel(dir, p)
		line := fmt.Sprintf("%q %v %d:%d %d.%09d ", rel, st.Mode(), s.Uid, s.Gid, s.Mtim.Sec, s.Mtim.Nsec)
		switch {
		case st.Mode().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += hex.EncodeToString(b)
		case st.Mode()&os.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			line += to
		}
		out = append(out, line)
		return nil
	}))
	return out
}

// The kernel is another reader than the Sentry, and a stricter one.
func TestTheKernelReadsTheSameFiles(t *testing.T) {
	need.Root(t)
	dir := plant(t)
	must(t, os.Chown(filepath.Join(dir, "size-1"), 1000, 70000))
	img, err := image(t, dir, limits)
	must(t, err)
	at := t.TempDir()
	if out, err := exec.Command(need.Tool(t, "mount"), "-t", "erofs", "-o", "loop,ro", img, at).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	defer syscall.Unmount(at, syscall.MNT_DETACH)
	if d := cmp.Diff(tree(t, at), tree(t, dir)); d != "" {
		t.Error(d)
	}
}

func TestForeignToolsFindNoFault(t *testing.T) {
	img, err := image(t, plant(t), limits)
	must(t, err)
	if out, err := exec.Command(need.Tool(t, "fsck.erofs"), img).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	f, err := os.Open(img)
	must(t, err)
	defer f.Close()
	e, err := erofs.Open(f)
	must(t, err)
	b, err := fs.ReadFile(e, "size-4097")
	if err != nil || !bytes.Equal(b, content(4097)) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

func TestTheSameFilesAreTheSameBytes(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "d"), 0o755), os.WriteFile(filepath.Join(dir, "d/f"), []byte("hello"), 0o644), os.Symlink("d/f", filepath.Join(dir, "l")))
	for _, n := range []string{"d/f", "d", "."} {
		must(t, os.Chtimes(filepath.Join(dir, n), time.Unix(1, 2), time.Unix(1, 2)))
	}
	must(t, os.Lchown(filepath.Join(dir, "l"), os.Getuid(), os.Getgid()))
	img, err := image(t, dir, limits)
	must(t, err)
	b, err := os.ReadFile(img)
	must(t, err)
	again, err := image(t, dir, limits)
	must(t, err)
	if b2, err := os.ReadFile(again); err != nil || !bytes.Equal(b, b2) {
		t.Errorf("other bytes (%v)", err)
	}
	if os.Getuid() != 0 {
		need.Missing(t, "root rights: the golden has its owner")
	}
	// A symlink's time cannot be set by package os: it is left out.
	for i := range 12 {
		b[4096+3*64+32+i] = 0
	}
	got := hex.Dump(b[1024:1024+128]) + hex.Dump(b[4096:4096+4*64]) + hex.Dump(b[8192:])
	const name = "testdata/image.golden"
	if *update {
		must(t, os.WriteFile(name, []byte(got), 0o644))
	}
	want, err := os.ReadFile(name)
	must(t, err)
	if d := cmp.Diff(got, string(want)); d != "" {
		t.Error(d)
	}
}

func TestWhatCannotBeGiven(t *testing.T) {
	dir := plant(t)
	if _, err := image(t, dir, flat.Limits{Files: 10, Bytes: 1 << 30}); !errors.Is(err, flat.ErrTooLarge) {
		t.Error(err)
	}
	if _, err := image(t, dir, flat.Limits{Files: 10000, Bytes: 1 << 20}); !errors.Is(err, flat.ErrTooLarge) {
		t.Error(err)
	}
	must(t, syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	if _, err := image(t, dir, limits); !errors.Is(err, flat.ErrType) {
		t.Error(err)
	}
	if _, err := image(t, filepath.Join(dir, "none"), limits); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	// A link that leads out is a link, and nothing of what it leads to is read.
	out := t.TempDir()
	must(t, os.WriteFile(filepath.Join(out, "f"), []byte("SECRET"), 0o600))
	in := t.TempDir()
	must(t, os.Symlink(filepath.Join(out, "f"), filepath.Join(in, "l")), os.Symlink(out, filepath.Join(in, "d")))
	img, err := image(t, in, limits)
	must(t, err)
	if b, err := os.ReadFile(img); err != nil || bytes.Contains(b, []byte("SECRET")) {
		t.Errorf("a link was followed (%v)", err)
	}
}
