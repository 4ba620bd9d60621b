package cache_test

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/store/cache"
)

// TestThePageCacheHoldsNothing looks at what the kernel keeps of the segments
// after they were written and read: the pages of a mounted image are in its
// cache once already.
func TestThePageCacheHoldsNothing(t *testing.T) {
	for mode, buffered := range modes {
		t.Run(mode, func(t *testing.T) {
			dir := t.TempDir()
			var st unix.Statfs_t
			if err := unix.Statfs(dir, &st); err != nil {
				t.Fatal(err)
			}
			if st.Type == unix.TMPFS_MAGIC {
				need.Missing(t, "a folder for tests that is on a disk (TMPDIR names it)")
			}
			if !buffered && !hasDirect(t, dir) {
				need.Missing(t, "direct I/O in the folder for tests (TMPDIR names it)")
			}
			c := open(t, cache.Config{Dir: dir, Buffered: buffered})
			all := chunks(0, 100, 200_000)
			offerAll(t, c, all...)
			for _, n := range all {
				if !has(t, c, n) {
					t.Fatal("a chunk is missing")
				}
			}
			held, pages := resident(t, filepath.Join(dir, "0000000000000001.chunks"))
			t.Logf("%d of %d pages are in the page cache", held, pages)
			// The buffered way can only ask; the kernel keeps what it is still writing.
			if most := map[bool]int{false: 0, true: pages / 5}[buffered]; held > most {
				t.Errorf("more than %d pages are in the page cache: %d", most, held)
			}
		})
	}
}

// With KeepPages the kernel has all of it.
func TestThePageCacheKeepsWhatItMay(t *testing.T) {
	dir := t.TempDir()
	c := open(t, cache.Config{Dir: dir, KeepPages: true})
	all := chunks(0, 100, 200_000)
	put(t, c, all...)
	if held, pages := resident(t, filepath.Join(dir, "0000000000000001.chunks")); held < pages*9/10 {
		t.Errorf("%d of %d pages are in the page cache", held, pages)
	}
}

// hasDirect reports whether a file of the folder takes direct I/O.
func hasDirect(t *testing.T, dir string) bool {
	t.Helper()
	f, err := os.CreateTemp(dir, "direct")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(f.Name())
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(f.Name(), unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	p, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(p)
	_, err = unix.Pwrite(fd, p, 0)
	return err == nil
}

// resident returns how many pages of a file are in the page cache.
func resident(t *testing.T, path string) (held, pages int) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	vec := make([]byte, (len(mem)+page-1)/page)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), uintptr(unsafe.Pointer(&vec[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for _, v := range vec {
		held += int(v & 1)
	}
	return held, len(vec)
}
