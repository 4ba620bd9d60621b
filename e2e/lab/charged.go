package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Charged counts the pages of all files below a folder that are in the page cache, by
// the inode of the control group's folder to whose memory the kernel charges them. It
// reads nothing of the content, and needs root.
func Charged(root string) (map[uint64]int, error) {
	frames, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, err
	}
	defer frames.Close()
	groups, err := os.Open("/proc/kpagecgroup")
	if err != nil {
		return nil, err
	}
	defer groups.Close()
	pages := map[uint64]int{}
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		return mapped(path, func(m []byte, resident []bool) error { return countCharged(m, resident, frames, groups, pages) })
	})
	return pages, err
}

// ofPage is the size of an entry of pagemap and of kpagecgroup.
const ofPage = 8

// countCharged touches the pages of a mapping that are in memory, which reads nothing,
// and looks up whose each is.
func countCharged(m []byte, resident []bool, frames, groups *os.File, pages map[uint64]int) error {
	page := os.Getpagesize()
	if err := unix.Madvise(m, unix.MADV_RANDOM); err != nil { // else a touch reads ahead
		return err
	}
	var sum byte
	for i, in := range resident {
		if !in {
			continue
		}
		sum += m[i*page]
		var entry [ofPage]byte
		at := int64(uintptr(unsafe.Pointer(&m[i*page]))) / int64(page)
		if _, err := frames.ReadAt(entry[:], at*ofPage); err != nil {
			return err
		}
		const present, frame = 1 << 63, 1<<55 - 1
		e := binary.NativeEndian.Uint64(entry[:])
		if e&present == 0 {
			continue // taken away this moment
		}
		if e&frame == 0 {
			return errors.New("the kernel does not tell frames of pages: CAP_SYS_ADMIN is missing")
		}
		if _, err := groups.ReadAt(entry[:], int64(e&frame)*ofPage); err != nil {
			return fmt.Errorf("group of frame %d: %w", e&frame, err)
		}
		pages[binary.NativeEndian.Uint64(entry[:])]++
	}
	runtime.KeepAlive(sum)
	return nil
}
