//go:build vm

package attach_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
)

// TestNBDRequestsAreAsLongAsAllowed counts the requests that the kernel makes of
// a MiB: kernels differ in what they make of the queue's limits, and of the
// read-ahead when a limit is set.
func TestNBDRequestsAreAsLongAsAllowed(t *testing.T) {
	const mib = 1 << 20
	image, _ := buildImage(t, 60)
	for _, c := range []struct {
		name      string
		readAhead int // KiB
		flags     int
		piece     int
		low, high int // requests
	}{
		{"whole, past the page cache, in requests of 256 KiB", 128, unix.O_DIRECT, mib, mib >> 18, mib >> 18},
		// The first are shorter: the read-ahead grows as reads turn out to be in order.
		{"a block at a time, with a read-ahead of 128 KiB", 128, 0, 4096, mib >> 17, mib>>17 + 6},
		{"a block at a time, without", -1, 0, 4096, mib >> 12, mib >> 12},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := attachTo(t, attach.Config{Mode: attach.ModeNBD, Source: &memory{image: image}, ReadAhead: c.readAhead})
			fd, err := unix.Open(a.Device(), unix.O_RDONLY|unix.O_CLOEXEC|c.flags, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			p, err := unix.Mmap(-1, 0, c.piece, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Munmap(p)
			before := requests(t, a.Device())
			for off := range int64(mib / c.piece) {
				// Behind what the mount has read.
				if n, err := unix.Pread(fd, p, 2*mib+off*int64(c.piece)); n != c.piece || err != nil {
					t.Fatalf("%d bytes, %v", n, err)
				}
			}
			got := requests(t, a.Device()) - before
			t.Logf("%d requests", got)
			if got < c.low || got > c.high {
				t.Errorf("%d requests of the kernel for a MiB, want %d to %d", got, c.low, c.high)
			}
		})
	}
}

// requests returns how many reads of a device are done.
func requests(t *testing.T, device string) (n int) {
	t.Helper()
	stat, err := os.ReadFile("/sys/block/" + filepath.Base(device) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(string(stat), &n); err != nil {
		t.Fatal(err)
	}
	return n
}
