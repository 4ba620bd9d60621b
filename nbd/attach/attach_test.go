package attach_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/nbd/attach"
)

// memory is a Source whose answers a test can spoil.
type memory struct {
	image []byte
	fail  atomic.Pointer[error]                                      // every view's error
	stall atomic.Pointer[func(ctx context.Context, off int64) error] // called first when set
	views atomic.Int64
}

func (m *memory) Size() int64 { return int64(len(m.image)) }

func (m *memory) View(ctx context.Context, off int64, n int, fn func([]byte) error) error {
	m.views.Add(1)
	if err := m.fail.Load(); err != nil {
		return *err
	}
	if stall := m.stall.Load(); stall != nil {
		if err := (*stall)(ctx, off); err != nil {
			return err
		}
	}
	return fn(m.image[off : off+int64(n)])
}

// patience is for whatever should happen at once: a busy machine may take long,
// and a test that fails may wait.
const patience = time.Minute

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// buildImage makes an EROFS image of files of up to 200 kB and returns it with
// their contents.
func buildImage(t testing.TB, files int) ([]byte, map[string][]byte) {
	t.Helper()
	need.Root(t)
	if im, ok := images[files]; ok {
		return im.bytes, im.want
	}
	mkfs := need.Tool(t, "mkfs.erofs")
	src := t.TempDir()
	want := map[string][]byte{}
	rnd := rand.NewChaCha8([32]byte{1})
	for i := range files {
		p := make([]byte, rnd.Uint64()%200_000)
		rnd.Read(p)
		name := filepath.Join("d"+string(rune('a'+i%7)), "f"+string(rune('a'+i/26%26))+string(rune('a'+i%26)))
		want[name] = p
		path := filepath.Join(src, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, p, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(t.TempDir(), "image.erofs")
	if msg, err := exec.Command(mkfs, "--quiet", out, src).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.erofs: %v\n%s", err, msg)
	}
	image, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	images[files] = testImage{image, want}
	return image, want
}

// testImage is an image as buildImage makes it.
type testImage struct {
	bytes []byte
	want  map[string][]byte
}

// images keeps those that were made: making one takes a slow machine seconds. No
// test changes one, and none runs beside another.
var images = map[int]testImage{}

func attachTo(t *testing.T, cfg attach.Config) *attach.Attachment {
	t.Helper()
	cfg.Dir = filepath.Join(t.TempDir(), "m")
	a, err := attach.Attach(testContext(t), cfg)
	if err != nil {
		t.Fatalf("Attach: %v", err)
	}
	detachAtEnd(t, a)
	return a
}

// detachAtEnd has the test detach and look for what is left.
func detachAtEnd(t *testing.T, a *attach.Attachment) {
	dir := filepath.Dir(a.Root())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		if err := a.Detach(ctx); err != nil {
			t.Errorf("Detach: %v", err)
		}
		if left := leftovers(t, dir); left != "" {
			t.Errorf("left after Detach:\n%s", left)
		}
	})
}

// eachMode runs a test in each of the modes that this build tests.
func eachMode(t *testing.T, test func(t *testing.T, mode attach.Mode)) {
	t.Helper()
	need.Root(t)
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) { test(t, mode) })
	}
}

// leftovers lists mounts, and loop and NBD devices, that speak of dir.
func leftovers(t *testing.T, dir string) string {
	t.Helper()
	var left []string
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, dir+"/") {
			left = append(left, line)
		}
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, loop := range loops {
		if file, err := os.ReadFile(loop); err == nil && strings.HasPrefix(string(file), dir+"/") {
			left = append(left, loop+" "+string(file))
		}
	}
	backends, err := filepath.Glob("/sys/block/nbd*/backend")
	if err != nil {
		t.Fatal(err)
	}
	for _, backend := range backends {
		if b, err := os.ReadFile(backend); err == nil && strings.HasSuffix(string(b), " "+dir+"\n") {
			left = append(left, backend+" "+string(b))
		}
	}
	return strings.Join(left, "")
}

func compareTree(t *testing.T, root string, want map[string][]byte) {
	t.Helper()
	got := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, _ := filepath.Rel(root, path)
		p, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Equal(p, want[name]) {
			t.Errorf("%s has %d bytes that differ from the %d wanted", name, len(p), len(want[name]))
		}
		got++
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if got != len(want) {
		t.Errorf("tree has %d files, want %d", got, len(want))
	}
}

func TestAttachedImageReadsAsItWasMade(t *testing.T) { eachMode(t, testAttachedImageReadsAsItWasMade) }

func testAttachedImageReadsAsItWasMade(t *testing.T, mode attach.Mode) {
	image, want := buildImage(t, 60)
	a := attachTo(t, attach.Config{Mode: mode, Source: &memory{image: image}})
	compareTree(t, a.Root(), want)
	var st unix.Statfs_t
	if err := unix.Statfs(a.Root(), &st); err != nil {
		t.Fatal(err)
	}
	const wantFlags = unix.ST_RDONLY | unix.ST_NOSUID | unix.ST_NODEV
	if st.Flags&wantFlags != wantFlags {
		t.Errorf("mount flags %#x, want read-only, nosuid, nodev", st.Flags)
	}
	if err := os.WriteFile(filepath.Join(a.Root(), "x"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("write: got %v, want EROFS", err)
	}
}

func TestReadErrorIsEIOForItsReaderAlone(t *testing.T) {
	eachMode(t, testReadErrorIsEIOForItsReaderAlone)
}

func testReadErrorIsEIOForItsReaderAlone(t *testing.T, mode attach.Mode) {
	image, want := buildImage(t, 60)
	src := &memory{image: image}
	a := attachTo(t, attach.Config{Mode: mode, Source: src, ReadAhead: -1})
	errLost := errors.New("reader lost")
	src.fail.Store(&errLost)
	for name := range want {
		if _, err := os.ReadFile(filepath.Join(a.Root(), name)); !errors.Is(err, unix.EIO) {
			t.Fatalf("%s while the source fails: got %v, want EIO", name, err)
		}
		break
	}
	src.fail.Store(nil)
	compareTree(t, a.Root(), want)
}

func TestHundredStalledReadsHoldUpNoOther(t *testing.T) {
	eachMode(t, testHundredStalledReadsHoldUpNoOther)
}

func testHundredStalledReadsHoldUpNoOther(t *testing.T, mode attach.Mode) {
	image, _ := buildImage(t, 100)
	const stalled = 100
	release := make(chan struct{})
	src := &memory{image: image}
	a := attachTo(t, attach.Config{Mode: mode, Source: src, ReadAhead: -1})
	half := int64(len(image)) / 2 &^ 4095
	stall := func(ctx context.Context, off int64) error {
		if off < half {
			return nil
		}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	src.stall.Store(&stall)
	before := src.views.Load()
	dev := openDirect(t, a.Device())
	results := make(chan error, stalled)
	for i := range stalled {
		go func() { // ends when released, below
			results <- readBlock(dev, half+int64(i)*8192, image)
		}()
	}
	waitFor(t, func() bool { return src.views.Load() >= before+stalled })
	other := make(chan error, 1)
	go func() { other <- readBlock(dev, 0, image) }() // ends at the latest with the others
	select {
	case err := <-other:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Errorf("a read waits beside %d stalled ones", stalled)
	}
	close(release)
	for range stalled {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

func openDirect(t *testing.T, device string) int {
	t.Helper()
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// readBlock reads one block past the page cache and compares it.
func readBlock(fd int, off int64, image []byte) error {
	raw := make([]byte, 2*4096)
	p := raw[4096-int(uintptr(unsafe.Pointer(unsafe.SliceData(raw)))%4096):][:4096]
	n, err := unix.Pread(fd, p, off)
	if err != nil {
		return err
	}
	if n != len(p) || !bytes.Equal(p, image[off:off+4096]) {
		return errors.New("read other bytes than the image's")
	}
	return nil
}

func waitFor(t *testing.T, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("condition not reached in %v", patience)
		}
	}
}

func TestDeadlineEndsAStalledReadWithEIO(t *testing.T) {
	eachMode(t, testDeadlineEndsAStalledReadWithEIO)
}

func testDeadlineEndsAStalledReadWithEIO(t *testing.T, mode attach.Mode) {
	image, _ := buildImage(t, 60)
	src := &memory{image: image}
	a := attachTo(t, attach.Config{Mode: mode, Source: src, ReadAhead: -1, Deadline: 200 * time.Millisecond})
	src.stall.Store(&stallForEver)
	if err := readBlock(openDirect(t, a.Device()), 4096, image); !errors.Is(err, unix.EIO) {
		t.Errorf("stalled read: got %v, want EIO", err)
	}
}

func TestUnmountByAnotherIsSeen(t *testing.T) { eachMode(t, testUnmountByAnotherIsSeen) }

func testUnmountByAnotherIsSeen(t *testing.T, mode attach.Mode) {
	image, _ := buildImage(t, 5)
	a := attachTo(t, attach.Config{Mode: mode, Source: &memory{image: image}})
	if err := unix.Unmount(a.Root(), 0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-a.Gone():
	case <-time.After(patience):
		t.Error("Gone was not closed")
	}
}

func TestDetachWhileAFileIsOpen(t *testing.T) { eachMode(t, testDetachWhileAFileIsOpen) }

func testDetachWhileAFileIsOpen(t *testing.T, mode attach.Mode) {
	image, want := buildImage(t, 5)
	a := attachTo(t, attach.Config{Mode: mode, Source: &memory{image: image}})
	for name := range want {
		f, err := os.Open(filepath.Join(a.Root(), name))
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(2500*time.Millisecond, func() { f.Close() })
		break
	}
	// attachTo's cleanup detaches: lazily after two seconds, freed by the close.
}

// stallForEver ends with the read's context only.
var stallForEver = func(ctx context.Context, _ int64) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestAttachUndoesAllWhenItFails(t *testing.T) { eachMode(t, testAttachUndoesAllWhenItFails) }

func testAttachUndoesAllWhenItFails(t *testing.T, mode attach.Mode) {
	image, _ := buildImage(t, 5)
	stalled := &memory{image: image}
	stalled.stall.Store(&stallForEver)
	for name, src := range map[string]*memory{
		"not an EROFS image":           {image: make([]byte, 1<<20)},
		"size is no multiple of 4096":  {image: make([]byte, 5000)},
		"the source stalls at the end": stalled,
		// Fields of the superblock at 1024.
		"another magic":          {image: changed(image, 1024, 0)},
		"blocks of 512 bytes":    {image: changed(image, 1024+12, 9)},
		"blocks of 64 KiB":       {image: changed(image, 1024+12, 16)},
		"a feature nobody knows": {image: changed(image, 1024+83, 0x80)},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			dir := filepath.Join(t.TempDir(), "m")
			if a, err := attach.Attach(ctx, attach.Config{Mode: mode, Dir: dir, Source: src}); err == nil {
				t.Error("Attach succeeded")
				a.Detach(t.Context())
			}
			if left := leftovers(t, dir); left != "" {
				t.Errorf("left:\n%s", left)
			}
		})
	}
}

// changed returns a copy of image with another byte at off.
func changed(image []byte, off int, b byte) []byte {
	image = bytes.Clone(image)
	image[off] = b
	return image
}

func TestAttachRefusesAFolderOpenToOthers(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := attach.Attach(testContext(t), attach.Config{Dir: dir, Source: &memory{image: make([]byte, 4096)}}); err == nil || !strings.Contains(err.Error(), "chmod 700") {
		t.Errorf("got %v, want advice to chmod", err)
	}
}

func TestSweepLeavesALiveAttachmentAlone(t *testing.T) {
	eachMode(t, testSweepLeavesALiveAttachmentAlone)
}

func testSweepLeavesALiveAttachmentAlone(t *testing.T, mode attach.Mode) {
	image, want := buildImage(t, 5)
	a := attachTo(t, attach.Config{Mode: mode, Source: &memory{image: image}})
	dir := filepath.Dir(a.Root())
	if err := attach.Sweep(testContext(t), dir); !errors.Is(err, attach.ErrInUse) {
		t.Errorf("Sweep: got %v, want ErrInUse", err)
	}
	if _, err := attach.Attach(testContext(t), attach.Config{Mode: mode, Dir: dir, Source: &memory{image: image}}); !errors.Is(err, attach.ErrInUse) {
		t.Errorf("second Attach: got %v, want ErrInUse", err)
	}
	compareTree(t, a.Root(), want)
}

func TestFileRefusesWrites(t *testing.T) {
	image, _ := buildImage(t, 5)
	a := attachTo(t, attach.Config{Source: &memory{image: image}})
	dir := filepath.Join(filepath.Dir(a.Root()), "fuse")
	if _, err := os.OpenFile(filepath.Join(dir, "image"), os.O_RDWR, 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("open for writing: got %v, want EROFS", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("create: got %v, want EROFS", err)
	}
	if err := os.Remove(filepath.Join(dir, "image")); !errors.Is(err, unix.EROFS) {
		t.Errorf("remove: got %v, want EROFS", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "image" {
		t.Errorf("folder lists %v, %v; want image", entries, err)
	}
}
