package cache

import (
	"cmp"
	"errors"
	"io"
	"slices"
	"strings"

	"quarry/store/chunk"
)

// found is a segment's files as List shows them.
type found struct {
	seq         uint64
	data, index int64 // sizes; -1: not there
}

// load reads the folder: the sidecars, never the data.
func (c *Cache) load() (*writer, error) {
	files, err := c.fs.List()
	if err != nil {
		return nil, err
	}
	w := &writer{c: c, nextSeq: 1, buf: alignedBuffer(writeSize)}
	segs, lists := w.sort(files)
	if err := w.loadPins(lists); err != nil {
		return nil, err
	}
	entries := 0
	for _, f := range segs {
		entries += int(max(f.index, 0) / entrySize)
	}
	c.t = newTable(min(entries, maxEntries))
	// The youngest are read first, so that a bound of numbers ends with the
	// oldest, which are deleted unread.
	bad := map[chunk.Digest]bool{}
	for _, f := range slices.Backward(segs) {
		w.loadSegment(f, bad)
	}
	w.shrink()
	w.goOn()
	w.file = nil
	c.count.evicted, c.count.evictedBytes = 0, 0
	return w, nil
}

// sort finds what the names say, and deletes what no name explains.
func (w *writer) sort(files []FileInfo) (segs []found, lists []FileInfo) {
	bySeq := map[uint64]*found{}
	for _, f := range files {
		name, ext, _ := strings.Cut(f.Name, ".")
		ext = "." + ext
		seq, ok := parseSeq(name)
		if ext == pinExt {
			lists = append(lists, f)
			continue
		}
		if !ok || ext != dataExt && ext != indexExt {
			continue // not ours
		}
		s := bySeq[seq]
		if s == nil {
			s = &found{seq, -1, -1}
			bySeq[seq] = s
		}
		if ext == dataExt {
			s.data = f.Size
		} else {
			s.index = f.Size
		}
		w.nextSeq = max(w.nextSeq, seq+1)
	}
	for _, s := range bySeq {
		segs = append(segs, *s)
	}
	slices.SortFunc(segs, func(a, b found) int { return cmp.Compare(a.seq, b.seq) })
	return segs, lists
}

// loadSegment takes a segment in, or deletes it. bad are the chunks of which the
// youngest copy was dropped.
func (w *writer) loadSegment(f found, bad map[chunk.Digest]bool) {
	c := w.c
	s := &segment{seq: f.seq, age: f.seq, dataEnd: align(f.data), indexEnd: f.index}
	if f.data < 0 || f.index < headerSize || f.index > maxIndex || f.data > maxSegment ||
		c.entries+int((f.index-headerSize)/entrySize) > maxEntries || len(c.t.segs) >= maxSegments {
		w.discard(f, "a file is missing or too large, or there are too many")
		return
	}
	b, err := w.read(indexName(f.seq), f.index)
	if err == nil {
		s.class, s.entries, err = decodeIndex(b, f.seq, f.data)
	}
	if err != nil {
		w.discard(f, err.Error())
		return
	}
	c.t.add(s)
	c.entries += len(s.entries)
	for i := len(s.entries) - 1; i >= 0; i-- { // the youngest first here too
		e := &s.entries[i]
		// A chunk in two segments was being moved from the older one, or came to
		// life again in a power cut: the younger copy counts, and when that was
		// found bad, none.
		if e.state == dropped {
			bad[e.digest] = true
		} else if !bad[e.digest] && c.t.putNew(place{s.number, uint32(i)}) {
			c.count.chunks++
			c.count.bytes += int64(e.length)
		}
	}
}

// discard deletes files that are of no use.
func (w *writer) discard(f found, why string) {
	w.c.log.Warn("disk cache segment deleted", "segment", f.seq, "reason", why)
	if f.index >= 0 {
		w.remove(indexName(f.seq))
	}
	if f.data >= 0 {
		w.remove(dataName(f.seq))
	}
}

// read returns the content of a file of the given size, which has a named
// maximum, until the next call; less than it, when it has become shorter.
func (w *writer) read(name string, size int64) ([]byte, error) {
	f, err := w.c.fs.Open(name, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if int64(cap(w.file)) < size {
		w.file = make([]byte, max(size, maxIndex))
	}
	b := w.file[:size]
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return b[:n], nil
}

// shrink deletes segments until those that stay leave the room that makeRoom
// needs: the speculative first, then those with the least pinned bytes, then the
// oldest. Nothing is kept of them, for opening reads no data: what is pinned and
// lost so, because the limit was lowered, is cached again when it is read.
func (w *writer) shrink() {
	c := w.c
	if !c.over(2) {
		return
	}
	segs := c.oldest()
	pinned := map[*segment]int64{}
	for _, s := range segs {
		pinned[s] = c.weigh(s).pinned
	}
	slices.SortStableFunc(segs, func(a, b *segment) int {
		return cmp.Or(cmp.Compare(pinned[a], pinned[b]), -cmp.Compare(a.class, b.class))
	})
	for len(segs) > 0 && c.over(2) {
		w.delete(segs[0])
		segs = segs[1:]
	}
}

// goOn has the youngest segment of each class filled on, where there is room in
// it. What a crash left behind its last entry is cut off; where that fails it
// stays as it is.
func (w *writer) goOn() {
	c := w.c
	tried := [classes]bool{}
	for _, s := range slices.Backward(c.oldest()) {
		if tried[s.class] {
			continue
		}
		tried[s.class] = true
		indexEnd := headerSize + int64(len(s.entries))*entrySize
		s.filling = true
		if s.dataEnd >= c.sizes.segment || c.over(2) {
			s.filling = false
			continue
		}
		index, err := c.fs.Open(indexName(s.seq), 0)
		if err == nil && s.indexEnd != indexEnd {
			err = index.Truncate(indexEnd)
		}
		if _, derr := s.file(c.fs); err != nil || derr != nil {
			if index != nil {
				index.Close()
			}
			s.filling = false
			continue
		}
		s.indexEnd = indexEnd
		w.active[s.class] = &active{s, index}
	}
}

// pinOf returns the image of a pin list's name.
func pinOf(name string) (chunk.Digest, bool) {
	hex, ok := strings.CutSuffix(name, pinExt)
	if !ok {
		return chunk.Digest{}, false
	}
	id, err := chunk.ParseHex(hex)
	return id, err == nil
}
