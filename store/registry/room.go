package registry

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// freeBytes returns how much of the disk that a folder is on is free for this process.
func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// block is what a file system gives to files at once, mostly.
const block = 4 << 10

// MakeRoom removes uploads under way from their folder, those first that were written to
// longest ago, until so many bytes of its disk are free; none when all of them would not
// do. It is for a process that cannot start without, before Open. It returns how many it
// removed, and their bytes.
func MakeRoom(dir string, want int64) (removed int, size int64, err error) {
	free, err := freeBytes(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil || free >= want {
		return 0, 0, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, 0, fmt.Errorf("list uploads: %w", err)
	}
	type file struct {
		path string
		size int64
		at   time.Time
	}
	var files []file
	all := free
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			files = append(files, file{filepath.Join(dir, e.Name()), info.Size(), info.ModTime()})
			all += (info.Size() + block - 1) / block * block
		}
	}
	if all < want {
		return 0, 0, nil
	}
	slices.SortFunc(files, func(a, b file) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.path, b.path)) })
	for _, f := range files {
		if err := os.Remove(f.path); err != nil {
			return removed, size, fmt.Errorf("remove upload: %w", err)
		}
		removed++
		size += f.size
		if free, err = freeBytes(dir); err != nil || free >= want {
			return removed, size, err
		}
	}
	return removed, size, nil
}
