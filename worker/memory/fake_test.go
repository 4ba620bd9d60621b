package memory_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/memory"
)

// fakeGroup is a folder with files like those of a control group of version 1, which
// the kernel does nothing with.
func fakeGroup(t *testing.T, files map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	all := map[string]string{"memory.usage_in_bytes": "1000\n", "memory.stat": "cache 50\nrss 10\nshmem 40\nswap 5\ntotal_rss 99\n", "memory.swappiness": "060"}
	for name, content := range files {
		all[name] = content
	}
	for name, content := range all {
		if content == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func open(t *testing.T, c memory.GroupConfig) *memory.Group {
	t.Helper()
	c.Proc = proc(t, meminfo, "") // which has swap
	g, err := memory.OpenGroup(c)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestWhatAGroupHoldsIsRead(t *testing.T) {
	h, err := open(t, memory.GroupConfig{Dir: fakeGroup(t, nil)}).Held()
	if want := (memory.Held{Anon: 10, Shmem: 40, File: 10, Swap: 5}); err != nil || h != want {
		t.Errorf("version 1: %+v, %v", h, err)
	}
	h, err = open(t, memory.GroupConfig{Dir: fakeGroup(t, map[string]string{
		"memory.usage_in_bytes": "", "memory.current": "1\n", "memory.swap.current": "7\n",
		"memory.stat": "anon 10\nfile 50\nkernel 3\nshmem 40\nanon_thp 0\n",
	})}).Held()
	if want := (memory.Held{Anon: 10, Shmem: 40, File: 10, Swap: 7}); err != nil || h != want || h.Own() != 50 {
		t.Errorf("version 2: %+v, %v", h, err)
	}
	if _, err := memory.OpenGroup(memory.GroupConfig{Dir: t.TempDir()}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no group: %v", err)
	}
}

// What a reclaim changes is set back: at its end, and by the next worker when this one
// was killed.
func TestWhatWasChangedIsSetBack(t *testing.T) {
	dir := fakeGroup(t, map[string]string{"memory.force_empty": "-", "memory.stat": "rss 104857600\n"})
	journal := filepath.Join(t.TempDir(), "reclaim")
	g := open(t, memory.GroupConfig{Dir: dir, Journal: journal})
	if _, err := g.Reclaim(t.Context(), 10); err != nil {
		t.Fatal(err)
	}
	if got := content(t, dir+"/memory.swappiness"); got != "060" {
		t.Errorf("swappiness %q", got)
	}
	if _, err := os.Stat(journal); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the journal is still there: %v", err)
	}

	limit := filepath.Join(dir, "memory.limit_in_bytes")
	for path, text := range map[string]string{limit: "5", journal: "memory.swappiness 061\nmemory.limit_in_bytes 536870912\nmemory.limit_in_bytes 6\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	open(t, memory.GroupConfig{Dir: dir, Journal: journal})
	if got := content(t, limit); got != "536870912" {
		t.Errorf("limit %q", got)
	}
	if got := content(t, dir+"/memory.swappiness"); got != "061" {
		t.Errorf("swappiness %q", got)
	}
	if _, err := os.Stat(journal); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the journal is still there: %v", err)
	}
	for _, bad := range []string{"../../etc/passwd x\n", "memory.limit_in_bytes\n", "cgroup.procs 1\n"} {
		if err := os.WriteFile(journal, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := memory.OpenGroup(memory.GroupConfig{Dir: dir, Journal: journal}); err == nil {
			t.Errorf("journal %q was taken", bad)
		}
	}
}

func TestOnlyAMemoryFileIsOne(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	disk, err := os.Open("fake_test.go")
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	for name, f := range map[string]*os.File{"a pipe": read, "a file": disk} {
		if _, err := memory.OpenMemory(f); !errors.Is(err, memory.ErrNotMemory) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func memfd(t *testing.T, size int64, data ...memory.Range) (*os.File, *memory.File) {
	t.Helper()
	fd, err := unix.MemfdCreate("runsc-memory", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	given := os.NewFile(uintptr(fd), "memory")
	t.Cleanup(func() { given.Close() })
	if err := given.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, r := range data {
		if _, err := given.WriteAt(make([]byte, r.Len), r.Off); err != nil {
			t.Fatal(err)
		}
	}
	f, err := memory.OpenMemory(given)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return given, f
}

func TestHolesAreNotData(t *testing.T) {
	given, f := memfd(t, 1<<32, memory.Range{Off: 1 << 20, Len: 8192}, memory.Range{Off: 1 << 31, Len: 4096})
	if _, err := given.Seek(77, 0); err != nil {
		t.Fatal(err)
	}
	data, err := f.Data(t.Context())
	if want := "[{1048576 8192} {2147483648 4096}]"; err != nil || fmt.Sprint(data) != want {
		t.Errorf("got %v, %v, want %s", data, err, want)
	}
	if at, err := given.Seek(0, 1); at != 77 {
		t.Errorf("the given file's position moved to %d, %v", at, err)
	}
	// Before Linux 6.5 the kernel does not tell what is in memory: all of it is read.
	whole, away := int64(0), "[]"
	if len(f.Present(data[0])) == 0 {
		whole, away = 3*4096, ""
	}
	for _, r := range data {
		all := fmt.Sprint([]memory.Range{r})
		if whole > 0 {
			away = all
		} else if got := fmt.Sprint(f.Present(r)); got != all {
			t.Errorf("present of %v: %v", r, got)
		}
		if got := fmt.Sprint(f.Away(r)); got != away {
			t.Errorf("away of %v: %v, want %v", r, got, away)
		}
	}
	if got, err := memory.Fetch(t.Context(), memory.Piece{File: f, Ranges: data}); err != nil || got.Bytes != whole {
		t.Errorf("brought back %+v, %v of what is there", got, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(given.Fd()), &st); err != nil || st.Blocks*512 != 3*4096 {
		t.Errorf("the file has %d bytes now, %v", st.Blocks*512, err)
	}
}

// Pages of an image file that were dropped come back.
func TestImagePagesComeBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, 3<<20+5), 0o600); err != nil {
		t.Fatal(err)
	}
	of, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := of.Sync(); err != nil {
		t.Fatal(err)
	}
	f := memory.OpenImage(of)
	defer f.Close()
	before := f.Present(memory.Range{Len: 3<<20 + 5})
	if memory.Bytes(before) < 3<<20 {
		t.Fatalf("present: %v", before)
	}
	if err := unix.Fadvise(int(of.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	if here := f.Present(memory.Range{Len: 3<<20 + 5}); len(here) != 0 {
		t.Fatalf("still there: %v", here)
	}
	got, err := memory.Fetch(t.Context(), memory.Piece{File: f, Ranges: before})
	if err != nil || got.Bytes == 0 {
		t.Errorf("brought back %+v, %v", got, err)
	}
	if here := f.Present(memory.Range{Len: 3<<20 + 5}); memory.Bytes(here) != memory.Bytes(before) {
		t.Errorf("present: %v, was %v", here, before)
	}
}

// What a process has open of a mount is found, and nothing else is opened.
func TestFilesOfAnImageAreFound(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(dir+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		flags int
	}{{"file", unix.O_PATH}, {"file", os.O_RDONLY}, {"fifo", os.O_RDWR}} {
		fd, err := unix.Open(filepath.Join(dir, c.name), c.flags|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
	}
	pids := []int{os.Getpid(), 1 << 22}
	if n := count(t, path, pids, dir); n != 1 {
		t.Errorf("the file was found %d times", n)
	}
	if n := count(t, dir+"/fifo", pids, dir); n != 0 {
		t.Error("a fifo was opened")
	}
	if n := count(t, path, pids, "/proc"); n != 0 {
		t.Error("a file of another mount was opened")
	}
	if _, err := memory.OpenImages(t.Context(), pids, dir+"/nothere"); err == nil {
		t.Error("no mount: no error")
	}
}

// count is how often a file is among those that processes have of a mount.
func count(t *testing.T, path string, pids []int, mount string) (n int) {
	t.Helper()
	want, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	files, err := memory.OpenImages(t.Context(), pids, mount)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if st, err := f.Stat(); err != nil {
			t.Error(err)
		} else if os.SameFile(st, want) {
			n++
		}
		f.Close()
	}
	return n
}

type reducer struct {
	calls int
	err   error
}

func (r *reducer) Reduce(context.Context, bool) error { r.calls++; return r.err }

// deaf is a Sentry that does not answer.
type deaf struct{ asked chan struct{} }

func (d deaf) Reduce(ctx context.Context, _ bool) error {
	close(d.asked)
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestWhoWaitsLongestIsAskedFirst(t *testing.T) {
	var w memory.Waiting
	now := time.Now()
	calls := map[string]*reducer{}
	for _, c := range []struct {
		id     string
		paused time.Duration // ago
		until  time.Duration // from now; 0 is not known
	}{{"old", time.Minute, 0}, {"new", time.Second, 0}, {"soon", 0, 500 * time.Millisecond}, {"newest", 0, time.Minute}} {
		calls[c.id] = &reducer{err: errors.New(c.id)}
		s := memory.Sandbox{ID: c.id, Sentry: calls[c.id], Group: open(t, memory.GroupConfig{Dir: fakeGroup(t, map[string]string{"memory.force_empty": "-"})})}
		until := time.Time{}
		if c.until > 0 {
			until = now.Add(c.until)
		}
		w.Add(s, now.Add(-c.paused), until)
	}
	w.Drop("old")
	var got []string
	for _, took := range w.Reclaim(t.Context(), 1<<30) {
		got = append(got, took.ID)
	}
	if fmt.Sprint(got) != "[newest new]" || calls["soon"].calls+calls["old"].calls != 0 {
		t.Errorf("asked %v", got)
	}
	w.Reclaim(t.Context(), 1<<30)
	if calls["new"].calls != 1 {
		t.Errorf("the Sentry was asked %d times in one pause", calls["new"].calls)
	}
	if got, err := w.Wake(t.Context(), "nobody"); err != nil || got.Bytes != 0 {
		t.Errorf("wake of one that does not wait: %+v, %v", got, err)
	}
}

// A sandbox that wakes is not held up by who takes its memory.
func TestAWakeEndsAReclaim(t *testing.T) {
	var w memory.Waiting
	d := deaf{asked: make(chan struct{})}
	w.Add(memory.Sandbox{ID: "one", Sentry: d, Group: open(t, memory.GroupConfig{Dir: fakeGroup(t, nil)})}, time.Now(), time.Time{})
	ended := make(chan []memory.Took)
	go func() { ended <- w.Reclaim(t.Context(), 1<<30) }()
	<-d.asked
	if _, err := w.Wake(t.Context(), "one"); err != nil {
		t.Error(err)
	}
	if took := <-ended; len(took) != 0 {
		t.Errorf("took %+v", took)
	}
	if took := w.Reclaim(t.Context(), 1<<30); len(took) != 0 {
		t.Errorf("took %+v of one that woke", took)
	}
}

// A fetch ends with its ctx.
func TestAFetchEndsWithItsContext(t *testing.T) {
	_, f := memfd(t, 1<<30)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := memory.Fetch(ctx, memory.Piece{File: f, Ranges: []memory.Range{{Off: 0, Len: 1 << 30}}})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Where swap has no room a reclaim would take page cache, which others use.
func TestNothingIsTakenWithoutRoomInSwap(t *testing.T) {
	without := proc(t, "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n", "")
	v1 := fakeGroup(t, map[string]string{"memory.force_empty": "-", "memory.stat": "rss 104857600\n"})
	above := t.TempDir()
	for name, text := range map[string]string{"memory.swap.max": "100", "memory.swap.current": "100"} {
		if err := os.WriteFile(filepath.Join(above, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	v2 := filepath.Join(above, "one")
	if err := os.Rename(fakeGroup(t, map[string]string{"memory.usage_in_bytes": "", "memory.current": "1", "memory.reclaim": "-", "memory.stat": "anon 104857600\n"}), v2); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		proc, path, file string
	}{{without, v1, "memory.force_empty"}, {proc(t, meminfo, ""), v2, "memory.reclaim"}} {
		g, err := memory.OpenGroup(memory.GroupConfig{Dir: c.path, Proc: c.proc})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := g.Reclaim(t.Context(), 10); n != 0 || err != nil || content(t, filepath.Join(c.path, c.file)) != "-" {
			t.Errorf("%s: took %d, %v, and wrote %q", c.file, n, err, content(t, filepath.Join(c.path, c.file)))
		}
	}
}
