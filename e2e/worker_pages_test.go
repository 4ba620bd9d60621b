package e2e_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/e2e/lab"
	"quarry/internal/need"
	"quarry/store/chunk"
	"quarry/store/trace"
	"quarry/worker/cgroup"
	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

// TestPagesOfAnImageAreTheWorkers has a first sandbox of an image run what others have
// run before: the kernel charges the pages of the image to the worker's control group and
// not to the sandbox's, where they stay when the sandbox has ended. So it is when the
// image is mounted again, by a worker that has its list in mind, and by a new one, which
// has to ask for it.
func TestPagesOfAnImageAreTheWorkers(t *testing.T) {
	need.Root(t)
	r := newWorkerRig(t, "cold")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	r.recordRuns(ctx, "pip", "--version")
	c := r.client()
	ref := "t/task"
	for _, name := range []string{"first", "known, by its digest", "known, to a new worker"} {
		if name == "known, to a new worker" {
			r.stopWorker()
			r.startWorker()
			c = r.client()
		}
		first, err := c.Create(ctx, sandbox.Spec{Image: ref, MemoryMB: 512}, "")
		check(t, err)
		listed := r.listedPages(first.ImageID)
		r.await(ctx, "the pages of the list, charged to the worker", func() bool {
			workers, _ := r.pagesOf(first.ID)
			return workers >= most(listed)
		})
		code, out, err := run(ctx, c, first.ID, sandbox.ExecSpec{Argv: []string{"pip", "--version"}})
		if err != nil || code != 0 {
			t.Fatalf("pip: %d %q %v", code, out, err)
		}
		workers, its := r.pagesOf(first.ID)
		t.Logf("%s: the list has %d pages; %d of the image are the worker's, %d the sandbox's", name, listed, workers, its)
		if workers < most(listed) || its > listed-most(listed) {
			t.Errorf("%s: %d pages of the image are the worker's, %d the sandbox's, and %d were run before", name, workers, its, listed)
		}
		second, err := c.Create(ctx, sandbox.Spec{Image: ref, MemoryMB: 512}, "")
		check(t, err)
		_, err = c.Delete(ctx, first.ID)
		check(t, err)
		if workers, _ := r.pagesOf(second.ID); workers < most(listed) {
			t.Errorf("%s: %d pages are the worker's once the first sandbox has ended, want %d", name, workers, listed)
		}
		_, err = c.Delete(ctx, second.ID)
		check(t, err)
		r.await(ctx, "the end of the mount", func() bool { return len(r.roots()) == 0 })
		ref = "t/task@" + first.ImageDigest.String()
	}
	r.nothingLeftOf()
}

// TestACreateByDigestNeedsNoStore has a new worker, which lacks the list of an image that
// its folder has, create from it while the store is silent, and while it refuses.
func TestACreateByDigestNeedsNoStore(t *testing.T) {
	need.Root(t)
	r := newWorkerRig(t, "cold")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c := r.client()
	ref := "t/task"
	for _, store := range []string{"", "http://192.0.2.1:7070", "http://127.0.0.1:9"} {
		if store != "" {
			r.stopWorker()
			r.startWorker("--data", "", "--store", store, "--trust", r.path("d", "keys", "signing.pub"))
			c = r.client()
		}
		s, err := c.Create(ctx, sandbox.Spec{Image: ref, MemoryMB: 512}, "")
		if err != nil {
			t.Fatalf("store %q: %v", store, err)
		}
		_, err = c.Delete(ctx, s.ID)
		check(t, err)
		r.await(ctx, "the end of the mount", func() bool { return len(r.roots()) == 0 })
		ref = "t/task@" + s.ImageDigest.String()
	}
	r.nothingLeftOf()
}

// most leaves the kernel some that it has taken away.
func most(pages int) int { return pages - pages/20 }

// listedPages is how many pages the chunks have that runs of an image have touched.
func (r *workerRig) listedPages(id chunk.Digest) (n int) {
	r.t.Helper()
	var runs [][]uint32
	for _, path := range r.records() {
		raw, err := os.ReadFile(path)
		check(r.t, err)
		rec, err := trace.Decode(raw)
		check(r.t, err)
		runs = append(runs, rec.Numbers)
	}
	dir, err := folder.Open(r.path("w"))
	check(r.t, err)
	im, err := dir.Load(id)
	check(r.t, err)
	page := uint32(os.Getpagesize())
	for _, k := range trace.Merge(runs) {
		n += int((im.RAFS.Blob.Chunks[k].Len + page - 1) / page)
	}
	return n
}

// records are the records of runs that the store has.
func (r *workerRig) records() []string {
	r.t.Helper()
	found, err := filepath.Glob(r.path("d", "bucket", "traces", "*", "*", "*", "*"))
	check(r.t, err)
	return found
}

// roots are the images that the worker has mounted.
func (r *workerRig) roots() []string {
	return slices.DeleteFunc(mountsBelow(r.path("w")), func(p string) bool { return filepath.Base(p) != "root" })
}

// recordRuns runs a command on machines that have never seen the image until the store
// need not record the next one.
func (r *workerRig) recordRuns(ctx context.Context, argv ...string) {
	r.t.Helper()
	for i := range trace.MinRuns {
		dir := r.path("recorded" + strconv.Itoa(i))
		r.quarry(append([]string{"run", "--data", r.path("d"), "--worker-dir", dir, "t/task", "--"}, argv...)...)
		r.await(ctx, "a record of a run", func() bool { return len(r.records()) > i })
	}
}

// pagesOf counts the pages of the image in memory that are charged to the worker's own
// group and to a sandbox's.
func (r *workerRig) pagesOf(id string) (workers, its int) {
	r.t.Helper()
	roots := r.roots()
	if len(roots) != 1 {
		r.t.Fatalf("mounts: %v", roots)
	}
	pages, err := lab.Charged(roots[0])
	check(r.t, err)
	groups, err := filepath.Glob(filepath.Join(cgroup.Root, "memory", r.group(), "*", id))
	if cgroup.IsV2(cgroup.Root) {
		groups, err = filepath.Glob(filepath.Join(cgroup.Root, r.group(), "*", id))
	}
	check(r.t, err)
	if len(groups) != 1 {
		r.t.Fatalf("groups of the sandbox: %v", groups)
	}
	return pages[r.memoryGroup()], pages[inode(r.t, groups[0])]
}

// memoryGroup is the inode of the group that the worker's own memory is charged to.
func (r *workerRig) memoryGroup() uint64 {
	r.t.Helper()
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(r.worker.Process.Pid) + "/cgroup")
	check(r.t, err)
	for line := range strings.Lines(string(raw)) {
		switch part := strings.SplitN(strings.TrimSpace(line), ":", 3); {
		case part[1] == "memory":
			return inode(r.t, filepath.Join(cgroup.Root, "memory", part[2]))
		case part[1] == "" && cgroup.IsV2(cgroup.Root):
			return inode(r.t, filepath.Join(cgroup.Root, part[2]))
		}
	}
	r.t.Fatalf("the worker is in no group of memory: %s", raw)
	return 0
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st syscall.Stat_t
	check(t, syscall.Stat(path, &st))
	return st.Ino
}
