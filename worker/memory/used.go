package memory

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// maxUsed bounds the file whose use is looked at: a bit for each 64 KiB of 4 TiB is
	// 8 MiB.
	maxUsed = 4 << 40
	// maxMaps bounds the list of a process's mappings. The kernel has 65 530 at most,
	// unless it is told otherwise.
	maxMaps = 16 << 20
	// maxApart bounds what each process is compared with, and whose memory is mapped.
	maxApart = 64
	// present is the bit of a page's entry in pagemap that says that it is mapped.
	present = 1 << 63
)

// used lists the parts of the file that processes have mapped, to 64 KiB, and where they
// have them. A page that went to swap is mapped no more, and one that was brought back is
// mapped when it is touched, or by a mapper: so it is what was touched since it was taken
// last, or ever. Processes that have ended are passed over.
func (f *File) used(ctx context.Context, pids []int) ([]Range, map[spot]place, error) {
	var st unix.Stat_t
	if err := f.control(func(fd int) error { return unix.Fstat(fd, &st) }); err != nil {
		return nil, nil, err
	}
	if st.Size > maxUsed {
		return nil, nil, fmt.Errorf("what is used of a file of %d bytes is not looked for", st.Size)
	}
	u := &used{ctx: ctx, size: st.Size, buf: make([]byte, grain), spots: map[spot]place{}}
	u.file = fmt.Sprintf("%02x:%02x %d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for i, pid := range apart(pids) {
		u.spotless = i >= maxApart
		if err := u.process(pid); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
			return nil, nil, fmt.Errorf("what process %d uses of a guest's memory: %w", pid, err)
		}
	}
	var out []Range
	for i := range (st.Size + grain - 1) / grain {
		if u.parts.has(i) {
			out = add(out, Range{i * grain, min(grain, st.Size-i*grain)})
		}
	}
	return out, u.spots, ctx.Err()
}

// apart leaves out processes that have their memory together with one before them, as
// some of a Sentry's have for each guest process; at most maxApart are told apart.
func apart(pids []int) (out []int) {
	for _, pid := range pids {
		if len(out) >= maxApart || !slices.ContainsFunc(out, func(other int) bool { return sameMemory(pid, other) }) {
			out = append(out, pid)
		}
	}
	return out
}

// sameMemory reports whether two processes have one address space; false where the
// kernel does not tell.
func sameMemory(a, b int) bool {
	const kcmpVM = 1
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), kcmpVM, 0, 0, 0)
	return errno == 0 && order == 0
}

type used struct {
	ctx   context.Context
	file  string // device and number, as maps has them
	size  int64
	parts set
	buf   []byte
	spots map[spot]place

	spotless bool // no more spots are noted
}

func (u *used) process(pid int) error {
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return err
	}
	defer maps.Close()
	pagemap, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return err
	}
	defer pagemap.Close()
	lines := bufio.NewScanner(io.LimitReader(maps, maxMaps))
	for lines.Scan() && u.ctx.Err() == nil {
		start, end, off, ok := parseMapping(lines.Text(), u.file)
		if !ok || off >= u.size {
			continue
		}
		if err := u.mapping(pid, pagemap, start, min(end, start+u.size-off), off); err != nil {
			return err
		}
	}
	return lines.Err()
}

// parseMapping reads a line of maps, and reports whether it is of the file.
func parseMapping(line, file string) (start, end, off int64, ok bool) {
	f := strings.Fields(line)
	if len(f) < 5 || f[3]+" "+f[4] != file {
		return 0, 0, 0, false
	}
	from, to, _ := strings.Cut(f[0], "-")
	for _, v := range []struct {
		text string
		into *int64
	}{{from, &start}, {to, &end}, {f[2], &off}} {
		n, err := strconv.ParseInt(v.text, 16, 64)
		if err != nil || n < 0 {
			return 0, 0, 0, false
		}
		*v.into = n
	}
	return start, end, off, start < end
}

// mapping notes which pages of one are there.
func (u *used) mapping(pid int, pagemap *os.File, start, end, off int64) error {
	page := int64(os.Getpagesize())
	last := int64(-1) // block of addresses that was noted
	for at := start; at < end && u.ctx.Err() == nil; {
		n := min((end-at+page-1)/page*8, int64(len(u.buf)))
		got, err := pagemap.ReadAt(u.buf[:n], at/page*8)
		for i := int64(0); i+8 <= int64(got); i += 8 {
			if binary.NativeEndian.Uint64(u.buf[i:])&present == 0 {
				continue
			}
			addr := at + i/8*page
			o := off + addr - start
			if o >= u.size {
				continue
			}
			u.parts.add(o / grain)
			if block := addr / grain; block != last && !u.spotless && len(u.spots) < maxRanges {
				last = block
				if _, known := u.spots[spot{pid, block}]; !known {
					u.spots[spot{pid, block}] = place{addr, o}
				}
			}
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if got < 8 {
			return nil // it was unmapped meanwhile
		}
		at += int64(got) / 8 * page
	}
	return nil
}
