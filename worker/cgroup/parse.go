package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"
	"strings"
)

// unlimited is the least value that version 1 shows for no limit: the greatest
// multiple of a page, of up to 64 KiB.
const unlimited = math.MaxInt64 &^ (64<<10 - 1)

// readPIDs reads cgroup.procs; one that is gone has none.
func readPIDs(path string) ([]int, error) {
	raw, err := readBounded(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []int
	for _, f := range strings.Fields(raw) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if pid > 0 { // 0 is a process of another namespace
			out = append(out, pid)
		}
	}
	return out, nil
}

// readInt reads a file of one number; "max" and what version 1 has for it are 0.
func readInt(path string) (int64, error) {
	raw, err := readBounded(path)
	if err != nil {
		return 0, err
	}
	n, err := parseInt(strings.TrimSpace(raw))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

func parseInt(s string) (int64, error) {
	if s == "max" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, err
	}
	if n >= unlimited {
		return 0, nil
	}
	return int64(n), nil
}

// readKey reads one number of a file of "key number" lines; a key that is not there
// is 0: kernels have more of them with time.
func readKey(path, key string) (int64, error) {
	raw, err := readBounded(path)
	if err != nil {
		return 0, err
	}
	n, err := parseKey(raw, key)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

func parseKey(raw, key string) (int64, error) {
	for line := range strings.Lines(raw) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if ok && name == key {
			return parseInt(strings.TrimSpace(value))
		}
	}
	return 0, nil
}

// optional is for a file that not every kernel has, in a group that is there.
func optional(n int64, err error) (int64, error) {
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return n, err
}
