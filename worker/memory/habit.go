package memory

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"sync"
)

// spot is 64 KiB of the addresses of a process, which is what the kernel maps of a file
// at once when one page of it is read.
type spot struct {
	pid   int
	block int64 // the address in units of grain
}

// place is the first page of a spot that was mapped: its address, and where in the
// memory file it is.
type place struct{ addr, off int64 }

const (
	// lookAgain is how often a spot that is always used is left to the guest, so that it
	// is seen whether it still is: one of 8 times.
	lookAgain = 8
	// maxSpots bounds what is mapped for a sandbox: 1 GiB of its memory.
	maxSpots = 1 << 14
)

// habit is what of its memory a sandbox uses again and again: that is brought back first,
// and not only brought back but mapped, too, before the guest runs, which takes faults
// otherwise: one for each page or, on newer kernels, for each 64 KiB.
//
// A page that was mapped for it looks like one that it touched. So only a part that was
// touched in two waits one after the other, each time after it had been away, is mapped
// from then on, and each eighth time it is left out: if it is not mapped then when it is
// looked next, the guest uses it no more.
//
// All sets are of parts of the memory file.
type habit struct {
	round int64
	once  set // touched when it was looked last, after it had been away
	hot   set

	mu   sync.Mutex
	away set // was away at its last wake, guarded by mu
}

// bringsBack notes what was away when the sandbox woke: if that is mapped the next time,
// the guest has touched it.
func (h *habit) bringsBack(ranges []Range) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range ranges {
		for i := r.Off / grain; i*grain < r.Off+r.Len && i < maxUsed/grain; i++ {
			h.away.add(i)
		}
	}
}

// look learns from what is mapped now, before it is taken, and returns what to map for
// the sandbox when it wakes, in the order of the file.
func (h *habit) look(now map[spot]place) []spotAt {
	h.mu.Lock()
	away := h.away
	h.away = nil
	h.mu.Unlock()
	h.round++
	var once, hot set
	var out []spotAt
	for s, p := range now {
		i := p.off / grain
		touched := away.has(i)
		if touched {
			once.add(i)
		}
		if !(touched && h.once.has(i)) && !h.hot.has(i) {
			continue
		}
		hot.add(i)
		if (i+h.round)%lookAgain != 0 {
			out = append(out, spotAt{s, p})
		}
	}
	h.once, h.hot = once, hot
	slices.SortFunc(out, func(a, b spotAt) int { return cmp.Compare(a.off, b.off) })
	return out[:min(len(out), maxSpots)]
}

// first orders ranges so that what is always used comes back first.
func (h *habit) first(ranges []Range) []Range {
	var always, others []Range
	for _, r := range ranges {
		for r.Len > 0 {
			n := min(r.Len, grain-r.Off%grain)
			if h.hot.has(r.Off / grain) {
				always = add(always, Range{r.Off, n})
			} else {
				others = add(others, Range{r.Off, n})
			}
			r = Range{r.Off + n, r.Len - n}
		}
	}
	return append(always, others...)
}

// set is a set of parts of a file, each of grain bytes, by number. The zero value is
// empty.
type set []uint64

func (s *set) add(i int64) {
	for int64(len(*s)) <= i/64 {
		*s = append(*s, 0)
	}
	(*s)[i/64] |= 1 << (i % 64)
}

func (s set) has(i int64) bool { return i/64 < int64(len(s)) && s[i/64]&(1<<(i%64)) != 0 }

type spotAt struct {
	spot
	place
}

// mapper maps spots into the processes that had them.
type mapper struct {
	spots []spotAt
	mem   map[int]*os.File // of each process
}

// newMapper opens the processes of the spots, which have to be among those that the
// sandbox has now: a number may be another process's meanwhile.
func newMapper(spots []spotAt, processes func() ([]int, error)) *mapper {
	m := &mapper{spots: spots, mem: map[int]*os.File{}}
	for _, s := range spots {
		if _, known := m.mem[s.pid]; !known {
			m.mem[s.pid], _ = os.Open(fmt.Sprintf("/proc/%d/mem", s.pid)) // nil: it has ended
		}
	}
	pids, err := processes()
	for pid, f := range m.mem {
		if f == nil || err != nil || !slices.Contains(pids, pid) {
			f.Close()
			delete(m.mem, pid)
		}
	}
	return m
}

// give maps the spots that lie in a range of the file, whose pages are in memory, and
// returns how many it mapped. To read a byte of a process's memory as another process
// maps the page into the first, and those of its 64 KiB that are in memory, for writing
// too, as nobody keeps track of what is written to such a file.
func (m *mapper) give(r Range) (n int64) {
	if m == nil {
		return 0
	}
	at, _ := slices.BinarySearchFunc(m.spots, r.Off, func(s spotAt, off int64) int { return cmp.Compare(s.off, off) })
	var b [1]byte
	for ; at < len(m.spots) && m.spots[at].off < r.Off+r.Len; at++ {
		s := m.spots[at]
		f := m.mem[s.pid]
		if f == nil {
			continue
		}
		if got, _ := f.ReadAt(b[:], s.addr); got == 1 { // else it was unmapped meanwhile
			n++
		}
	}
	return n
}

func (m *mapper) close() {
	if m == nil {
		return
	}
	for _, f := range m.mem {
		f.Close()
	}
}
