package e2e_test

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/e2e/lab"
	"quarry/e2e/lab/proxy"
	"quarry/e2e/lab/traffic"
	"quarry/internal/need"
	"quarry/store/chunk"
)

const (
	// manyImages is what a worker is made for.
	manyImages = 64
	// maxShimAnon is what one shim may hold in memory of its own, in KiB, and
	// maxShimsPSS what all of them may, with their share of what they share.
	maxShimAnon = 8 << 10
	maxShimsPSS = 300 << 10
	// manySandboxes of one image start at once.
	manySandboxes = 32
)

func newLab(t *testing.T) *lab.Lab {
	t.Helper()
	l, err := lab.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// memoryOf reads one figure of a process's memory, in KiB.
func memoryOf(t *testing.T, pid int, figure string) int {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), figure+":"); ok {
			n, err := strconv.Atoi(strings.Fields(value)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("process %d has no %s", pid, figure)
	return 0
}

// TestManyImagesMountedAtOnce mounts as many images as a worker is made for,
// reads them, weighs their shims, and unmounts them.
func TestManyImagesMountedAtOnce(t *testing.T) {
	need.Root(t)
	need.Tool(t, "umoci")
	l := newLab(t)
	data, worker := l.Path("d"), l.Path("w")
	trees := make([]knownTree, manyImages)
	for i := range trees {
		dir := l.Path(fmt.Sprintf("image%d", i))
		trees[i], _ = writeKnown(t, dir, 3, byte(i))
		writeLayout(t, dir+".oci", dir)
		if _, err := l.Convert(t.Context(), data, "oci:"+dir+".oci", fmt.Sprintf("t/image%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	mount := func(i int) string { return l.Path(fmt.Sprintf("m%d", i)) }
	// Several at a time, as sandboxes come.
	inParallel(manyImages, 8, func(i int) {
		if err := os.Mkdir(mount(i), 0o700); err != nil {
			t.Error(err)
		}
		if _, err := l.Quarry(t.Context(), "mount", "--data", data, "--worker-dir", worker, fmt.Sprintf("t/image%d", i), mount(i)); err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	inParallel(manyImages, manyImages, func(i int) {
		if f := readKnown(mount(i), trees[i], nil); f.right != len(trees[i]) {
			t.Errorf("image %d: %v", i, f)
		}
	})
	weighShims(t, worker)
	inParallel(manyImages, 8, func(i int) {
		if _, err := l.Quarry(t.Context(), "umount", "--worker-dir", worker, mount(i)); err != nil {
			t.Error(err)
		}
	})
	if left := stays(func() []string { return leftovers(l.Dir) }); len(left) > 0 {
		t.Errorf("left: %s", strings.Join(left, "; "))
	}
}

func weighShims(t *testing.T, worker string) {
	t.Helper()
	shims := shimsOf(t, worker)
	if len(shims) != manyImages {
		t.Errorf("%d shims, want %d", len(shims), manyImages)
	}
	pss, most := 0, 0
	for _, pid := range shims {
		pss += memoryOf(t, pid, "Pss")
		most = max(most, memoryOf(t, pid, "Anonymous"))
	}
	t.Logf("%d shims: %d KiB of PSS in all, the largest has %d KiB of anonymous memory", len(shims), pss, most)
	if pss > maxShimsPSS {
		t.Errorf("the shims have %d KiB of PSS, want %d or less", pss, maxShimsPSS)
	}
	if most > maxShimAnon {
		t.Errorf("a shim has %d KiB of anonymous memory, want %d or less", most, maxShimAnon)
	}
}

// shimsOf lists the shims of a worker folder.
func shimsOf(t *testing.T, worker string) (pids []int) {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(worker, "mounts", "*", "shim.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, state := range dirs {
		found, err := lab.Find("--dir", filepath.Dir(state))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, found...)
	}
	return pids
}

// inParallel calls fn for 0 to n-1, some at a time.
func inParallel(n, atOnce int, fn func(i int)) {
	slots := make(chan struct{}, atOnce)
	var wg sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			fn(i)
		})
	}
	wg.Wait()
}

// TestSandboxesThatStartTogetherFetchEachChunkOnce starts many sandboxes of an
// image that the worker has never seen, all reading all of it.
func TestSandboxesThatStartTogetherFetchEachChunkOnce(t *testing.T) {
	need.Root(t)
	for _, tool := range []string{"umoci", "runsc", "busybox"} {
		need.Tool(t, tool)
	}
	l := newLab(t)
	data, worker, root := l.Path("d"), l.Path("w"), l.Path("root")
	tree, size := writeKnown(t, root, 20, 1)
	addBusybox(t, root)
	writeLayout(t, l.Path("oci"), root)
	if _, err := l.Convert(t.Context(), data, "oci:"+l.Path("oci"), "t/together"); err != nil {
		t.Fatal(err)
	}
	server, err := l.Serve(t.Context(), data)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	p, err := proxy.New(proxy.Config{Target: server.Addr(), RTT: 2 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.Record()
	sums := make([]string, manySandboxes)
	inParallel(manySandboxes, manySandboxes, func(i int) {
		out, err := l.Quarry(t.Context(), "run", "--no-trace", "--store", p.URL(), "--trust", filepath.Join(data, "keys", "signing.pub"), "--worker-dir", worker,
			"t/together", "sh", "-c", "cd / && sha256sum tree/*")
		if err != nil {
			t.Error(err)
		}
		sums[i] = out
	})
	for i, out := range sums {
		compareSums(t, i, out, tree)
	}
	exchanges, err := p.Exchanges()
	if err != nil {
		t.Fatal(err)
	}
	// Without a trace, every chunk comes by its digest.
	times := map[chunk.Digest]int{}
	var came int64
	onWire := 0
	for _, e := range exchanges {
		chunks, err := traffic.Chunks(e)
		if err != nil {
			t.Fatal(err)
		}
		if e.Status != http.StatusOK {
			t.Logf("%s %s: %d %s", e.Method, e.Path, e.Status, e.Answer)
		}
		onWire += len(chunks)
		for _, k := range chunks {
			if times[k.Digest]++; times[k.Digest] == 1 {
				came += k.Plain
			}
		}
	}
	if came < size {
		t.Errorf("%d bytes of chunks came of a tree of %d", came, size)
	}
	figure := func(name, label string) int {
		n, err := lab.ReaderMetric(t.Context(), worker, "quarry_reader_"+name, label)
		if err != nil {
			t.Fatal(err)
		}
		return int(n)
	}
	// On a busy machine, as this one now is, what is on its way may look stalled and
	// be asked for again. The reader tells how often: nothing else comes twice.
	fetched := figure("fetched_chunks_total", `tier="store"`)
	asked, twice := figure("hedged_chunks_total", `result="asked"`), figure("hedged_chunks_total", `result="twice"`)
	again := figure("asked_again_chunks_total", "")
	t.Logf("%d sandboxes: %d different chunks; %d fetched, %d hedged, of which %d came twice; %d on the wire, %d asked for again; %d requests",
		manySandboxes, len(times), fetched, asked, twice, onWire, again, len(exchanges))
	if fetched-twice != len(times) || twice > asked {
		t.Errorf("%d chunks fetched, %d of them twice, %d hedged, want each of %d once", fetched, twice, asked, len(times))
	}
	if onWire < fetched || onWire > len(times)+asked+again {
		t.Errorf("%d chunks on the wire, want the %d fetched, and no more than %d with what was asked for twice",
			onWire, fetched, len(times)+asked+again)
	}
}

// compareSums compares what sandbox i has printed with the tree.
func compareSums(t *testing.T, i int, out string, tree knownTree) {
	t.Helper()
	for line := range strings.Lines(out) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		if tree[name] != sum {
			t.Errorf("sandbox %d: %s has sum %s, want %s", i, name, sum, tree[name])
		}
	}
	if n := strings.Count(out, "\n"); n != len(tree) {
		t.Errorf("sandbox %d has read %d files, want %d", i, n, len(tree))
	}
}
