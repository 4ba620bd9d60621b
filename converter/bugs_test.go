package converter_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"quarry/converter"
	"quarry/converter/layer"
	"quarry/converter/tree"
	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/image"
)

// report is one case of a fault that another converter had: the layers of an
// image, lowest first, and the tree they make or what the refusal says. num is
// the report's number in the list of faults; every number is to be found here or
// in ownTests.
type report struct {
	num      int
	name     string
	layers   []string // in the notation of tars
	variants []string // of one layer more on top: all must come to the same
	raw      [][]byte // one layer more on top, byte by byte; variants likewise
	want     string
	wantErr  []string // all of these words
	warnings []string // in this order, a part of each
}

// reports are all cases, group by group.
func reports(t testing.TB) []report {
	return slices.Concat(whiteoutReports(), linkReports(), changeReports(), rootReports(), xattrReports(), nameReports(), attributeReports(t), emptyReports())
}

// ownTests are the reports that need more than layers and a tree.
var ownTests = map[int]string{
	11: "TestBug11ParallelLayersGiveTheSameBytes",
	18: "TestBug18HardLinksAreStoredOnce",
	22: "TestBug22NothingOfTheHostIsTouched",
	31: "TestBug31SparseEncodings",
	35: "TestBug35CompiledPythonIsNotStale",
	38: "TestBug38BigFiles",
	39: "TestBug39DockersEmptyLayer",
}

func TestEveryReportHasACase(t *testing.T) {
	numbers := []int{1, 3, 4, 7, 8, 9, 10, 11, 12, 13, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 31, 32, 33, 34, 35, 36, 37, 38, 39}
	has := map[int]bool{}
	for _, r := range reports(t) {
		has[r.num] = true
	}
	for _, n := range numbers {
		if !has[n] && ownTests[n] == "" {
			t.Errorf("bug %d has no case", n)
		}
	}
}

// each calls fn for every variant of every report.
func each(t *testing.T, fn func(t *testing.T, r report, tars [][]byte)) {
	for _, r := range reports(t) {
		var tars [][]byte
		for _, l := range r.layers {
			tars = append(tars, tarNotation(t, l))
		}
		tops := r.raw
		for _, v := range r.variants {
			tops = append(tops, tarNotation(t, v))
		}
		for i := range max(1, len(tops)) {
			all := append(slices.Clone(tars), tops[min(i, len(tops)):min(i+1, len(tops))]...)
			t.Run(fmt.Sprintf("bug %02d: %s/%d", r.num, r.name, i), func(t *testing.T) { fn(t, r, all) })
		}
	}
}

// TestBugReports converts every case as quarry convert does and reads the image
// back from the store. What is refused leaves the store as it was.
func TestBugReports(t *testing.T) {
	each(t, func(t *testing.T, r report, tars [][]byte) {
		t.Parallel()
		var layers []testimage.Layer
		for _, p := range tars {
			layers = append(layers, testimage.Layer{Tar: p})
		}
		src := testimage.Build(t, layers...).Source("")
		s := newStore(t)
		if r.wantErr != nil {
			s.convert(t, testimage.Build(t, base).Source("")) // has the name before
			before := s.published(t)
			s.fail(t, src, r.wantErr...)
			if diff := cmp.Diff(s.published(t), before); diff != "" {
				t.Errorf("the failed conversion published (-after +before):\n%s", diff)
			}
			return
		}
		res := s.convert(t, src)
		im, err := rafs.Decode(buckettest.Bytes(t, s.mem, image.BootstrapKey(res.Statement.Bootstrap)))
		if err != nil {
			t.Fatal(err)
		}
		got := notation(decoded(t, im.Tree, func(d chunk.Digest) []byte {
			p, err := s.Store.Get(t.Context(), d, nil)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}))
		if diff := cmp.Diff(got, normal(r.want)); diff != "" {
			t.Errorf("tree (-got +want):\n%s", diff)
		}
		unread, err := converter.SourceTree(t.Context(), src, amd64, testChunk)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := tree.Digest(unread), res.Statement.Tree; got != want {
			t.Errorf("the source's tree digest is %s, the image's %s", got, want)
		}
		if len(res.Warnings) != len(r.warnings) {
			t.Errorf("warnings %q, want %d", res.Warnings, len(r.warnings))
		}
		for i, w := range r.warnings {
			if i < len(res.Warnings) && !strings.Contains(res.Warnings[i], w) {
				t.Errorf("warning %q does not say %q", res.Warnings[i], w)
			}
		}
		for _, key := range buckettest.Keys(t, s.mem, "") {
			if len(buckettest.Bytes(t, s.mem, key)) == 0 {
				t.Errorf("the object %s is empty", key)
			}
		}
	})
}

// published are the objects that workers can ask for.
func (s *store) published(t testing.TB) map[string]string {
	t.Helper()
	all := s.objects(t)
	for key := range all {
		if !slices.ContainsFunc([]string{"images/", "bootstraps/", "configs/", "blobs/"}, func(p string) bool { return strings.HasPrefix(key, p) }) {
			delete(all, key)
		}
	}
	return all
}

// chunkMap is a store of chunks in memory.
type chunkMap map[chunk.Digest][]byte

func (m chunkMap) Put(_ context.Context, p []byte) (chunk.Digest, error) {
	d := chunk.Sum(p)
	m[d] = bytes.Clone(p)
	return d, nil
}

// merged reads tars step by step, without a store: layer, record, tree.
func merged(t testing.TB, c chunkMap, tars ...[]byte) (*rafs.Tree, error) {
	t.Helper()
	m := tree.NewMerger(tree.Config{ChunkSize: testChunk})
	for _, p := range tars {
		if err := apply(t, m, c, testimage.Gzip(t, p), testChunk); err != nil {
			return nil, err
		}
	}
	return m.Tree(), nil
}

// apply reads one layer's blob and applies it, by way of its record's bytes.
func apply(t testing.TB, m *tree.Merger, c chunkMap, blob []byte, chunkSize uint32) error {
	t.Helper()
	d := layer.Descriptor{Digest: chunk.Sum(blob), Size: int64(len(blob))}
	rec, err := layer.Read(t.Context(), bytes.NewReader(blob), d, c, layer.Config{ChunkSize: chunkSize})
	if err != nil {
		return err
	}
	b, err := image.EncodeLayer(rec, macKey)
	if err != nil {
		return err
	}
	if rec, err = image.DecodeLayer(b, macKey); err != nil {
		return err
	}
	return m.Apply(rec.Entries)
}

// TestBugReportsThroughTheKernel mounts the image of every case that has one and
// reads it with system calls, and with fsck.erofs.
func TestBugReportsThroughTheKernel(t *testing.T) {
	need.Root(t)
	each(t, func(t *testing.T, r report, tars [][]byte) {
		if r.wantErr != nil {
			return
		}
		c := chunkMap{}
		tr, err := merged(t, c, tars...)
		if err != nil {
			t.Fatal(err)
		}
		mnt := c.mount(t, tr)
		if diff := cmp.Diff(notation(listDisk(t, mnt)), normal(r.want)); diff != "" {
			t.Errorf("mounted tree (-got +want):\n%s", diff)
		}
	})
}

// mount has fsck.erofs read a tree's image, mounts it and returns where.
func (c chunkMap) mount(t testing.TB, tr *rafs.Tree) string {
	t.Helper()
	need.Tool(t, "fsck.erofs")
	flat, meta := c.flat(t, tr)
	dir := t.TempDir()
	args := []string{"-d3", "--extract"}
	if meta < len(flat) {
		data := filepath.Join(dir, "data")
		writeTo(t, data, flat[meta:])
		args = append(args, "--device="+data)
	}
	boot := filepath.Join(dir, "bootstrap")
	writeTo(t, boot, flat[:meta])
	if out, err := exec.Command("fsck.erofs", append(args, boot)...).CombinedOutput(); err != nil || !strings.Contains(string(out), "No errors found") {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
	file := filepath.Join(dir, "image")
	writeTo(t, file, flat)
	return mountLoop(t, file)
}

// flat returns a tree's bootstrap and data as one device, and where data begins.
func (c chunkMap) flat(t testing.TB, tr *rafs.Tree) (device []byte, meta int) {
	t.Helper()
	boot, err := rafs.Encode(tr)
	if err != nil {
		t.Fatal(err)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	flat := make([]byte, im.DeviceSize())
	copy(flat, boot)
	if im.Blob == nil {
		return flat, len(flat)
	}
	for _, k := range im.Blob.Chunks {
		copy(flat[im.Blob.MappedOff+k.DevOff:], c[k.Digest])
	}
	return flat, int(im.Blob.MappedOff)
}

func writeTo(t testing.TB, path string, p []byte) {
	t.Helper()
	if err := os.WriteFile(path, p, 0o600); err != nil {
		t.Fatal(err)
	}
}

// mountLoop mounts an EROFS image file. mount(8) would do, but it looks at all
// loop devices and hangs with one whose server has died.
func mountLoop(t testing.TB, file string) string {
	t.Helper()
	backing, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(backing.Fd())}
	config.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR
	var loop *os.File
	for err = unix.EBUSY; err == unix.EBUSY; { // another process took the free one
		n, ctlErr := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if ctlErr != nil {
			t.Fatal(ctlErr)
		}
		if loop, err = os.Open(fmt.Sprintf("/dev/loop%d", n)); err != nil {
			t.Fatal(err)
		}
		defer loop.Close()
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	mnt := t.TempDir()
	if err := unix.Mount(loop.Name(), mnt, "erofs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Error(err)
		}
	})
	return mnt
}
