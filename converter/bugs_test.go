package converter_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/converter"
	"quarry/converter/tree"
	"quarry/internal/erofstest"
	"quarry/internal/need"
	"quarry/internal/testimage"
	"quarry/rafs"
	chunks "quarry/store"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/mem"
)

// fault is one that other converters and registries had. The numbers of faults
// are those in the names of tests and cases, here and in converter/tree.
type fault struct {
	report string // issue or pull request on GitHub: github.com/OWNER/REPOSITORY/issues/NUMBER
	test   string // what tries it when layers and a tree are not enough; else there are cases of it in reports
}

var faults = map[int]fault{
	1:  {report: "opencontainers/image-spec#1301"},
	3:  {report: "google/go-containerregistry#1897"},
	4:  {report: "containerd/containerd#6991"},
	7:  {report: "opencontainers/umoci#254"},
	8:  {report: "container2wasm/container2wasm#257"},
	9:  {report: "moby/moby#15517"},
	10: {report: "GoogleContainerTools/kaniko#2308"},
	11: {report: "containerd/containerd#13030", test: "TestReproEveryStoreAndMachineMakesTheSameBytes"},
	12: {report: "containerd/stargz-snapshotter#2214"},
	13: {report: "google/go-containerregistry#977"},
	15: {report: "opencontainers/image-spec#1204"},
	17: {report: "dragonflyoss/nydus#2006"},
	18: {report: "dragonflyoss/nydus#552", test: "TestBug18HardLinksAreStoredOnce"},
	19: {report: "apple/container#1797"},
	20: {report: "dragonflyoss/nydus#1817"},
	21: {report: "opencontainers/umoci#589"},
	22: {report: "kernel/hypeman#456", test: "TestBug22NothingOfTheHostIsTouched"},
	23: {report: "google/go-containerregistry#2392"},
	24: {report: "erofs/erofs-utils#32"},
	25: {report: "dragonflyoss/nydus#994"},
	26: {report: "dragonflyoss/nydus#1394"},
	27: {report: "composefs/composefs#342"},
	28: {report: "composefs/composefs-rs#57"},
	29: {report: "opencontainers/umoci#49"},
	31: {report: "moby/moby#3589", test: "TestBug31SparseEncodings"},
	32: {report: "goldmann/docker-squash#78"},
	33: {report: "moby/moby#1426"},
	34: {report: "apptainer/singularity#1592"},
	35: {report: "ostreedev/ostree#1469", test: "TestBug35CompiledPythonIsNotStale"},
	36: {report: "opencontainers/umoci#166"},
	37: {report: "dragonflyoss/nydus#554"},
	38: {report: "dragonflyoss/nydus#662", test: "TestBug38BigFiles"},
	39: {report: "dragonflyoss/nydus#441", test: "TestBug39DockersEmptyLayer"},
	42: {report: "containerd/containerd#13662", test: "TestBug42MediaTypesThatLie"},
	46: {report: "containerd/containerd#9142", test: "TestBug46ConfigsThatDoNotFit"},
	48: {report: "dragonflyoss/nydus#826", test: "TestBug48ManyLayers"},
	50: {report: "project-zot/zot#1410", test: "TestBug50ASubjectChangesNothing"},
	67: {report: "dragonflyoss/nydus#573", test: "TestReproNoChunkIsTakenForAnother"},
	83: {report: "goharbor/acceleration-service#28", test: "TestReproEveryStoreAndMachineMakesTheSameBytes"},
}

// report is one case of a fault: the layers of an image, lowest first, and the
// tree they make or what the refusal says.
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

// reports are all cases.
func reports(t testing.TB) []report {
	return slices.Concat(whiteoutReports(), linkReports(), changeReports(), rootReports(), xattrReports(), nameReports(), attributeReports(t), emptyReports())
}

func TestEveryFaultHasATest(t *testing.T) {
	cases := map[int]bool{}
	for _, r := range reports(t) {
		cases[r.num] = true
		if _, ok := faults[r.num]; !ok {
			t.Errorf("case %q is of fault %d, which is not in the list", r.name, r.num)
		}
	}
	tests := testsHere(t)
	address := regexp.MustCompile(`^[\w.-]+/[\w.-]+#[0-9]+$`)
	for n, f := range faults {
		if !address.MatchString(f.report) {
			t.Errorf("fault %d: %q is no address of a report", n, f.report)
		}
		if f.test == "" && !cases[n] {
			t.Errorf("fault %d has no case", n)
		}
		if f.test != "" && !tests[f.test] {
			t.Errorf("fault %d: there is no test %s", n, f.test)
		}
	}
}

// testsHere returns the names of this package's tests.
func testsHere(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no test files here: %v", err)
	}
	head := regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	tests := map[string]bool{}
	for _, file := range files {
		for _, m := range head.FindAllStringSubmatch(string(readFile(t, file)), -1) {
			tests[m[1]] = true
		}
	}
	return tests
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
		got := notation(decoded(t, im.Tree, chunksOf(t, s.Store)))
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

// merged reads tars step by step, without a data folder: layer, record, tree.
func merged(t testing.TB, s *mem.Store, tars ...[]byte) (*rafs.Tree, error) {
	t.Helper()
	var blobs [][]byte
	for _, p := range tars {
		blobs = append(blobs, testimage.Gzip(t, p))
	}
	return mergeBlobs(t.Context(), s, testChunk, blobs...)
}

// chunksOf returns a function that gets chunks which must be there.
func chunksOf(t testing.TB, s chunks.Getter) func(chunk.Digest) []byte {
	return func(d chunk.Digest) []byte {
		t.Helper()
		p, err := s.Get(t.Context(), d, nil)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
}

// TestBugReportsThroughTheKernel mounts the image of every case that has one and
// reads it with system calls, and with fsck.erofs.
func TestBugReportsThroughTheKernel(t *testing.T) {
	need.Root(t)
	each(t, func(t *testing.T, r report, tars [][]byte) {
		if r.wantErr != nil {
			return
		}
		s := mem.New()
		tr, err := merged(t, s, tars...)
		if err != nil {
			t.Fatal(err)
		}
		mnt := mount(t, s, tr)
		if diff := cmp.Diff(notation(listDisk(t, mnt)), normal(r.want)); diff != "" {
			t.Errorf("mounted tree (-got +want):\n%s", diff)
		}
	})
}

// mount has fsck.erofs read a tree's image, mounts it and returns where.
func mount(t testing.TB, s chunks.Getter, tr *rafs.Tree) string {
	t.Helper()
	need.Tool(t, "fsck.erofs")
	flat, meta := flatten(t, s, tr)
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
	return erofstest.Mount(t, file)
}

// flatten returns a tree's bootstrap and data as one device, and where data begins.
func flatten(t testing.TB, s chunks.Getter, tr *rafs.Tree) (device []byte, meta int) {
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
	get := chunksOf(t, s)
	for _, k := range im.Blob.Chunks {
		copy(flat[im.Blob.MappedOff+k.DevOff:], get(k.Digest))
	}
	return flat, int(im.Blob.MappedOff)
}

func writeTo(t testing.TB, path string, p []byte) {
	t.Helper()
	if err := os.WriteFile(path, p, 0o600); err != nil {
		t.Fatal(err)
	}
}
