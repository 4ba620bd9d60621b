// Package cache keeps plain chunks on a worker's disk, bounded, for all images
// and across restarts; and for store/bucket/ranges, under names of its own, blocks of
// packs on a store node's. It is what makes the second run of an image independent
// of the store; nothing depends on it: it trusts no byte of its own folder to
// survive a crash, syncs nothing but pins, and a disk that fails costs speed
// alone.
package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"quarry/internal/proc"
	"quarry/store"
	"quarry/store/chunk"
)

const (
	// MinLimit is 16 of the smallest segments: what is evicted at once, is being
	// filled, and must stay free for an eviction, is then less than half of it.
	MinLimit = 16 * minSegment
	// MaxLimit is 16384 segments of 64 MiB; each may be an open file.
	MaxLimit = maxSegments * maxSegment

	// minSegment holds 8 chunks of chunk.DefaultSize; see Cache.maxChunk.
	minSegment = 2 << 20
	// maxSegments bounds the files of a folder: two for each.
	maxSegments = 1 << 14
	// maxEntries bounds the memory: 44 bytes of entry and 11 to 21 of table for
	// each chunk make 112 to 130 MiB.
	maxEntries = 2 << 20

	// DefaultRetry is the first pause after a write failed; it doubles up to 64
	// times of that, about a minute.
	DefaultRetry = time.Second
)

// Config describes a cache.
type Config struct {
	// Dir is the cache's own folder, made when missing. One process at a time
	// uses it.
	Dir string
	// Limit bounds the bytes of all files in Dir, between MinLimit and MaxLimit.
	Limit int64
	// Retry is how long nothing is written after a write has failed, at first; 0
	// means DefaultRetry.
	Retry time.Duration
	// Buffered says to read and write through the kernel's page cache, which is
	// told to forget at once, even where the file system has direct I/O.
	Buffered bool
	// KeepPages says to read and write through the kernel's page cache and to let it
	// keep what passes: where nothing above the cache holds the same bytes in memory.
	KeepPages bool
	// OtherNames says that a Digest is a name and no digest of what is kept under it:
	// an eviction cannot verify what it keeps. Who reads it does, as ever.
	OtherNames bool
	// Log gets a line when writing is paused and resumed. nil discards.
	Log *slog.Logger
	// FS replaces the operating system's files; Dir is then only a name, and is
	// not locked.
	FS FS
}

// Chunk names a chunk and says how long it is.
type Chunk struct {
	Digest chunk.Digest
	Len    uint32
}

// Cache is an open cache. Safe for concurrent use.
type Cache struct {
	fs      FS
	log     *slog.Logger
	lock    *proc.Lock // nil with Config.FS
	retry   time.Duration
	sizes   sizes
	others  bool          // Config.OtherNames
	buffers sync.Pool     // *[]byte of bounceSize, aligned
	wake    chan struct{} // 1: there is work for the writer
	hurry   chan struct{} // 1: it is not to wait for more
	done    chan struct{} // closed when the writer has ended

	pinMu sync.Mutex // one list is written at a time; taken before mu

	mu          sync.RWMutex // guards what follows, and the segments' entries and sizes
	t           *table
	entries     int                    // of all segments, dead ones too
	pending     map[chunk.Digest]*item // offered, not yet written
	queue       []*item                // those the writer has not taken
	newBytes    int64                  // of queue
	queueBytes  int64                  // of pending
	room        chan struct{}          // closed when queueBytes falls
	marks       []mark                 // states to be written
	images      map[chunk.Digest]*pinned
	pins        map[chunk.Digest]pins
	pinnedBytes int64 // of the chunks in pins, in whole pages
	pinFiles    int64 // bytes of the lists
	protected   map[chunk.Digest]int
	pausedTill  time.Time // zero: not paused
	closed      bool
	count       counters
}

// sizes are the bounds that follow from a limit.
type sizes struct {
	limit    int64
	segment  int64 // data of one segment
	unit     int64 // what a segment takes at most, with its sidecar
	segments int64 // for all segments
	pinLists int64 // for the lists of pinned images
	pinned   int64 // for the pinned chunks
}

// sizesOf divides a limit.
func sizesOf(limit int64) (sizes, error) {
	if limit < MinLimit || limit > MaxLimit {
		return sizes{}, fmt.Errorf("limit of %d bytes: want %d to %d", limit, int64(MinLimit), int64(MaxLimit))
	}
	z := sizes{limit: limit}
	// 64 segments: an eviction takes 1/64 of the cache, or less.
	z.segment = min(max(limit/64&^(pageSize-1), minSegment), maxSegment)
	z.unit = z.segment + align(headerSize+entrySize*z.segment/pageSize)
	// A list takes 36 bytes for a chunk; 1/64 of the limit lists all pinned
	// chunks for three images when they have 4 KiB on average.
	z.pinLists = limit / 64
	z.segments = limit - z.pinLists
	// An eviction needs a segment that is at most half pinned. It is looked for
	// when all but three units are taken (see makeRoom), two of them by the
	// segments being filled: if the others were all more than half pinned, more
	// than this would be.
	z.pinned = (z.segments - 5*z.unit) / 2
	return z, nil
}

// maxChunk is the largest chunk that is kept: with it, no segment loses more
// than an eighth because the next chunk did not fit.
func (z sizes) maxChunk() int64 { return z.segment / 8 }

// Open opens the cache in a folder, which is made when missing. What is found
// damaged or of another version there is deleted; it was only a copy. A list of
// pins is the user's word and stays, also where the limit is now too low for all
// that is pinned: then pinned chunks are evicted too. Errors: proc.ErrLocked when
// another process uses the folder; *PinLimitError when the lists alone would take
// more than a quarter of the limit; those of a disk that cannot be used at all.
func Open(cfg Config) (*Cache, error) {
	z, err := sizesOf(cfg.Limit)
	if err != nil {
		return nil, fmt.Errorf("open disk cache: %w", err)
	}
	c := &Cache{
		fs:      cfg.FS,
		log:     cfg.Log,
		retry:   cfg.Retry,
		sizes:   z,
		others:  cfg.OtherNames,
		buffers: sync.Pool{New: func() any { b := alignedBuffer(bounceSize); return &b }},
		wake:    make(chan struct{}, 1),
		hurry:   make(chan struct{}, 1),
		done:    make(chan struct{}),
		pending: map[chunk.Digest]*item{},
		room:    make(chan struct{}),
		images:  map[chunk.Digest]*pinned{},
		pins:    map[chunk.Digest]pins{},

		protected: map[chunk.Digest]int{},
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.retry == 0 {
		c.retry = DefaultRetry
	}
	if c.fs == nil {
		if c.fs, err = newOSFS(cfg.Dir, cfg.Buffered, cfg.KeepPages); err != nil {
			return nil, fmt.Errorf("open disk cache: %w", err)
		}
		if c.lock, err = proc.TryLock(filepath.Join(cfg.Dir, lockName)); err != nil {
			return nil, fmt.Errorf("open disk cache: %w", err)
		}
	}
	w, err := c.load()
	if err != nil {
		c.unlock()
		return nil, fmt.Errorf("open disk cache %s: %w", cfg.Dir, err)
	}
	go w.run() // ends after Close, which waits for it
	return c, nil
}

// Close writes what has been offered, of which there is at most maxQueue, and
// ends the use of the folder.
func (c *Cache) Close() error {
	c.mu.Lock()
	again := c.closed
	c.closed = true
	c.mu.Unlock()
	c.hurryWriter()
	<-c.done
	if again {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.t.segs {
		if s != nil {
			s.close()
		}
	}
	c.unlock()
	return nil
}

func (c *Cache) unlock() {
	if c.lock != nil {
		c.lock.Unlock()
	}
}

// ReadAt fills p with the bytes at off of the cached copy of d. They are NOT
// verified: the caller compares them with the digest, or with hashes of its own
// that it took when it had verified the chunk, and calls Drop when they differ.
// Errors: store.ErrNotFound, when there is no copy with such a range;
// store.ErrLocalDisk.
func (c *Cache) ReadAt(d chunk.Digest, p []byte, off int64) error {
	// A chunk can be moved by an eviction while it is read: then it is somewhere
	// else, or gone, at the next look. Segments live so long that the third look
	// is for show.
	for range 3 {
		it, seg, at, e := c.lookUp(d)
		switch {
		case it != nil && within(p, off, int64(len(it.plain))):
			it.used.Store(true)
			copy(p, it.plain[off:])
			return nil
		case seg == nil || !within(p, off, int64(e.length)):
			return store.ErrNotFound
		}
		err := c.readEntry(seg, &e, p, off)
		if err == nil {
			if e.state == unused {
				c.setState(d, seg, at, used)
			}
			return nil
		}
		if !c.is(d, seg, at) {
			continue
		}
		if !errors.As(err, new(*openError)) || errors.Is(err, fs.ErrNotExist) {
			c.setState(d, seg, at, dropped)
		}
		if errors.Is(err, io.EOF) {
			return store.ErrNotFound // what a power cut took away
		}
		return fmt.Errorf("read chunk %s in the disk cache: %w: %w", d, store.ErrLocalDisk, err)
	}
	return store.ErrNotFound
}

// lookUp returns the item of d while it waits to be written, and where its copy
// is: seg is nil when there is none.
func (c *Cache) lookUp(d chunk.Digest) (it *item, seg *segment, at place, e entry) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return
	}
	it, at = c.pending[d], c.t.get(d)
	if at.seg != 0 {
		seg, e = c.t.segs[at.seg-1], *c.t.at(at)
	}
	return
}

// within reports whether p at off is inside of size bytes.
func within(p []byte, off, size int64) bool {
	return off >= 0 && off <= size && int64(len(p)) <= size-off
}

// is reports whether d is still at that place in seg.
func (c *Cache) is(d chunk.Digest, seg *segment, at place) bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.t.get(d) == at && c.t.segs[at.seg-1] == seg
}

// setState changes the state of the entry of d at a place in seg, if it is still
// there, and has it written.
func (c *Cache) setState(d chunk.Digest, seg *segment, at place, st state) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.t.get(d) != at || c.t.segs[at.seg-1] != seg {
		return
	}
	if st == dropped {
		c.forget(d, at)
	} else {
		c.t.at(at).state = st
	}
	c.mark(seg, at.i)
}

// forget takes d out of the table; mu is held.
func (c *Cache) forget(d chunk.Digest, at place) {
	e := c.t.at(at)
	e.state = dropped
	c.count.chunks--
	c.count.bytes -= int64(e.length)
	c.t.remove(d)
}

// Has reports whether there is a copy of d.
func (c *Cache) Has(d chunk.Digest) bool {
	it, seg, _, _ := c.lookUp(d)
	return it != nil || seg != nil
}

// Touch says that d has been used without a ReadAt: a speculative chunk was
// worth its place.
func (c *Cache) Touch(d chunk.Digest) {
	it, seg, at, e := c.lookUp(d)
	if it != nil {
		it.used.Store(true)
	}
	if seg != nil && e.state == unused {
		c.setState(d, seg, at, used)
	}
}

// Drop says that the copy of d is bad; a later Offer brings a new one.
func (c *Cache) Drop(d chunk.Digest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if it := c.pending[d]; it != nil {
		it.dropped = true
		delete(c.pending, d)
	}
	if at := c.t.get(d); at.seg != 0 {
		c.forget(d, at)
		c.mark(c.t.segs[at.seg-1], at.i)
	}
}

// Offer has p, the verified content of d, written some time. It never waits:
// when the queue is full or the disk fails, the chunk is not cached. p must not
// change after.
func (c *Cache) Offer(d chunk.Digest, p []byte) { c.offer(d, p, demand) }

// OfferSpeculative is Offer for a chunk that nobody has asked for yet. Unless it
// is read, or Touch says that it is used, it is among the first to be evicted.
func (c *Cache) OfferSpeculative(d chunk.Digest, p []byte) { c.offer(d, p, speculative) }

func (c *Cache) offer(d chunk.Digest, p []byte, cl class) {
	bound := int64(maxQueue)
	if cl == speculative {
		bound = maxQueue / 2 // so that it never takes the place of what was asked for
	}
	c.mu.Lock()
	it, _, err := c.enqueue(d, p, cl, bound)
	if err != nil {
		c.count.refused++
	}
	enough := c.newBytes >= gatherBytes || len(c.queue) >= maxQueued/2
	c.mu.Unlock()
	switch {
	case it != nil && enough:
		c.hurryWriter()
	case it != nil:
		c.wakeWriter()
	}
}

// Give is Offer that waits for room in the queue: on nil, p can be read. Errors:
// those of Put.
func (c *Cache) Give(ctx context.Context, d chunk.Digest, p []byte) error {
	_, err := c.give(ctx, d, p, maxQueue)
	return err
}

// Put writes p, the verified content of d, and returns when that is done. It
// waits for room in the queue, and leaves half of that to Offer. Errors: ctx's;
// store.ErrLocalDisk when nothing can be written now; a chunk larger than this
// cache keeps.
func (c *Cache) Put(ctx context.Context, d chunk.Digest, p []byte) error {
	it, err := c.give(ctx, d, p, maxQueue/2)
	if it == nil {
		return err // nil: it is there
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-it.done:
		return it.err
	}
}

// give puts a chunk in the queue as soon as there is room; no item and no error say
// that it is on the disk.
func (c *Cache) give(ctx context.Context, d chunk.Digest, p []byte, bound int64) (*item, error) {
	for {
		c.mu.Lock()
		it, room, err := c.enqueue(d, p, demand, bound)
		c.mu.Unlock()
		if it != nil {
			c.hurryWriter()
		}
		if !errors.Is(err, errFull) {
			return it, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-room:
		}
	}
}
