package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrEnded says that the process that wrote a State serves no longer.
var ErrEnded = errors.New("the shim has ended")

// Probe reads one block of the attached device past every cache, and so shows
// that the shim and the reader behind it answer. Errors: ErrEnded, ctx's, and
// the read's; the read itself may outlive them, on a thread that holds nothing.
func (s State) Probe(ctx context.Context) error {
	path := s.Device
	if s.Attach != ModeNBD {
		path = folder(s.dir).image() // which is not cached: a loop device would be one step more
	}
	result := make(chan error, 1)
	go func() { // ends with the read, which a sweep of the folder ends at the latest
		result <- isolated(func() error { return readBlock(path) })
	}()
	for {
		select {
		case err := <-result:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(watchInterval):
			if !s.Alive() {
				return ErrEnded
			}
		}
	}
}

// readBlock reads the first block of a device, or of a file that FUSE serves
// past the page cache.
func readBlock(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	// Direct reads go to memory that is aligned like the device's blocks.
	buf := make([]byte, 2*loopBlockSize)
	gap := -int(uintptr(unsafe.Pointer(unsafe.SliceData(buf)))) & (loopBlockSize - 1)
	n, err := unix.Pread(fd, buf[gap:gap+loopBlockSize], 0)
	if err != nil {
		return &os.PathError{Op: "read", Path: path, Err: err}
	}
	if n != loopBlockSize {
		return fmt.Errorf("read %s: %d bytes, want %d", path, n, loopBlockSize)
	}
	return nil
}

// OwnsMount reports whether the file system at path is one that a shim has
// attached, alive or dead: an EROFS on an NBD device with a shim's backend, on a
// loop device on a shim's file, or on such a file itself. Other people's files may
// have such names too.
func OwnsMount(path string) bool {
	var fsys unix.Statfs_t
	var file unix.Stat_t
	if unix.Statfs(path, &fsys) != nil || int64(fsys.Type) != unix.EROFS_SUPER_MAGIC_V1 || unix.Stat(path, &file) != nil {
		return false
	}
	base := fmt.Sprintf("/sys/dev/block/%d:%d/", unix.Major(file.Dev), unix.Minor(file.Dev))
	if b, err := os.ReadFile(base + "backend"); err == nil {
		return isBackend(string(b))
	}
	if b, err := os.ReadFile(base + "loop/backing_file"); err == nil {
		return isImage(string(b))
	}
	// Mounted from a file, it has no device, and only the mount table has the name.
	source, err := sourceOf(path)
	return err == nil && strings.HasSuffix(source, folder("/").image())
}
