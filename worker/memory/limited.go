package memory

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limited is a control group that may have a limit: one that sandboxes' groups are in.
type Limited struct {
	dir string
	v2  bool
}

// Above lists a group and those that it is in, by the folder of the first: in the
// hierarchy of the memory controller, or the only one. Each may have a limit, and may
// be given one later.
func Above(dir string) []Source {
	var out []Source
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err != nil {
			break // the mount point's parent
		}
		if _, err := os.Stat(filepath.Join(dir, "memory.usage_in_bytes")); err == nil {
			out = append(out, Limited{dir, false})
		} else if _, err := os.Stat(filepath.Join(dir, "memory.current")); err == nil {
			out = append(out, Limited{dir, true}) // the root has none, and no limit
		}
	}
	return out
}

// Name implements Source.
func (Limited) Name() string { return "group" }

// Pressure implements Source. Version 1 tells nothing.
func (l Limited) Pressure() string { return filepath.Join(l.dir, "memory.pressure") }

// noLimit is more than any machine has: version 1 says 2^63 less a page for none.
const noLimit = 1 << 50

// Read implements Source. A group that is gone has no limit.
func (l Limited) Read() (Reading, error) {
	names := []string{"memory.limit_in_bytes"}
	usage, inactive, active := "memory.usage_in_bytes", "total_inactive_file", "total_active_file"
	if l.v2 {
		// Above memory.high the kernel slows all in the group down.
		names = []string{"memory.max", "memory.high"}
		usage, inactive, active = "memory.current", "inactive_file", "active_file"
	}
	r := Reading{At: time.Now()}
	for _, name := range names {
		n, err := l.number(name)
		if err != nil {
			return Reading{}, ignoreGone(err)
		}
		if n < noLimit && (r.Total == 0 || n < r.Total) {
			r.Total = n
		}
	}
	if r.Total <= 0 {
		return Reading{}, nil
	}
	used, err := l.number(usage)
	if err != nil {
		return Reading{}, ignoreGone(err)
	}
	raw, err := readBounded(filepath.Join(l.dir, "memory.stat"))
	if err != nil {
		return Reading{}, ignoreGone(err)
	}
	// What the kernel gives up without swapping, counted as MemAvailable of the machine:
	// of page cache that is in use half may be needed.
	spare := stat(raw, inactive) + stat(raw, active)/2
	r.Available = max(0, min(r.Total, r.Total-used+spare))
	r.Stalled, r.NoPSI = stalled(l.Pressure())
	return r, nil
}

// number reads a file of one number; "max" is noLimit.
func (l Limited) number(name string) (int64, error) {
	return readNumber(filepath.Join(l.dir, name))
}

func readNumber(path string) (int64, error) {
	raw, err := readBounded(path)
	if err != nil {
		return 0, err
	}
	text := strings.TrimSpace(raw)
	if text == "max" {
		return noLimit, nil
	}
	return strconv.ParseInt(text, 10, 64)
}

// stat finds a number of memory.stat.
func stat(raw, name string) int64 {
	for line := range strings.Lines(raw) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && key == name {
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return 0
			}
			return max(0, n)
		}
	}
	return 0
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) { // removed before it was read, or while
		return nil
	}
	return err
}
