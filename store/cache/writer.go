package cache

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"quarry/store"
)

const (
	// writeSize is one write: beyond 1 MiB disks get no faster.
	writeSize = 1 << 20
	// gatherTime is what the writer waits for more work, so that it does not write
	// each chunk, and note each use of one, by a call of its own: a program that reads
	// an image from end to end makes 3000 of each a second. gatherBytes are enough.
	gatherTime  = 100 * time.Millisecond
	gatherBytes = 4 << 20
	// takeBytes is how much of the queue is taken at once.
	takeBytes = 8 << 20
	// maxReserve and reserveShare are what of the disk is left free for others:
	// 1/20 of it, and at most 1 GiB.
	maxReserve   = 1 << 30
	reserveShare = 20
	// maxBackoff is the longest pause, in units of the first.
	maxBackoff = 64
)

// writer is the one goroutine that changes files. Nothing of it is shared.
type writer struct {
	c       *Cache
	nextSeq uint64
	active  [classes]*active
	buf     []byte // aligned, writeSize
	file    []byte // what read returned last
	backoff time.Duration
	// undeleted are files that could not be deleted. While there are any, no
	// segment is begun: they are in nobody's account.
	undeleted []string
}

// active is a segment that is being filled.
type active struct {
	*segment
	index File
}

// run works until the cache is closed and the queue is empty.
func (w *writer) run() {
	defer close(w.c.done)
	for range w.c.wake {
		w.gather()
		for more := true; more; {
			items, marks, open := w.c.take()
			w.writeMarks(marks)
			w.writeAll(items)
			if !open {
				w.stop()
				return
			}
			more = len(items) > 0
		}
	}
}

// gather waits for more work, unless there is enough or somebody waits for it.
func (w *writer) gather() {
	t := time.NewTimer(gatherTime)
	defer t.Stop()
	select {
	case <-w.c.hurry:
	case <-t.C:
	}
}

// stop closes what is open.
func (w *writer) stop() {
	for _, a := range w.active {
		if a != nil {
			a.index.Close()
		}
	}
}

// writeAll writes items, those of one class after the other's; after a fault
// nothing is written for a while.
func (w *writer) writeAll(items []*item) {
	var of [classes][]*item
	for _, it := range items {
		of[it.class] = append(of[it.class], it)
	}
	for cl, items := range of {
		for len(items) > 0 {
			n, err := w.writeSome(class(cl), items)
			switch {
			case err == nil:
				w.resume()
			case !errors.Is(err, errPaused):
				w.pause(err)
				fallthrough
			default:
				n, err = len(items), fmt.Errorf("write chunk to the disk cache: %w: %w", store.ErrLocalDisk, err)
			}
			w.c.finish(items[:n], err)
			items = items[n:]
		}
	}
}

// writeSome writes the first n of items, as many as one segment takes.
func (w *writer) writeSome(cl class, items []*item) (n int, err error) {
	if time.Now().Before(w.c.pausedTill) { // only this goroutine changes it
		return 0, errPaused
	}
	a, err := w.segmentFor(cl, items[0])
	if err != nil {
		return 0, err
	}
	n, bytes := w.fitting(a, items)
	free, total, err := w.c.fs.Space()
	if err != nil {
		return 0, err
	}
	if keep := min(total/reserveShare, maxReserve); free-bytes < keep {
		return 0, fmt.Errorf("the disk has %d bytes free, of which %d stay so", free, keep)
	}
	return n, w.append(a, items[:n])
}

// fitting returns how many of items a has room for, and what they take.
func (w *writer) fitting(a *active, items []*item) (n int, bytes int64) {
	for ; n < len(items); n++ {
		space := align(int64(len(items[n].plain)))
		if a.dataEnd+bytes+space > w.c.sizes.segment {
			break
		}
		bytes += space
	}
	return n, bytes
}

// segmentFor returns a segment of a class in which it has room.
func (w *writer) segmentFor(cl class, it *item) (*active, error) {
	if w.fits(cl, it) {
		return w.active[cl], nil
	}
	w.seal(cl)
	if err := w.makeRoom(); err != nil {
		return nil, err
	}
	if !w.fits(cl, it) { // what an eviction kept may have begun one
		w.seal(cl)
		if err := w.begin(cl); err != nil {
			return nil, err
		}
	}
	return w.active[cl], nil
}

func (w *writer) fits(cl class, it *item) bool {
	a := w.active[cl]
	return a != nil && a.dataEnd+align(int64(len(it.plain))) <= w.c.sizes.segment
}

// seal ends the filling of a class's segment.
func (w *writer) seal(cl class) {
	if a := w.active[cl]; a != nil {
		a.index.Close()
		w.c.mu.Lock()
		a.filling = false
		w.c.mu.Unlock()
		w.active[cl] = nil
	}
}

// begin makes a new segment; there is room for it.
func (w *writer) begin(cl class) error {
	for len(w.undeleted) > 0 {
		name := w.undeleted[0]
		if err := w.c.fs.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		w.undeleted = w.undeleted[1:]
	}
	s := &segment{seq: w.nextSeq, age: w.nextSeq, class: cl, filling: true, indexEnd: headerSize}
	w.nextSeq++ // even if it fails: its remains must not be taken for another's
	data, err := w.c.fs.Open(dataName(s.seq), Create|Direct)
	if err != nil {
		w.remove(dataName(s.seq))
		return err
	}
	index, err := w.c.fs.Open(indexName(s.seq), Create)
	if err == nil {
		if _, err = index.WriteAt(appendHeader(nil, header{s.seq, cl}), 0); err != nil {
			index.Close()
		}
	}
	if err != nil {
		data.Close()
		w.remove(indexName(s.seq))
		w.remove(dataName(s.seq))
		return err
	}
	s.data = data
	w.active[cl] = &active{s, index}
	w.c.mu.Lock()
	w.c.t.add(s)
	w.c.mu.Unlock()
	return nil
}

// append writes items to a, which has room for them: first their bytes, then
// their entries, so that, unless the power fails, an entry never leads to
// anything else.
func (w *writer) append(a *active, items []*item) error {
	entries, end, err := w.writeData(a, items)
	if err == nil {
		var b []byte
		for i := range entries {
			b = appendEntry(b, a.seq, &entries[i])
		}
		if _, err = a.index.WriteAt(b, a.indexEnd); err == nil {
			w.publish(a, items, entries, end)
			return nil
		}
	}
	w.abandon(a, end, a.indexEnd+int64(len(entries))*entrySize)
	return err
}

// writeData writes the chunks, each from a page's beginning, and returns their
// entries and where they end.
func (w *writer) writeData(a *active, items []*item) (entries []entry, end int64, err error) {
	n, off, end := 0, a.dataEnd, a.dataEnd
	write := func() {
		if err == nil && n > 0 {
			_, err = a.data.WriteAt(w.buf[:n], off)
		}
		n, off = 0, off+int64(n)
	}
	for _, it := range items {
		e := entry{digest: it.digest, page: uint32(end / pageSize), length: uint32(len(it.plain))}
		if it.used.Load() {
			e.state = used
		}
		entries, end = append(entries, e), end+e.space()
		for p := it.plain; len(p) > 0; {
			k := copy(w.buf[n:], p)
			p, n = p[k:], n+k
			if full := int(align(int64(n))); len(p) == 0 { // zeros up to the page's end
				clear(w.buf[n:full])
				n = full
			}
			if n == len(w.buf) {
				write()
			}
		}
	}
	write()
	return entries, end, err
}

// publish makes what was written readable.
func (w *writer) publish(a *active, items []*item, entries []entry, end int64) {
	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	first := len(a.entries)
	a.entries = append(a.entries, entries...)
	a.dataEnd, a.indexEnd = end, a.indexEnd+int64(len(entries))*entrySize
	c.entries += len(entries)
	for i, it := range items {
		at := place{a.number, uint32(first + i)}
		e := c.t.at(at)
		if it.dropped {
			e.state = dropped
			c.mark(a.segment, at.i)
			continue
		}
		if it.used.Load() && e.state == unused {
			e.state = used
			c.mark(a.segment, at.i)
		}
		c.insert(at)
	}
}

// insert makes the entry at a place the one of its digest; mu is held.
func (c *Cache) insert(at place) {
	e := c.t.at(at)
	old := c.t.put(e.digest, at)
	c.count.chunks++
	c.count.bytes += int64(e.length)
	if old.seg != 0 {
		c.count.chunks--
		c.count.bytes -= int64(c.t.at(old).length)
	}
}

// abandon ends the filling of a segment in which a write failed. What may have
// been written behind its last entry is cut off, or counted where that fails
// too.
func (w *writer) abandon(a *active, dataEnd, indexEnd int64) {
	w.active[a.class] = nil
	if a.index.Truncate(a.indexEnd) == nil {
		indexEnd = a.indexEnd
	}
	if a.data.Truncate(a.dataEnd) == nil {
		dataEnd = a.dataEnd
	}
	a.index.Close()
	w.c.mu.Lock()
	a.dataEnd, a.indexEnd, a.filling = dataEnd, indexEnd, false
	empty := len(a.entries) == 0
	w.c.mu.Unlock()
	if empty {
		w.delete(a.segment)
	}
}

// writeMarks writes states in place. A failure costs little and is counted.
func (w *writer) writeMarks(marks []mark) {
	open := map[*segment]File{}
	for _, m := range marks {
		w.c.mu.RLock()
		there := w.c.t.segs[m.seg.number-1] == m.seg
		st := m.seg.entries[m.i].state
		w.c.mu.RUnlock()
		if !there {
			continue
		}
		f := open[m.seg]
		if f == nil {
			var err error
			if f, err = w.c.fs.Open(indexName(m.seg.seq), 0); err != nil {
				w.failed()
				continue
			}
			open[m.seg] = f
			defer f.Close()
		}
		if _, err := f.WriteAt([]byte{byte(st)}, headerSize+int64(m.i)*entrySize+44); err != nil {
			w.failed()
		}
	}
}

func (w *writer) failed() {
	w.c.mu.Lock()
	w.c.count.writeErrors++
	w.c.mu.Unlock()
}

// pause has nothing written for a while, each time twice as long.
func (w *writer) pause(err error) {
	w.failed()
	first := w.backoff == 0
	w.backoff = max(w.c.retry, min(2*w.backoff, maxBackoff*w.c.retry))
	w.c.mu.Lock()
	w.c.pausedTill = time.Now().Add(w.backoff)
	w.c.mu.Unlock()
	if first {
		w.c.log.Warn("disk cache paused", "err", err)
	}
}

// resume ends the pauses.
func (w *writer) resume() {
	if w.backoff == 0 {
		return
	}
	w.backoff = 0
	w.c.mu.Lock()
	w.c.pausedTill = time.Time{}
	w.c.mu.Unlock()
	w.c.log.Info("disk cache resumed")
}
