package blockdev

import (
	"sort"
	"sync"

	"quarry/rafs"
)

const (
	// minRun is how many bytes must have been read in the order of the chunk table
	// before more is fetched ahead than a group. Chosen with DefaultGroupBytes.
	minRun = 2 << 20
	// minInOrder is how many chunks, read one after the other without a gap, show that
	// too: as many as minRun has of the largest, while small ones are a round trip each.
	// None of the recorded commands reads so many before minRun.
	minInOrder = 8
	// sureWindow is how far ahead a sequential read is fetched, whatever else is in
	// memory: at 1 Gbit/s and 5 ms latency 0.6 MB of stored bytes are on their way, 1.5 MB
	// of plain ones; half of the window is asked for while the other half is read.
	sureWindow = 8 << 20
	// maxWindow is how far it is fetched into room of the memory that nobody uses. Large
	// files are read several times as fast as the same bytes in small ones, and faster
	// than they come: what came while small files were read makes up for that.
	maxWindow = 24 << 20
	// maxStep is what one request brings of a window beyond sureWindow: the next one is
	// on its way, and another processor decodes it, while this one comes.
	maxStep = 4 << 20
	// maxRuns is how many sequential reads are followed at the same time: of
	// nbdcopy's 4 connections, or of tar beside a program.
	maxRuns = 8
	// runGap is how many bytes a read may be ahead of its run, and runBack how many
	// behind: reads of one program overtake each other on their way here, by one
	// read-ahead of 128 KiB or so, and a file that is not read does not end a run.
	runGap  = 256 << 10
	runBack = 1 << 20
)

// sequences follows the reads of a device that go through the chunk table in
// order, across files.
type sequences struct {
	// spare is what the memory has room for beside what comes and what nobody has read
	// yet.
	spare func() int64

	mu   sync.Mutex // guards what follows
	runs []run      // the one used last in front
}

// run is one sequential read.
type run struct {
	first   int   // chunk that the last read began with
	next    int   // chunk behind the last one read
	bytes   int64 // read so far
	gapless int   // chunks up to next that were all read
	ahead   int   // chunk behind the last one fetched ahead
	missed  bool  // a read of it had to fetch: what others brought needs no help
}

// note says that the chunks from first to last are read.
func (s *sequences) note(chunks []rafs.Chunk, first, last int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.follow(chunks, first)
	r.first = min(first, r.next)
	if first > r.next {
		r.gapless = 0
	}
	if last >= r.next {
		r.gapless += last + 1 - max(first, r.next)
		r.bytes += span(chunks, max(first, r.next), last+1)
		r.next = last + 1
	}
}

// due returns the chunks [from, to) that are to be fetched ahead now that chunk i,
// which was noted, is read; missed says that it has to be fetched.
func (s *sequences) due(chunks []rafs.Chunk, i int, missed bool) (from, to int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.runs {
		if r := &s.runs[k]; i >= r.first && i < r.next {
			r.missed = r.missed || missed
			return r.window(chunks, s.spare)
		}
	}
	return 0, 0
}

// window returns what to fetch ahead now: as much as was read so far, minRun to
// sureWindow, when half of what was fetched ahead before has been read; and steps
// beyond that, up to maxWindow, as far as there is room to spare.
func (r *run) window(chunks []rafs.Chunk, spare func() int64) (from, to int) {
	if !r.missed || r.bytes < minRun && r.gapless < minInOrder {
		return 0, 0
	}
	r.ahead = max(r.ahead, r.next)
	out := span(chunks, r.next, r.ahead)
	size, step := min(max(r.bytes, minRun), sureWindow), int64(sureWindow)
	if r.bytes > sureWindow && out > sureWindow-maxStep {
		size, step = min(r.bytes, maxWindow, out+spare()), maxStep
	}
	if out > size-min(size/2, maxStep) {
		return 0, 0
	}
	from = r.ahead
	r.ahead = max(from, min(behind(chunks, r.next, size), behind(chunks, from, step)))
	return from, r.ahead
}

// follow returns the run that a read of chunk first belongs to, the longest if
// there are several, now in front, or a new one in place of the one used longest
// ago. Called with mu held.
func (s *sequences) follow(chunks []rafs.Chunk, first int) *run {
	best := -1
	for k, r := range s.runs {
		behind, ahead := span(chunks, first, r.next), span(chunks, r.next, first)
		if behind <= runBack && ahead <= runGap && (best < 0 || r.bytes > s.runs[best].bytes) {
			best = k
		}
	}
	if best >= 0 {
		r := s.runs[best]
		copy(s.runs[1:best+1], s.runs[:best])
		s.runs[0] = r
		return &s.runs[0]
	}
	if len(s.runs) < maxRuns {
		s.runs = append(s.runs, run{})
	}
	copy(s.runs[1:], s.runs)
	s.runs[0] = run{first: first, next: first}
	return &s.runs[0]
}

// span returns how many bytes the chunks [from, to) take in the device.
func span(chunks []rafs.Chunk, from, to int) int64 {
	return devOff(chunks, to) - devOff(chunks, from)
}

func devOff(chunks []rafs.Chunk, i int) int64 {
	if i < len(chunks) {
		return chunks[i].DevOff
	}
	last := chunks[len(chunks)-1]
	return last.DevOff + blocksOf(int64(last.Len))*blockSize
}

// behind returns the chunk behind those that take n bytes from chunk i on.
func behind(chunks []rafs.Chunk, i int, n int64) int {
	end := devOff(chunks, i) + n
	return sort.Search(len(chunks), func(k int) bool { return devOff(chunks, k) >= end })
}
