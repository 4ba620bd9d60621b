package attach

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel's NBD client, as include/uapi/linux/nbd-netlink.h has it.
const (
	nbdFamily = "nbd"

	nbdConnect    = 1
	nbdDisconnect = 2

	nbdAttrIndex           = 1
	nbdAttrSize            = 2
	nbdAttrBlockSize       = 3
	nbdAttrTimeout         = 4
	nbdAttrServerFlags     = 5
	nbdAttrSockets         = 7
	nbdAttrDeadConnTimeout = 8
	nbdAttrBackend         = 10
	nbdSockItem            = 1
	nbdSockFD              = 1

	// nbdFlags say HAS_FLAGS and READ_ONLY: no FLUSH, no TRIM, one connection.
	nbdFlags = 1<<0 | 1<<1
	// nbdGrace is how much later than a read's deadline the kernel gives the device
	// up: 300 s with DefaultDeadline, and never sooner than that.
	nbdGrace   = 30 * time.Second
	nbdTimeout = DefaultDeadline + nbdGrace
	// nbdSectorsKiB is the longest request, in KiB; docs/decisions/attach-nbd.md
	// has the measurement.
	nbdSectorsKiB = 256
)

// nbdPath returns the device file of NBD device n.
func nbdPath(n uint32) string { return "/dev/nbd" + strconv.FormatUint(uint64(n), 10) }

// A backend is what the kernel is told that a device belongs to, and shows in
// the device's attribute of that name: the folder by its numbers, which no other
// folder has, in whatever mount namespace; the process; and the folder's path,
// for people.
type backend struct{ folder, rest string }

// maxBackendPath bounds the path in a backend: some kernels print the whole into
// one page without looking.
const maxBackendPath = 1024

// backendWord begins every backend of a shim's.
const backendWord = "quarry "

// isBackend reports whether a device's attribute is a shim's.
func isBackend(s string) bool { return strings.HasPrefix(s, backendWord) }

func (b backend) String() string { return b.folder + b.rest }

func backendOf(dir folder) (backend, error) {
	var st unix.Stat_t
	if err := unix.Stat(string(dir), &st); err != nil {
		return backend{}, &os.PathError{Op: "stat", Path: string(dir), Err: err}
	}
	start, err := ProcessStart(os.Getpid())
	if err != nil {
		return backend{}, err
	}
	path := string(dir)[:min(len(dir), maxBackendPath)]
	return backend{
		folder: fmt.Sprintf(backendWord+"%d:%d:%d ", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino),
		rest:   fmt.Sprintf("%d.%d %s", os.Getpid(), start, path),
	}, nil
}

// nbdBackend returns the backend of a device, "" when it has none.
func nbdBackend(device string) string {
	s, err := readSysfs(device, "backend")
	if err != nil {
		return ""
	}
	return s
}

// boundNBDs returns the devices that belong to a folder, by the process that is
// in the backend or, with anyProcess, by any.
func boundNBDs(b backend, anyProcess bool) ([]uint32, error) {
	dirs, err := filepath.Glob("/sys/block/nbd*")
	if err != nil {
		return nil, err
	}
	var ns []uint32
	for _, dir := range dirs {
		n, err := strconv.ParseUint(strings.TrimPrefix(filepath.Base(dir), "nbd"), 10, 32)
		if err != nil {
			continue
		}
		got := nbdBackend(dir)
		if got == b.String() || anyProcess && strings.HasPrefix(got, b.folder) {
			ns = append(ns, uint32(n))
		}
	}
	return ns, nil
}

// openNBD finds the kernel's NBD client, and loads its module where the kernel
// can do that. Errors: ErrNoNBD.
func openNBD() (*genl, error) {
	g, err := openGenl(nbdFamily)
	if errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("%w: the kernel does not know it: modprobe nbd, or attach through FUSE (--attach fuse)", ErrNoNBD)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoNBD, err)
	}
	return g, nil
}

// connectNBD gives the kernel one end of a socket pair as the connection of a
// free device, which it picks. The descriptor is looked up among those of the
// calling thread.
func (g *genl) connectNBD(ctx context.Context, end *os.File, size int64, deadline time.Duration, b backend) (uint32, error) {
	unlock, err := lockNBD(ctx)
	if err != nil {
		return 0, err
	}
	defer unlock()
	answer, err := g.call(nbdConnect, slices.Concat(
		attrUint64(nbdAttrSize, uint64(size)),
		attrUint64(nbdAttrBlockSize, loopBlockSize),
		attrUint64(nbdAttrServerFlags, nbdFlags),
		attrUint64(nbdAttrTimeout, uint64(max(nbdTimeout, deadline+nbdGrace)/time.Second)),
		// A connection that is lost is not waited for: the only one to make it
		// again is dead.
		attrUint64(nbdAttrDeadConnTimeout, 0),
		attrString(nbdAttrBackend, b.String()),
		attr(nbdAttrSockets|unix.NLA_F_NESTED, attr(nbdSockItem|unix.NLA_F_NESTED, attrUint32(nbdSockFD, uint32(end.Fd())))),
	))
	if errors.Is(err, unix.ENOSPC) {
		// The kernel makes devices beyond nbds_max, until their numbers run out.
		return 0, fmt.Errorf("%w: every device that the kernel can have is taken: load the module with max_part=0, or attach through FUSE (--attach fuse)", ErrNoNBD)
	}
	if err != nil {
		return 0, fmt.Errorf("%w: connect a device: %w: attach through FUSE (--attach fuse)", ErrNoNBD, err)
	}
	index, err := attrOf(answer, nbdAttrIndex, 4)
	if err != nil {
		return 0, fmt.Errorf("connect a nbd device: %w", err)
	}
	return binary.NativeEndian.Uint32(index), nil
}

// disconnectNBDs makes the kernel let go of the folder's devices: what is under
// way on them ends with EIO, and so does every later read. Each goes free with
// its last user. It does not wait for the kernel beyond ctx.
func disconnectNBDs(ctx context.Context, b backend, anyProcess bool) error {
	ns, err := boundNBDs(b, anyProcess)
	if err != nil || len(ns) == 0 {
		return err
	}
	unlock, err := lockNBD(ctx)
	if err != nil {
		return err
	}
	// Not waited for beyond ctx: the kernel may wait for another command that
	// hangs.
	done := make(chan error, 1)
	go func() { // ends when the kernel has done it
		defer unlock()
		// Again, now that no device can go free and to another.
		ns, err := boundNBDs(b, anyProcess)
		if err == nil {
			err = isolated(func() error { return disconnectAll(ns) })
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("disconnect %s: %w", nbdPath(ns[0]), ctx.Err())
	}
}

// disconnectAll is called in isolation.
func disconnectAll(ns []uint32) error {
	g, err := openGenl(nbdFamily)
	if err != nil {
		return err
	}
	defer g.close()
	var errs []error
	for _, n := range ns {
		if _, err := g.call(nbdDisconnect, attrUint32(nbdAttrIndex, n)); err != nil {
			errs = append(errs, fmt.Errorf("disconnect %s: %w", nbdPath(n), err))
		}
	}
	return errors.Join(errs...)
}

// lockNBD keeps connecting and disconnecting apart among the processes that see
// the same /sys, which is one for each network namespace: a device is told from
// others by its backend and let go by its number, and it must not become another's
// in between.
func lockNBD(ctx context.Context) (unlock func(), err error) {
	f, err := os.Open("/sys/module/nbd")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoNBD, err)
	}
	locked := make(chan error, 1)
	// Ends when those before it have let go, each within milliseconds. A lock that
	// is only tried for would be had by the luckiest.
	go func() { locked <- unix.Flock(int(f.Fd()), unix.LOCK_EX) }()
	select {
	case err := <-locked:
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("lock /sys/module/nbd: %w", err)
		}
		return func() { f.Close() }, nil
	case <-ctx.Done():
		go func() { // ends with the one above
			<-locked
			f.Close()
		}()
		return nil, fmt.Errorf("lock /sys/module/nbd: %w", ctx.Err())
	}
}

// awaitNBDs waits until the folder's disconnected devices are free. Errors:
// errDeviceUsed.
func awaitNBDs(ctx context.Context, b backend, anyProcess bool) error {
	for {
		ns, err := boundNBDs(b, anyProcess)
		if err != nil || len(ns) == 0 {
			return err
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("%s %w: %w", nbdPath(ns[0]), errDeviceUsed, err)
		}
	}
}

// tuneNBD checks that the device is what was asked for and sets what netlink
// cannot. The read-ahead comes last: Linux 6.12 computes it anew whenever
// another limit is set.
func tuneNBD(device string, size int64, readAheadKiB int) error {
	for _, a := range []struct {
		name, value string
		set         bool
	}{
		{"size", strconv.FormatInt(size/512, 10), false},
		{"ro", "1", false},
		{"queue/logical_block_size", strconv.Itoa(loopBlockSize), false},
		{"queue/max_sectors_kb", strconv.Itoa(nbdSectorsKiB), true},
		{"queue/read_ahead_kb", strconv.Itoa(readAheadKiB), true},
	} {
		if a.set {
			if err := writeSysfs(device, a.name, a.value); err != nil {
				return err
			}
		}
		got, err := readSysfs(device, a.name)
		if err != nil {
			return err
		}
		if got != a.value {
			return fmt.Errorf("%s has %s %s, want %s", device, a.name, got, a.value)
		}
	}
	return nil
}
