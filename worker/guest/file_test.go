package guest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"quarry/internal/need"
	"quarry/worker/guest"
	"quarry/worker/sandbox"
)

func content(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), byte(n >> 16)})
	_, _ = r.Read(b)
	return b
}

func read(f *guest.Files, name string, o sandbox.ReadOptions) ([]byte, sandbox.FileInfo, error) {
	var b bytes.Buffer
	var info sandbox.FileInfo
	err := f.Read(context.Background(), name, o, func(i sandbox.FileInfo) error { info = i; return nil }, &b)
	return b.Bytes(), info, err
}

var all = sandbox.ReadOptions{Length: -1}

func TestWhatIsWrittenIsRead(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	for _, n := range []int{0, 1, 64<<10 - 1, 64 << 10, 64<<10 + 1, 5<<20 + 3} {
		b := content(n)
		sum := sha256.Sum256(b)
		name := fmt.Sprint("file-", n)
		i, err := f.Write(context.Background(), name, sandbox.WriteOptions{Size: int64(n), SHA256: hex.EncodeToString(sum[:])}, guest.Owner{UID: 7, GID: 8}, iotest.HalfReader(bytes.NewReader(b)))
		if err != nil {
			t.Fatal(n, err)
		}
		if i.Size != int64(n) || i.Mode != 0o644 || i.UID != 7 || i.GID != 8 || i.Path != "/w/"+name || i.Type != sandbox.TypeFile {
			t.Errorf("%d bytes: %+v", n, i)
		}
		on, err := os.ReadFile(filepath.Join(w, name))
		if err != nil || !bytes.Equal(on, b) {
			t.Errorf("%d bytes: other content (%v)", n, err)
		}
		got, ri, err := read(f, "/w/"+name, all)
		if err != nil || !bytes.Equal(got, b) || ri.Size != int64(n) {
			t.Errorf("%d bytes: read %d, %+v, %v", n, len(got), ri, err)
		}
		for _, o := range []sandbox.ReadOptions{{Offset: 0, Length: 1}, {Offset: 1, Length: -1}, {Offset: int64(n), Length: 5}, {Offset: int64(n) + 9, Length: -1}, {Offset: 65535, Length: 65537}, {Offset: 3, Length: 0}, {Offset: -2, Length: -1}, {Offset: -1 << 50, Length: -1}} {
			from, to := o.Part(int64(n))
			from = min(from, int64(n))
			to += from
			got, _, err := read(f, name, o)
			if err != nil || !bytes.Equal(got, b[from:to]) {
				t.Errorf("%d bytes, %+v: %d read, %v", n, o, len(got), err)
			}
		}
	}
	noLeftovers(t, w)
}

// noLeftovers fails for a file that a write left under its first name.
func noLeftovers(t *testing.T, dir string) {
	t.Helper()
	_ = filepath.WalkDir(dir, func(p string, _ os.DirEntry, _ error) error {
		if strings.HasPrefix(filepath.Base(p), ".quarry-") {
			t.Errorf("%s is left", p)
		}
		return nil
	})
}

func TestNamesAreBytes(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	names := []string{"a\nb", "\xff\xfe", strings.Repeat("n", 255), "trailing ", "-rf", "~", "*", "a\\b", "'\"", "\x01", "ü"}
	for _, name := range names {
		if _, err := f.Write(context.Background(), name, sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader(name)); err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if b, err := os.ReadFile(filepath.Join(w, name)); err != nil || string(b) != name {
			t.Errorf("%q: %q, %v", name, b, err)
		}
		if b, _, err := read(f, name, all); err != nil || string(b) != name {
			t.Errorf("%q: %q, %v", name, b, err)
		}
		if i, err := f.Stat(context.Background(), name); err != nil || i.Path != "/w/"+name {
			t.Errorf("%q: %+v, %v", name, i, err)
		}
	}
	list, err := f.List(context.Background(), "/w", 1)
	if err != nil || len(list) != len(names) {
		t.Fatalf("%d files, %v", len(list), err)
	}
	for i := 1; i < len(list); i++ {
		if list[i-1].Path >= list[i].Path {
			t.Errorf("%q before %q", list[i-1].Path, list[i].Path)
		}
	}
	for _, name := range names {
		if err := f.Remove(context.Background(), name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	if list, err := f.List(context.Background(), "/w", 9); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}

func TestPathsThatCannotBe(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	must(t, os.Symlink("loop", filepath.Join(w, "loop")))
	must(t, os.Symlink("b", filepath.Join(w, "a")), os.Symlink("a", filepath.Join(w, "b")))
	must(t, os.WriteFile(filepath.Join(w, "file"), nil, 0o644))
	for name, want := range map[string]error{
		"":                         sandbox.ErrFilePath,
		"a\x00b":                   sandbox.ErrFilePath,
		strings.Repeat("a", 256):   sandbox.ErrFilePath,
		strings.Repeat("a/", 2100): sandbox.ErrFilePath,
		"loop":                     sandbox.ErrFilePath,
		"a/x":                      sandbox.ErrFilePath,
		"none":                     sandbox.ErrFileNotFound,
		"none/x":                   sandbox.ErrFileNotFound,
		"file/x":                   sandbox.ErrFileType,
		"/w":                       sandbox.ErrFileType,
	} {
		if _, _, err := read(f, name, all); !errors.Is(err, want) {
			t.Errorf("read %q: %v", name, err)
		}
	}
	for name, want := range map[string]error{
		"loop":    sandbox.ErrFilePath,
		"none/x":  sandbox.ErrFileNotFound,
		"file/x":  sandbox.ErrFileType,
		"/w":      sandbox.ErrFileType,
		"file/":   sandbox.ErrFileType,
		"new/":    sandbox.ErrFileType,
		"/":       sandbox.ErrFileType,
		"/w/..":   sandbox.ErrFileType,
		"/w/a/bc": sandbox.ErrFilePath,
	} {
		if _, err := f.Write(context.Background(), name, sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader("x")); !errors.Is(err, want) {
			t.Errorf("write %q: %v", name, err)
		}
	}
	for _, name := range []string{"/", "/w/..", ".", "..", "/w/."} {
		if err := f.Remove(context.Background(), name); !errors.Is(err, sandbox.ErrFilePath) {
			t.Errorf("remove %q: %v", name, err)
		}
	}
	if err := f.Remove(context.Background(), "none"); !errors.Is(err, sandbox.ErrFileNotFound) {
		t.Error(err)
	}
	if _, err := f.List(context.Background(), "file", 1); !errors.Is(err, sandbox.ErrFileType) {
		t.Error(err)
	}
	noLeftovers(t, w)
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestWhatIsNoFileIsNotOpened(t *testing.T) {
	f, c, w := newCell(t, guest.Limits{})
	must(t, syscall.Mkfifo(filepath.Join(w, "fifo"), 0o644))
	must(t, syscall.Mknod(filepath.Join(w, "zero"), syscall.S_IFCHR|0o666, 1<<8|5))
	must(t, os.Symlink("/w/fifo", filepath.Join(w, "link")))
	for _, name := range []string{"fifo", "zero", "link"} {
		if _, _, err := read(f, name, all); !errors.Is(err, sandbox.ErrFileType) {
			t.Errorf("read %s: %v", name, err)
		}
		if _, err := f.Write(context.Background(), name, sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader("x")); !errors.Is(err, sandbox.ErrFileType) {
			t.Errorf("write %s: %v", name, err)
		}
	}
	for name, want := range map[string]string{"fifo": sandbox.TypeFIFO, "zero": sandbox.TypeChar, "link": sandbox.TypeSymlink} {
		if i, err := f.Stat(context.Background(), name); err != nil || i.Type != want {
			t.Errorf("%s: %+v, %v", name, i, err)
		}
	}
	// A file of /proc says that it is empty, and is not.
	must(t, os.Mkdir(filepath.Join(c.root, "proc"), 0o755))
	must(t, syscall.Mount("proc", filepath.Join(c.root, "proc"), "proc", 0, ""))
	defer syscall.Unmount(filepath.Join(c.root, "proc"), syscall.MNT_DETACH)
	b, i, err := read(f, "/proc/version", all)
	if err != nil || len(b) == 0 || i.Size != int64(len(b)) {
		t.Errorf("%q, %+v, %v", b, i, err)
	}
	if part, _, err := read(f, "/proc/version", sandbox.ReadOptions{Offset: 2, Length: 4}); err != nil || string(part) != string(b[2:6]) {
		t.Errorf("%q, %v", part, err)
	}
	if part, _, err := read(f, "/proc/version", sandbox.ReadOptions{Offset: -3, Length: -1}); err != nil || string(part) != string(b[len(b)-3:]) {
		t.Errorf("%q, %v", part, err)
	}
	if _, _, err := read(f, "/proc/version", sandbox.ReadOptions{Offset: -3, Length: 1}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a part from the end that does not go to it: %v", err)
	}
}

func TestAHugeSparseFileIsRefusedBeforeItIsRead(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{Bytes: 1 << 30})
	must(t, os.WriteFile(filepath.Join(w, "big"), []byte("x"), 0o644), os.Truncate(filepath.Join(w, "big"), 1<<42))
	if _, _, err := read(f, "big", all); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Error(err)
	}
	if b, i, err := read(f, "big", sandbox.ReadOptions{Offset: 1 << 41, Length: 10}); err != nil || len(b) != 10 || i.Size != 1<<42 {
		t.Errorf("%q, %+v, %v", b, i, err)
	}
	if err := f.TarDown(context.Background(), sandbox.TarOptions{Path: "/w"}, io.Discard); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Error(err)
	}
}

func TestAWriteThatFailsLeavesWhatWasThere(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	name := filepath.Join(w, "file")
	must(t, os.WriteFile(name, []byte("before"), 0o4711), os.Chmod(name, 0o4711|os.ModeSetuid), os.Chown(name, 3, 4), os.Chmod(name, 0o711|os.ModeSetuid))
	ctx, cancel := context.WithCancel(context.Background())
	for what, c := range map[string]struct {
		ctx  context.Context
		o    sandbox.WriteOptions
		r    io.Reader
		want error
	}{
		"another digest":   {context.Background(), sandbox.WriteOptions{Size: -1, SHA256: strings.Repeat("0", 64)}, strings.NewReader("after"), sandbox.ErrDigest},
		"a shorter body":   {context.Background(), sandbox.WriteOptions{Size: 9}, strings.NewReader("after"), sandbox.ErrDigest},
		"a longer body":    {context.Background(), sandbox.WriteOptions{Size: 3}, strings.NewReader("after"), sandbox.ErrDigest},
		"a body cut off":   {context.Background(), sandbox.WriteOptions{Size: -1}, io.MultiReader(strings.NewReader("aft"), iotest.ErrReader(io.ErrUnexpectedEOF)), io.ErrUnexpectedEOF},
		"a caller leaving": {ctx, sandbox.WriteOptions{Size: -1}, io.MultiReader(strings.NewReader("aft"), readerFunc(func(p []byte) (int, error) { cancel(); return copy(p, "x"), nil })), context.Canceled},
		"no digest":        {context.Background(), sandbox.WriteOptions{Size: -1, SHA256: "abc"}, strings.NewReader("after"), sandbox.ErrInvalid},
	} {
		if _, err := f.Write(c.ctx, "file", c.o, guest.Owner{}, c.r); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		b, err := os.ReadFile(name)
		st, serr := os.Stat(name)
		if err != nil || serr != nil || string(b) != "before" || st.Mode() != 0o711|os.ModeSetuid {
			t.Errorf("%s: %q %v %v", what, b, err, st.Mode())
		}
		noLeftovers(t, w)
	}
	i, err := f.Write(context.Background(), "file", sandbox.WriteOptions{Size: -1}, guest.Owner{UID: 9, GID: 9}, strings.NewReader("after"))
	if err != nil || i.Mode != 0o4711 || i.UID != 3 || i.GID != 4 {
		t.Errorf("%+v, %v", i, err)
	}
	mode := uint32(0o600)
	i, err = f.Write(context.Background(), "file", sandbox.WriteOptions{Size: -1, Mode: &mode}, guest.Owner{UID: 9, GID: 9}, strings.NewReader("again"))
	if err != nil || i.Mode != 0o600 || i.UID != 3 {
		t.Errorf("%+v, %v", i, err)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestWritesFollowLinksAndMakeFolders(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	must(t, os.Mkdir(filepath.Join(w, "d"), 0o755), os.Symlink("d/target", filepath.Join(w, "l")), os.Symlink("/w/l", filepath.Join(w, "ll")))
	if _, err := f.Write(context.Background(), "ll", sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(w, "d/target")); err != nil || string(b) != "x" {
		t.Errorf("%q, %v", b, err)
	}
	if st, err := os.Lstat(filepath.Join(w, "ll")); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is gone: %v", err)
	}
	if _, err := f.Write(context.Background(), "new/and/deep", sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader("x")); !errors.Is(err, sandbox.ErrFileNotFound) {
		t.Error(err)
	}
	if _, err := f.Write(context.Background(), "new/and/deep", sandbox.WriteOptions{Size: -1, MkDirs: true}, guest.Owner{UID: 5, GID: 6}, strings.NewReader("x")); err != nil {
		t.Error(err)
	}
	st, err := os.Stat(filepath.Join(w, "new/and"))
	if err != nil || st.Sys().(*syscall.Stat_t).Uid != 5 {
		t.Errorf("%v, %v", st, err)
	}
	if err := f.Remove(context.Background(), "new"); err != nil {
		t.Error(err)
	}
	if err := f.Remove(context.Background(), "ll"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(w, "d/target")); err != nil {
		t.Error("a link was followed")
	}
}

func TestAFullDiskIsSaid(t *testing.T) {
	f, c, _ := newCell(t, guest.Limits{})
	small := filepath.Join(c.root, "small")
	must(t, os.Mkdir(small, 0o755), syscall.Mount("tmpfs", small, "tmpfs", 0, "size=1m"))
	defer syscall.Unmount(small, syscall.MNT_DETACH)
	must(t, os.WriteFile(filepath.Join(small, "file"), []byte("before"), 0o644))
	if _, err := f.Write(context.Background(), "/small/file", sandbox.WriteOptions{Size: -1}, guest.Owner{}, bytes.NewReader(content(8<<20))); !errors.Is(err, sandbox.ErrDiskFull) {
		t.Error(err)
	}
	if b, err := os.ReadFile(filepath.Join(small, "file")); err != nil || string(b) != "before" {
		t.Errorf("%q, %v", b, err)
	}
	noLeftovers(t, small)
}

func TestAFileThatNobodyMayReadIsRead(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{})
	must(t, os.Mkdir(filepath.Join(w, "d"), 0), os.WriteFile(filepath.Join(w, "d/f"), []byte("x"), 0))
	if b, i, err := read(f, "d/f", all); err != nil || string(b) != "x" || i.Mode != 0 {
		t.Errorf("%q, %+v, %v", b, i, err)
	}
}

func TestListsAreBounded(t *testing.T) {
	f, _, w := newCell(t, guest.Limits{Entries: 10})
	for i := range 11 {
		must(t, os.MkdirAll(filepath.Join(w, "d", fmt.Sprint(i)), 0o755))
	}
	must(t, os.Mkdir(filepath.Join(w, "d-x"), 0o755))
	if _, err := f.List(context.Background(), "/w", 2); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Error(err)
	}
	list, err := f.List(context.Background(), "/w", 1)
	if err != nil || len(list) != 2 {
		t.Errorf("%v, %v", list, err)
	}
}

func TestWhatIsGivenUpEnds(t *testing.T) {
	f, c, w := newCell(t, guest.Limits{})
	must(t, os.WriteFile(filepath.Join(w, "file"), content(4<<20), 0o644))
	ctx, cancel := context.WithCancel(context.Background())
	err := f.Read(ctx, "file", all, func(sandbox.FileInfo) error { cancel(); return nil }, io.Discard)
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	failed := errors.New("the caller's")
	if err := f.Read(context.Background(), "file", all, func(sandbox.FileInfo) error { return failed }, io.Discard); !errors.Is(err, failed) {
		t.Error(err)
	}
	// A helper that is stopped for good.
	must(t, os.WriteFile(filepath.Join(c.root, guest.Program), []byte("#!/none\n"), 0o700))
	if _, err := f.Stat(context.Background(), "file"); err == nil {
		t.Error("no helper, and no error")
	}
}

func TestAGuestThatGivesNothingIsStuck(t *testing.T) {
	c := &silent{}
	f := guest.New(guest.Config{Runner: c, Limits: guest.Limits{Idle: 50 * time.Millisecond}})
	if _, err := f.Stat(context.Background(), "/x"); !errors.Is(err, sandbox.ErrFileStuck) {
		t.Error(err)
	}
	if _, err := f.Write(context.Background(), "/x", sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader("x")); !errors.Is(err, sandbox.ErrFileStuck) {
		t.Error(err)
	}
}

// silent is a helper that never says anything, until it is killed.
type silent struct{}

func (*silent) Run(ctx context.Context, _ []string, _, _, _ *os.File) (int, error) {
	<-ctx.Done()
	return 137, nil
}

func (*silent) Cat(context.Context, string, *os.File) error { return nil }

func BenchmarkStat(b *testing.B) {
	need.Root(b)
	f := guest.New(guest.Config{Runner: &cell{root: filepath.Dir(helper)}})
	for b.Loop() {
		if _, err := f.Stat(context.Background(), "/"); err != nil {
			b.Fatal(err)
		}
	}
}
