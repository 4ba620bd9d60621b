package memory

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// maxImages bounds the files of an image that are looked at for one sandbox. A Python
// program with its libraries has some 200 open or mapped.
const maxImages = 256

// OpenImages opens files of a mounted image that processes of a sandbox have open or
// mapped, which its guest has used, at most 256. The processes are not trusted: nothing
// of another file system is opened, whatever they do meanwhile. When ctx ends they are
// some of them.
func OpenImages(ctx context.Context, pids []int, mount string) ([]*File, error) {
	var at unix.Stat_t
	if err := unix.Stat(mount, &at); err != nil {
		return nil, fmt.Errorf("files of the image at %s: %w", mount, err)
	}
	var out []*File
	seen := map[uint64]bool{}
	for _, pid := range pids {
		for _, list := range []string{"fd", "map_files"} {
			dir := fmt.Sprintf("/proc/%d/%s", pid, list)
			for _, name := range entries(dir) {
				if len(out) == maxImages || ctx.Err() != nil {
					return out, nil
				}
				if f := openOf(dir+"/"+name, at.Dev, seen); f != nil {
					out = append(out, f)
				}
			}
		}
	}
	return out, nil
}

// maxEntries bounds the descriptors and mappings of one process that are looked at.
const maxEntries = 16 << 10

// entries names what is in a folder of a process, which may have ended.
func entries(dir string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(maxEntries)
	return names
}

// openOf opens what a link names, if it is a file of a device that was not seen. The
// first descriptor opens nothing: it holds the file while it is looked at.
func openOf(link string, dev uint64, seen map[uint64]bool) *File {
	fd, err := unix.Open(link, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Dev != dev || st.Mode&unix.S_IFMT != unix.S_IFREG || seen[st.Ino] {
		return nil
	}
	seen[st.Ino] = true
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil
	}
	return OpenImage(f)
}
