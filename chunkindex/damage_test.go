package chunkindex_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"quarry/chunkindex"
	"quarry/internal/need"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// written makes an index on disk that has table files and a log.
func written(t *testing.T) (dir string, id chunk.Digest, es []pack.Entry) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "index")
	id, es = digest(-1), entries(0, 2_000)
	for _, part := range [][]pack.Entry{es[:1_000], es[1_000:]} {
		x, err := chunkindex.Open(chunkindex.Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		insert(t, x, id, part)
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return dir, id, es
}

// TestADamagedIndexIsMadeAnew damages each file in each way. The index opens
// and has nothing wrong in it, and what was moved aside is still there.
func TestADamagedIndexIsMadeAnew(t *testing.T) {
	good, id, es := written(t)
	want := map[chunk.Digest]chunkindex.Location{}
	for _, e := range es {
		want[e.Digest] = chunkindex.At(id, e)
	}
	files, err := os.ReadDir(good)
	if err != nil {
		t.Fatal(err)
	}
	anew := map[string]bool{}
	for _, f := range files {
		whole, err := os.ReadFile(filepath.Join(good, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		for how, damage := range damages(whole) {
			dir := filepath.Join(t.TempDir(), "index")
			if err := os.CopyFS(dir, os.DirFS(good)); err != nil {
				t.Fatal(err)
			}
			if err := damage(filepath.Join(dir, f.Name())); err != nil {
				t.Fatal(err)
			}
			x, err := chunkindex.Open(chunkindex.Config{Dir: dir})
			if err != nil {
				t.Errorf("%s %s: %v", f.Name(), how, err)
				continue
			}
			n := 0
			for r, err := range x.All(t.Context()) {
				if err != nil {
					break // damage of a table file is met here
				}
				if r.Location != want[r.Digest] {
					t.Errorf("%s %s: %s is at %+v, want %+v", f.Name(), how, r.Digest, r.Location, want[r.Digest])
				}
				n++
			}
			if _, err := os.Stat(dir + ".damaged"); err == nil {
				kind, _, _ := strings.Cut(f.Name(), "-")
				anew[kind] = true
				if n > 0 || len(x.AppliedPacks()) > 0 {
					t.Errorf("%s %s: a new index has %d records", f.Name(), how, n)
				}
			}
			if err := x.Close(); err != nil {
				t.Errorf("%s %s: close: %v", f.Name(), how, err)
			}
		}
	}
	if !anew["MANIFEST"] || !anew["OPTIONS"] {
		t.Errorf("made anew for damage of %v only", anew)
	}
}

func damages(whole []byte) map[string]func(path string) error {
	write := func(b []byte) func(string) error {
		return func(path string) error { return os.WriteFile(path, b, 0o600) }
	}
	ways := map[string]func(string) error{
		"deleted": os.Remove,
		"emptied": write(nil),
		"halved":  write(whole[:len(whole)/2]),
		"a folder": func(path string) error {
			return errors.Join(os.Remove(path), os.Mkdir(path, 0o700))
		},
	}
	for i := range min(4, len(whole)) {
		off := i * len(whole) / 4
		flipped := slices.Clone(whole)
		flipped[off] ^= 0xff
		ways[fmt.Sprintf("flipped at %d", off)] = write(flipped)
	}
	return ways
}

func TestAFileInThePlaceOfTheIndexIsMovedAside(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "index")
	for _, content := range []string{"first", "second"} { // the second replaces the first
		if err := os.WriteFile(dir, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		x, err := chunkindex.Open(chunkindex.Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(dir + ".damaged"); string(got) != content {
			t.Errorf("moved aside: %q, %v, want %q", got, err, content)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

func TestALockedIndexIsNotMovedAside(t *testing.T) {
	dir, _, _ := written(t)
	x, err := chunkindex.Open(chunkindex.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if _, err := chunkindex.Open(chunkindex.Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(dir + ".damaged"); err == nil {
		t.Error("the index was moved aside")
	}
}

// faultFS fails as an operating system does.
type faultFS struct {
	vfs.FS
	open error        // of every file
	free atomic.Int64 // bytes; negative: not told
}

func (f *faultFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	if f.open != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: f.open}
	}
	return f.FS.Open(name, opts...)
}

func (f *faultFS) GetDiskUsage(string) (vfs.DiskUsage, error) {
	if free := f.free.Load(); free >= 0 {
		return vfs.DiskUsage{AvailBytes: uint64(free)}, nil
	}
	return vfs.DiskUsage{}, vfs.ErrUnsupported
}

func TestWhatTheOperatingSystemRefusesIsNoDamage(t *testing.T) {
	for _, fault := range []syscall.Errno{syscall.EACCES, syscall.EPERM, syscall.EIO, syscall.ENOSPC, syscall.EMFILE, syscall.EROFS} {
		mem := vfs.NewMem()
		open(t, mem).Close()
		fs := &faultFS{FS: mem, open: fault}
		fs.free.Store(-1)
		if x, err := chunkindex.Open(chunkindex.Config{Dir: "index", FS: fs}); !errors.Is(err, fault) {
			t.Errorf("%v: got index %v, error %v", fault, x, err)
		}
		if _, err := mem.Stat("index.damaged"); err == nil {
			t.Errorf("%v: the index was moved aside", fault)
		}
		open(t, mem).Close()
	}
}

func TestAFullDiskIsSaidBeforeAChange(t *testing.T) {
	fs := &faultFS{FS: vfs.NewMem()}
	fs.free.Store(1 << 40)
	x := open(t, fs)
	id, es := digest(-1), entries(0, 10)
	insert(t, x, id, es)
	fs.free.Store(31 << 20)
	err := x.InsertBatch(t.Context(), digest(-2), entries(10, 10))
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free space and try again") {
		t.Errorf("insert: got %v", err)
	}
	wantAt(t, x, id, es)
	x.Close()
	x = open(t, fs) // it can still be read
	wantAt(t, x, id, es)
	fs.free.Store(32 << 20)
	insert(t, x, digest(-2), entries(10, 10))
	x.Close()
	fs.free.Store(1 << 20)
	if _, err := chunkindex.Open(chunkindex.Config{Dir: "index", FS: fs}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("open: got %v", err)
	}
}

// TestADiskThatIsFilling inserts until a small disk is full, which the index
// must survive: it says so, can be read, and goes on once there is room.
func TestADiskThatIsFilling(t *testing.T) {
	need.Root(t)
	disk := t.TempDir()
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Unmount(disk, 0) })
	x, err := chunkindex.Open(chunkindex.Config{Dir: filepath.Join(disk, "index")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	packs := 0
	for err == nil && packs < 500 {
		err = x.InsertBatch(context.Background(), digest(-1-packs), entries(packs*10_000, 10_000))
		packs++
	}
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "free space and try again") {
		t.Fatalf("pack %d: got %v", packs, err)
	}
	wantAt(t, x, digest(-1), entries(0, 1000))
	if err := syscall.Mount("tmpfs", disk, "tmpfs", syscall.MS_REMOUNT, "size=256m"); err != nil {
		t.Fatal(err)
	}
	insert(t, x, digest(-packs), entries((packs-1)*10_000, 10_000))
}
