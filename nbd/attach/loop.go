package attach

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// loopBlockSize is EROFS's block size, and what direct reads are aligned to.
	loopBlockSize = 4096
	// minPause and maxPause are between two looks at a device that is let go of: the
	// kernel does it beside its last user's unmount, mostly within a millisecond.
	minPause = 500 * time.Microsecond
	maxPause = 10 * time.Millisecond
	// maxLoopTries bounds the race with other programs for a free device.
	maxLoopTries = 64
)

// loopPath returns the device file of loop device n.
func loopPath(n int) string { return "/dev/loop" + strconv.Itoa(n) }

// bindLoop binds a free loop device to the image file from off on. It goes free
// when its last user, the caller's descriptor fd included, is gone. Called in
// isolation.
func bindLoop(image string, off int64, readAheadKiB int) (n, fd int, err error) {
	img, err := unix.Open(image, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, -1, fmt.Errorf("open %s: %w", image, err)
	}
	defer unix.Close(img)
	ctl, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, -1, fmt.Errorf("open /dev/loop-control (modprobe loop): %w", err)
	}
	defer unix.Close(ctl)
	for range maxLoopTries {
		n, err = unix.IoctlRetInt(ctl, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return 0, -1, fmt.Errorf("find a free loop device: %w", err)
		}
		fd, err = configureLoop(n, img, off)
		if errors.Is(err, unix.EBUSY) {
			continue
		}
		if err == nil {
			err = tuneLoop(n, readAheadKiB)
		}
		if err != nil && fd >= 0 {
			unix.Close(fd)
		}
		return n, fd, err
	}
	return 0, -1, fmt.Errorf("no loop device could be had in %d tries: %w", maxLoopTries, err)
}

func configureLoop(n, img int, off int64) (int, error) {
	fd, err := unix.Open(loopPath(n), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open loop device: %w", err)
	}
	cfg := &unix.LoopConfig{Fd: uint32(img), Size: loopBlockSize}
	cfg.Info.Offset = uint64(off)
	cfg.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	if err := unix.IoctlLoopConfigure(fd, cfg); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind %s: %w", loopPath(n), err)
	}
	return fd, nil
}

// tuneLoop sets what LOOP_CONFIGURE cannot, and refuses a device that reads
// through the page cache: there one stalled read stalls the others. Called in
// isolation.
func tuneLoop(n int, readAheadKiB int) error {
	dio, err := readSysfs(loopPath(n), "loop/dio")
	if err != nil {
		return err
	}
	if dio != "1" {
		return fmt.Errorf("%s does not read directly from the fuse file (dio is %q)", loopPath(n), dio)
	}
	return writeSysfs(loopPath(n), "queue/read_ahead_kb", strconv.Itoa(readAheadKiB))
}

// loopBound reports whether loop device n is bound to the image file.
func loopBound(n int, image string) bool {
	file, err := readSysfs(loopPath(n), "loop/backing_file")
	return err == nil && file == image
}

// isImage reports whether a loop device's backing file, as the kernel names it, is
// a shim's: of a dead one, the file system it was on is gone from the tree, and
// its name is what is left of the path. A file that is there under that name is
// somebody's own.
func isImage(file string) bool {
	file = strings.TrimSpace(file)
	if file != "/"+imageName {
		return strings.HasSuffix(file, folder("/").image())
	}
	_, err := os.Lstat(file)
	return errors.Is(err, fs.ErrNotExist)
}

// boundLoops returns the loop devices bound to the image file.
func boundLoops(image string) ([]int, error) {
	dirs, err := filepath.Glob("/sys/block/loop*")
	if err != nil {
		return nil, err
	}
	var ns []int
	for _, dir := range dirs {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), "loop"))
		if err == nil && loopBound(n, image) {
			ns = append(ns, n)
		}
	}
	return ns, nil
}

// errDeviceUsed says that a device waits for its last user.
var errDeviceUsed = errors.New("is still used")

// freeLoops waits until no loop device is bound to the image file. Those still
// bound are told to let go, which they do when their last user is gone. Errors:
// errDeviceUsed.
func freeLoops(ctx context.Context, image string) error {
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		ns, err := boundLoops(image)
		if err != nil || len(ns) == 0 {
			return err
		}
		for _, n := range ns {
			if err := isolated(func() error { return clearLoop(n, image) }); err != nil {
				return err
			}
		}
		if err := sleep(ctx, pause); err != nil {
			return fmt.Errorf("%s %w: %w", loopPath(ns[0]), errDeviceUsed, err)
		}
	}
}

// clearLoop is called in isolation: closing the device may wait for its reads.
func clearLoop(n int, image string) error {
	fd, err := unix.Open(loopPath(n), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open loop device: %w", err)
	}
	defer unix.Close(fd)
	if !loopBound(n, image) { // went free and to another before it was opened
		return nil
	}
	if _, err := unix.IoctlRetInt(fd, unix.LOOP_CLR_FD); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("clear %s: %w", loopPath(n), err)
	}
	return nil
}

// sleep waits for d or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
