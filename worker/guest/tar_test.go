package guest_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/internal/need"
	"quarry/worker/guest"
	"quarry/worker/sandbox"
)

// names reads an archive to its end and says what is in it.
func names(t *testing.T, b []byte) []string {
	t.Helper()
	var out []string
	tr := tar.NewReader(bytes.NewReader(b))
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		n, err := io.Copy(io.Discard, tr)
		if err != nil || n != h.Size {
			t.Fatalf("%s: %d of %d bytes, %v", h.Name, n, h.Size, err)
		}
		out = append(out, fmt.Sprintf("%c %s", h.Typeflag, h.Name))
	}
}

func down(f *guest.Files, o sandbox.TarOptions) ([]byte, error) {
	var b bytes.Buffer
	err := f.TarDown(context.Background(), o, &b)
	return b.Bytes(), err
}

// plant makes a folder with everything in it that a folder can have.
func plant(t *testing.T, w string) {
	t.Helper()
	at := time.Unix(1_600_000_000, 123_456_789)
	for name, b := range map[string]string{
		"a/x": "x", "a-b": "1", "a.c": "2", "ab": "3", "new\nline": "4", "\xff\xfe": "5", strings.Repeat("l", 255): "6", "end ": "7", "-rf": "8", "empty": "",
		"big": string(content(3<<20 + 1)), "first": "shared",
	} {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(w, name)), 0o755), os.WriteFile(filepath.Join(w, name), []byte(b), 0o640))
		must(t, os.Chtimes(filepath.Join(w, name), at, at))
	}
	must(t, os.Chown(filepath.Join(w, "ab"), 1000, 1001), os.Chmod(filepath.Join(w, "ab"), 0o755|os.ModeSetuid), os.Chmod(filepath.Join(w, "a-b"), 0))
	must(t, os.Link(filepath.Join(w, "first"), filepath.Join(w, "second")), os.Symlink("/etc/passwd", filepath.Join(w, "out")), os.Symlink("dangling", filepath.Join(w, "nowhere")))
	must(t, syscall.Mkfifo(filepath.Join(w, "fifo"), 0o600))
	must(t, os.Mkdir(filepath.Join(w, "closed"), 0o700), os.Chtimes(filepath.Join(w, "closed"), at, at), os.Chmod(filepath.Join(w, "closed"), 0o1711))
	must(t, os.Chtimes(filepath.Join(w, "ab"), at, at))
}

func TestATarHoldsEverythingInOrder(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	plant(t, w)
	must(t, syscall.Mknod(filepath.Join(w, "null"), syscall.S_IFCHR|0o666, 1<<8|3))
	b, err := down(f, sandbox.TarOptions{Path: "/w"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"0 -rf", "0 a-b", "0 a.c", "5 a/", "0 a/x", "0 ab", "0 big", "5 closed/", "0 empty", "0 end ", "6 fifo", "0 first",
		"0 " + strings.Repeat("l", 255), "0 new\nline", "2 nowhere", "3 null", "2 out", "1 second", "0 \xff\xfe"}
	if d := cmp.Diff(names(t, b), want); d != "" {
		t.Error(d)
	}
	b, err = down(f, sandbox.TarOptions{Path: "/w", Exclude: []string{"a/*", "*l*", "big", "?ew\nline"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names(t, b) {
		if strings.Contains(n, "a/x") || strings.Contains(n, "l") || strings.Contains(n, "big") {
			t.Errorf("%q is not left out", n)
		}
	}
	if b, err = down(f, sandbox.TarOptions{Path: "/w/big"}); err != nil || len(names(t, b)) != 1 {
		t.Errorf("one file: %v", err)
	}
	if _, err := down(f, sandbox.TarOptions{Path: "/w", Exclude: []string{"["}}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Error(err)
	}
	if _, err := down(f, sandbox.TarOptions{Path: "/none"}); !errors.Is(err, sandbox.ErrFileNotFound) {
		t.Error(err)
	}
}

// tree says what is in a folder, by lstat and content.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	first := map[uint64]string{}
	must(t, filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		s := st.Sys().(*syscall.Stat_t)
		rel, _ := filepath.Rel(dir, p)
		line := fmt.Sprintf("%q %v %d:%d %d.%09d", rel, st.Mode(), s.Uid, s.Gid, s.Mtim.Sec, s.Mtim.Nsec)
		switch {
		case st.Mode().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %x", b[:min(len(b), 64)]) + fmt.Sprint(len(b))
			if s.Nlink > 1 {
				if first[s.Ino] == "" {
					first[s.Ino] = rel
				}
				line += " of " + first[s.Ino]
			}
		case st.Mode()&os.ModeSymlink != 0:
			to, _ := os.Readlink(p)
			line += " -> " + to
		}
		out = append(out, line)
		return nil
	}))
	return out
}

func TestWhatGoesDownComesUpTheSame(t *testing.T) {
	need.Root(t)
	f, _, w := newCell(t, guest.Limits{})
	plant(t, w)
	b, err := down(f, sandbox.TarOptions{Path: "/w"})
	if err != nil {
		t.Fatal(err)
	}
	f2, _, w2 := newCell(t, guest.Limits{})
	for _, r := range []io.Reader{bytes.NewReader(b), iotest.DataErrReader(bytes.NewReader(b)), iotest.HalfReader(bytes.NewReader(b))} { // over what is there
		if err := f2.TarUp(context.Background(), "/w", guest.Owner{}, r); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(tree(t, w2), tree(t, w)); d != "" {
			t.Fatal(d)
		}
	}
	b2, err := down(f2, sandbox.TarOptions{Path: "/w"})
	if err != nil || !bytes.Equal(b, b2) {
		t.Errorf("another tar of the same files: %v", err)
	}
	// GNU tar reads the same of it.
	dir := t.TempDir()
	cmd := exec.Command(need.Tool(t, "tar"), "-xp", "--same-owner", "-C", dir)
	cmd.Stdin = bytes.NewReader(b)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if d := cmp.Diff(tree(t, dir), tree(t, w)); d != "" {
		t.Error(d)
	}
}

// archive makes a tar of headers; a file's content is its name.
func archive(t *testing.T, hs ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, h := range hs {
		if h.Typeflag == 0 || h.Typeflag == tar.TypeReg {
			h.Typeflag, h.Size = tar.TypeReg, int64(len(h.Name))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		must(t, tw.WriteHeader(&h))
		if h.Size > 0 {
			_, err := io.WriteString(tw, h.Name)
			must(t, err)
		}
	}
	must(t, tw.Close())
	return b.Bytes()
}

func TestATarLeadsNowhereElse(t *testing.T) {
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}
	}
	file := func(name string) tar.Header { return tar.Header{Name: name} }
	for what, k := range map[string]struct {
		hs   []tar.Header
		want error
	}{
		"an absolute name":             {[]tar.Header{file("/etc/x")}, sandbox.ErrFilePath},
		"a name with ..":               {[]tar.Header{file("a/../../x")}, sandbox.ErrFilePath},
		"a link out, and through it":   {[]tar.Header{link("l", "../secret"), file("l/x")}, sandbox.ErrFilePath},
		"an absolute link":             {[]tar.Header{link("l", "/secret"), file("l/x")}, sandbox.ErrFilePath},
		"a link over a link":           {[]tar.Header{link("a", "b"), link("b", ".."), file("a/secret/x")}, sandbox.ErrFilePath},
		"a hard link out":              {[]tar.Header{link("l", ".."), {Name: "h", Linkname: "l/secret/keep", Typeflag: tar.TypeLink}}, sandbox.ErrFilePath},
		"a hard link with ..":          {[]tar.Header{{Name: "h", Linkname: "../secret/keep", Typeflag: tar.TypeLink}}, sandbox.ErrFilePath},
		"a hard link to a symlink":     {[]tar.Header{link("l", "/secret/keep"), {Name: "h", Linkname: "l", Typeflag: tar.TypeLink}}, sandbox.ErrFileType},
		"a hard link to nothing":       {[]tar.Header{{Name: "h", Linkname: "none", Typeflag: tar.TypeLink}}, sandbox.ErrFileNotFound},
		"a device":                     {[]tar.Header{{Name: "d", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 5}}, sandbox.ErrFileType},
		"links in a circle":            {[]tar.Header{link("a", "b"), link("b", "a"), file("a/x")}, sandbox.ErrFilePath},
		"a file where a folder is":     {[]tar.Header{{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}, file("d")}, sandbox.ErrFileExists},
		"a folder where a file is":     {[]tar.Header{file("d"), {Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}}, sandbox.ErrFileExists},
		"a file below a file":          {[]tar.Header{file("d"), file("d/x")}, sandbox.ErrFileType},
		"a link in the place of a dir": {[]tar.Header{file("d/x"), {Name: "d", Linkname: "..", Typeflag: tar.TypeSymlink}}, sandbox.ErrFileExists},
		"a name of 256 bytes":          {[]tar.Header{file(strings.Repeat("x", 256))}, sandbox.ErrFilePath},
	} {
		f, c, w := newCell(t, guest.Limits{})
		must(t, os.Mkdir(filepath.Join(c.root, "secret"), 0o755), os.WriteFile(filepath.Join(c.root, "secret/keep"), []byte("kept"), 0o600))
		if err := f.TarUp(context.Background(), "/w/in", guest.Owner{}, bytes.NewReader(archive(t, k.hs...))); !errors.Is(err, k.want) {
			t.Errorf("%s: %v", what, err)
		}
		if b, err := os.ReadFile(filepath.Join(c.root, "secret/keep")); err != nil || string(b) != "kept" {
			t.Errorf("%s: %q, %v", what, b, err)
		}
		if all, err := os.ReadDir(filepath.Join(c.root, "secret")); err != nil || len(all) != 1 {
			t.Errorf("%s: something came out: %v", what, all)
		}
		noLeftovers(t, w)
	}
}

// What no tar can make again is not taken away, whatever would come in its place.
func TestATarReplacesNoSocketOrDevice(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	at := filepath.Join(w, "s")
	must(t, syscall.Mknod(at, syscall.S_IFSOCK|0o600, 0))
	for what, h := range map[string]tar.Header{
		"a file": {Name: "s"}, "a symlink": {Name: "s", Linkname: "x", Typeflag: tar.TypeSymlink}, "a fifo": {Name: "s", Typeflag: tar.TypeFifo},
		"a hard link": {Name: "s", Linkname: "x", Typeflag: tar.TypeLink},
	} {
		err := f.TarUp(context.Background(), "/w", guest.Owner{}, bytes.NewReader(archive(t, tar.Header{Name: "x"}, h)))
		if !errors.Is(err, sandbox.ErrFileType) {
			t.Errorf("%s: %v", what, err)
		}
		if st, err := os.Lstat(at); err != nil || st.Mode()&os.ModeSocket == 0 {
			t.Fatalf("%s replaced it: %v", what, err)
		}
	}
	noLeftovers(t, w)
}

func TestLinksThatStayInsideAreFollowed(t *testing.T) {
	f, c, w := newCell(t, guest.Limits{})
	b := archive(t, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700}, tar.Header{Name: "usr/bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		tar.Header{Name: "bin", Linkname: "usr/bin", Typeflag: tar.TypeSymlink}, tar.Header{Name: "bin/tool"}, tar.Header{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		tar.Header{Name: "x/y", Linkname: "../usr/../bin/tool", Typeflag: tar.TypeSymlink}, tar.Header{Name: "bin/same", Linkname: "bin/tool", Typeflag: tar.TypeLink})
	if err := f.TarUp(context.Background(), "in", guest.Owner{}, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(w, "in/usr/bin/same")); err != nil || string(b) != "bin/tool" {
		t.Errorf("%q, %v", b, err)
	}
	if st, err := os.Lstat(filepath.Join(w, "in/bin")); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Error("a link to a folder was replaced")
	}
	// At the root an absolute link stays inside.
	must(t, os.Mkdir(filepath.Join(c.root, "real"), 0o755), os.Symlink("/real", filepath.Join(c.root, "abs")))
	if err := f.TarUp(context.Background(), "/", guest.Owner{}, bytes.NewReader(archive(t, tar.Header{Name: "abs/x"}))); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(c.root, "real/x")); err != nil {
		t.Error(err)
	}
}

func TestATarThatIsCutOffIsNoTar(t *testing.T) {
	whole := archive(t, tar.Header{Name: "one"}, tar.Header{Name: "two", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "three"})
	for n := range len(whole) {
		if n%512 != 0 && n%100 != 1 {
			continue
		}
		f, _, w := newCell(t, guest.Limits{})
		if err := f.TarUp(context.Background(), "/w", guest.Owner{}, iotest.DataErrReader(bytes.NewReader(whole[:n]))); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%d of %d bytes: %v", n, len(whole), err)
		}
		noLeftovers(t, w)
	}
	f, _, _ := newCell(t, guest.Limits{Entries: 2})
	if err := f.TarUp(context.Background(), "/w", guest.Owner{}, bytes.NewReader(whole)); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Error(err)
	}
	f, _, _ = newCell(t, guest.Limits{Bytes: 7})
	if err := f.TarUp(context.Background(), "/w", guest.Owner{}, bytes.NewReader(whole)); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Error(err)
	}
}

// A file that grows or shrinks under the reader is an error, and never a tar that
// says it is whole.
func TestAFileThatChangesUnderATar(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	name := filepath.Join(w, "log")
	must(t, os.WriteFile(name, content(64<<20), 0o644))
	for what, change := range map[string]func() error{
		"shrinks": func() error { return os.Truncate(name, 10) },
		"grows":   func() error { return os.Truncate(name, 65<<20) },
	} {
		must(t, os.Truncate(name, 64<<20))
		w := &onFirst{do: change}
		if err := f.TarDown(context.Background(), sandbox.TarOptions{Path: "/w"}, w); !errors.Is(err, sandbox.ErrFileStuck) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// onFirst does something when the first bytes arrive, and takes all.
type onFirst struct {
	do   func() error
	done atomic.Bool
}

func (o *onFirst) Write(p []byte) (int, error) {
	if !o.done.Swap(true) {
		if err := o.do(); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// While one swaps folders, files and links, nothing from outside comes into a tar.
func TestNoRaceLeadsATarOut(t *testing.T) {
	f, c, w := newCell(t, guest.Limits{})
	must(t, os.MkdirAll(filepath.Join(c.root, "secret"), 0o755), os.WriteFile(filepath.Join(c.root, "secret/f"), []byte("SECRET"), 0o600))
	must(t, os.MkdirAll(filepath.Join(w, "d"), 0o755), os.WriteFile(filepath.Join(w, "d/f"), []byte("public"), 0o600), os.WriteFile(filepath.Join(w, "f"), []byte("public"), 0o600))
	must(t, os.Symlink("/secret", filepath.Join(w, "d2")), os.Symlink("/secret/f", filepath.Join(w, "f2")))
	stop := make(chan struct{})
	swapped := make(chan struct{})
	go func() { // ends with stop
		defer close(swapped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, n := range []string{"d", "f"} {
				swap(filepath.Join(w, n), filepath.Join(w, n+"2"))
			}
		}
	}()
	for range 50 {
		b, _ := down(f, sandbox.TarOptions{Path: "/w"})
		if bytes.Contains(b, []byte("SECRET")) {
			t.Error("a link was followed")
			break
		}
	}
	close(stop)
	<-swapped
}

// A file of one hole counts as what it says it has, before a byte of it is sent.
func TestATarHasNoMoreThanIsAskedFor(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	must(t, os.WriteFile(filepath.Join(w, "sparse"), nil, 0o644), os.Truncate(filepath.Join(w, "sparse"), 1<<40))
	for _, most := range []int64{0, 1 << 20} {
		n := &countTo{}
		if err := f.TarDown(context.Background(), sandbox.TarOptions{Path: "/w", MaxBytes: most}, n); !errors.Is(err, sandbox.ErrTooLarge) || n.n > 0 {
			t.Errorf("at most %d: %d bytes came, %v", most, n.n, err)
		}
	}
	if err := f.TarDown(context.Background(), sandbox.TarOptions{Path: "/w", MaxBytes: -1}, &countTo{}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Error(err)
	}
	must(t, os.Truncate(filepath.Join(w, "sparse"), 1<<20))
	if err := f.TarDown(context.Background(), sandbox.TarOptions{Path: "/w", MaxBytes: 1 << 20}, &countTo{}); err != nil {
		t.Error(err)
	}
}

type countTo struct{ n int64 }

func (c *countTo) Write(p []byte) (int, error) { c.n += int64(len(p)); return len(p), nil }
