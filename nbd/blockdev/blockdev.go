// Package blockdev makes the block device of an image from its bootstrap and a
// chunk store. It is where a block read of the kernel becomes chunk digests, and
// where "the right bytes or an error" is kept: it answers with nothing but
// verified chunks, the bootstrap, and zeros where the format says zeros. A chunk
// is looked for in memory, on the cache disk, among what is on its way, and at
// the store.
package blockdev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"quarry/nbd"
	"quarry/rafs"
	"quarry/store"
)

const (
	// DefaultTimeout ends a fetch well before the 270 s after which a shim
	// answers its kernel, so that a read has time for another try.
	DefaultTimeout = 60 * time.Second
	// DefaultHedge is how long nothing may come of what brings a chunk that a read
	// waits for without having asked for it: twice a slow link's round trip of 50 ms.
	DefaultHedge = 100 * time.Millisecond
	// DefaultGroupBytes was chosen by replaying recorded reads of `pip --version` and
	// `python3 -c 'print(1)'`; over-fetch is stored bytes fetched ÷ those of the chunks
	// touched:
	//
	//	none    479 requests, 1.00     44, 1.00
	//	256 KiB 157           1.32     44  1.02
	//	512 KiB 126           1.39     44  1.05
	//	1 MiB   111           1.46     44  1.11
	//	2 MiB   102           1.66     44  1.22
	//
	// A request is a wait of 10 ms at 5 ms and 1 Gbit/s; 1 MiB saves pip 150 ms of that
	// on 512 KiB and costs 7 ms of bytes.
	DefaultGroupBytes = 1 << 20
	// DefaultAlone is how many missing chunks are fetched without neighbours: only
	// then have reads shown that more is wanted. `python3 -c 'print(1)'` misses 44
	// chunks and no more: neighbours after 40 of them would save 3 of its 44 requests and
	// add 6 % to its bytes.
	DefaultAlone = 48
	// maxFetchBytes bounds the chunks that reads wait for, of one device: 256 stalled
	// fetches of one 256 KiB chunk, more than the 128 requests of a loop device.
	maxFetchBytes = 64 << 20
	blockSize     = 4096
)

// Config describes a device.
type Config struct {
	// Bootstrap is the image's bootstrap, already verified; not changed or
	// copied.
	Bootstrap []byte
	// Image is the decoded Bootstrap. Without its tree errors name no path, and
	// groups do not end at directories.
	Image *rafs.Image
	// Chunks gives verified chunks.
	Chunks store.BatchGetter
	// Memory keeps plain chunks in memory for all devices that share it; nil means
	// one of this device's own.
	Memory *Memory
	// Disk keeps plain chunks on a disk; nil means none.
	Disk Disk
	// Timeout is for one fetch; 0 means DefaultTimeout.
	Timeout time.Duration
	// Hedge is for a chunk that a read needs and that is on its way already: when the
	// request or stream that brings it has brought nothing for so long, the read fetches
	// it by itself; 0 means DefaultHedge.
	Hedge time.Duration
	// GroupBytes is how much of the neighbourhood of a missing chunk is fetched with
	// it; 0 means DefaultGroupBytes, less than 0 nothing, not even for sequential
	// reads.
	GroupBytes int64
	// Alone is how many missing chunks are fetched before neighbours are; 0 means
	// DefaultAlone, less than 0 none.
	Alone int
	// Log gets a line for every chunk that could not be read. nil discards.
	Log *slog.Logger
	// OnError, if not nil, is told of every chunk that could not be read. It may
	// be called concurrently.
	OnError func(*ReadError)
	// OnTouch, if not nil, is told when a read touches chunk number i of the image's
	// chunk table for the first time since New. It may be called concurrently and
	// must not block.
	OnTouch func(i int)
}

// Device is the flattened device of one image: the bootstrap, zeros up to the
// blob's mapped offset, then each chunk at its place, padded with zeros to a
// block. Safe for concurrent use.
type Device struct {
	bootstrap []byte
	size      int64
	mapped    int64        // where the data begins
	chunks    []rafs.Chunk // by place
	src       store.BatchGetter
	memory    *Memory
	disk      Disk
	timeout   time.Duration
	hedge     time.Duration
	log       *slog.Logger
	onError   func(*ReadError)
	onTouch   func(int)
	paths     paths
	grouped   bool  // something may be fetched ahead
	alone     int64 // see Config.Alone
	groups    groups
	sequences sequences
	budget    *semaphore.Weighted // bytes that reads wait for
	touched   []atomic.Uint32     // bit set of chunks that reads touched
	count     counters
	slow      slowest

	fetching sync.WaitGroup
	gone     chan struct{} // closed by Close

	mu       sync.Mutex // guards what follows
	closed   bool
	running  map[*context.CancelFunc]struct{} // the fetches
	expected map[*Expected]struct{}
	demands  int           // fetches that reads wait for
	quiet    chan struct{} // closed when there is none
}

var _ nbd.ReadyDevice = (*Device)(nil)

// ErrClosed says that the device was closed.
var ErrClosed = errors.New("device is closed")

// New makes the device of cfg.Image.
func New(cfg Config) (*Device, error) {
	if int64(len(cfg.Bootstrap)) != cfg.Image.Size {
		return nil, fmt.Errorf("bootstrap has %d bytes, its image says %d", len(cfg.Bootstrap), cfg.Image.Size)
	}
	if cfg.Memory == nil {
		cfg.Memory = NewMemory(0)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	if cfg.Hedge == 0 {
		cfg.Hedge = DefaultHedge
	}
	if cfg.GroupBytes == 0 {
		cfg.GroupBytes = DefaultGroupBytes
	}
	if cfg.Alone == 0 {
		cfg.Alone = DefaultAlone
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	d := &Device{
		bootstrap: cfg.Bootstrap,
		size:      cfg.Image.DeviceSize(),
		mapped:    cfg.Image.Size,
		src:       cfg.Chunks,
		memory:    cfg.Memory,
		disk:      cfg.Disk,
		timeout:   cfg.Timeout,
		hedge:     cfg.Hedge,
		log:       cfg.Log,
		onError:   cfg.OnError,
		onTouch:   cfg.OnTouch,
		paths:     newPaths(cfg.Image),
		grouped:   cfg.GroupBytes > 0,
		alone:     int64(cfg.Alone),
		groups:    newGroups(cfg.Image, cfg.GroupBytes),
		sequences: sequences{spare: cfg.Memory.spare},
		budget:    semaphore.NewWeighted(maxFetchBytes),
		gone:      make(chan struct{}),
		running:   map[*context.CancelFunc]struct{}{},
		expected:  map[*Expected]struct{}{},
		quiet:     make(chan struct{}),
	}
	close(d.quiet)
	if b := cfg.Image.Blob; b != nil {
		d.mapped, d.chunks = b.MappedOff, b.Chunks
	}
	d.touched = make([]atomic.Uint32, (len(d.chunks)+31)/32)
	return d, nil
}

// Size returns the length of the flattened device.
func (d *Device) Size() int64 { return d.size }

// Path returns the path of the first file that uses chunk number i of the image's
// chunk table, "" when it is not known.
func (d *Device) Path(i int) string { return d.paths.of(i) }

// Close ends the fetches under way and waits for them; reads that need them,
// and later ones, fail.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	close(d.gone)
	for cancel := range d.running {
		(*cancel)()
	}
	var expected []*Expected
	for e := range d.expected {
		expected = append(expected, e)
	}
	d.mu.Unlock()
	for _, e := range expected {
		e.End()
	}
	d.fetching.Wait()
	return nil
}

// piece is the part of a read that lies in one chunk.
type piece struct {
	i  int   // of the chunk
	in int64 // offset in the chunk
	p  []byte
}

// ReadAt fills p. Errors: *ReadError when a chunk of this range cannot be had,
// ctx's, ErrClosed. Nothing of an error outlasts it: the next read tries again.
func (d *Device) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > d.size || int64(len(p)) > d.size-off {
		return fmt.Errorf("read of %d bytes at %d is outside the device of %d", len(p), off, d.size)
	}
	select {
	case <-d.gone:
		return ErrClosed
	default:
	}
	d.count.readBytes.Add(int64(len(p)))
	var room [2]piece // what a read of up to a chunk touches
	pieces := d.split(room[:0], p, off)
	d.countOwn(p, pieces)
	if len(pieces) == 0 {
		return nil
	}
	first := pieces[0].i
	if d.grouped {
		d.sequences.note(d.chunks, first, pieces[len(pieces)-1].i)
	}
	missed := pieces[:0]
	for _, pc := range pieces {
		d.touch(pc.i)
		if d.held(pc) {
			d.count.read(TierMemory, len(pc.p))
		} else {
			missed = append(missed, pc)
		}
	}
	if len(missed) > 0 && d.disk != nil {
		missed = d.fromDisk(ctx, missed)
	}
	if len(missed) > 0 {
		return d.demand(ctx, missed)
	}
	d.fetchAhead(first)
	return nil
}

// TryReadAt implements nbd.ReadyDevice: it reads what memory has.
func (d *Device) TryReadAt(p []byte, off int64) bool {
	if off < 0 || off > d.size || int64(len(p)) > d.size-off {
		return false
	}
	var room [2]piece
	pieces := d.split(room[:0], p, off)
	for _, pc := range pieces {
		if c := &d.chunks[pc.i]; !d.memory.holds(c.Digest, c.Len) {
			return false
		}
	}
	for _, pc := range pieces {
		if !d.held(pc) {
			return false // evicted a moment ago; ReadAt does it all, and counts
		}
	}
	for _, pc := range pieces {
		d.touch(pc.i)
		d.count.read(TierMemory, len(pc.p))
	}
	d.count.readBytes.Add(int64(len(p)))
	d.countOwn(p, pieces)
	if len(pieces) > 0 {
		first := pieces[0].i
		if d.grouped {
			d.sequences.note(d.chunks, first, pieces[len(pieces)-1].i)
		}
		d.fetchAhead(first)
	}
	return true
}

// split fills the parts of p that are no chunk's and returns the others.
func (d *Device) split(pieces []piece, p []byte, off int64) []piece {
	i := -1
	for len(p) > 0 {
		var n int
		switch {
		case off < int64(len(d.bootstrap)):
			n = copy(p, d.bootstrap[off:])
		case off < d.mapped:
			n = zero(p, d.mapped-off)
		default:
			if i < 0 {
				i = d.chunkAt(off - d.mapped)
			}
			c := d.chunks[i]
			in, length := off-d.mapped-c.DevOff, int64(c.Len)
			if in < length {
				n = int(min(length-in, int64(len(p))))
				pieces = append(pieces, piece{i, in, p[:n]})
				break
			}
			end := blocksOf(length) * blockSize
			n = zero(p, end-in)
			if in+int64(n) == end {
				i++
			}
		}
		p, off = p[n:], off+int64(n)
	}
	return pieces
}

// countOwn counts what of a read is no chunk's.
func (d *Device) countOwn(p []byte, pieces []piece) {
	n := len(p)
	for _, pc := range pieces {
		n -= len(pc.p)
	}
	if n > 0 {
		d.count.ownBytes.Add(int64(n))
	}
}

// chunkAt returns the chunk in whose blocks the data device's byte off lies.
func (d *Device) chunkAt(off int64) int {
	return sort.Search(len(d.chunks), func(i int) bool { return d.chunks[i].DevOff > off }) - 1
}

// zero clears at most n bytes of p and returns how many.
func zero(p []byte, n int64) int {
	n = min(n, int64(len(p)))
	clear(p[:n])
	return int(n)
}

// touch tells of the first read of a chunk.
func (d *Device) touch(i int) {
	word, bit := &d.touched[i/32], uint32(1)<<(i%32)
	if word.Load()&bit != 0 || word.Or(bit)&bit != 0 {
		return
	}
	d.count.touched.add(int64(d.chunks[i].Len))
	if d.onTouch != nil {
		d.onTouch(i)
	}
}

// held answers a piece from memory and reports whether it did.
func (d *Device) held(pc piece) bool {
	c := &d.chunks[pc.i]
	data, first := d.memory.view(c.Digest, c.Len, pc.in, int64(len(pc.p)))
	if data == nil {
		return false
	}
	if first {
		d.used(c.Digest)
	}
	copy(pc.p, data[pc.in:])
	return true
}

// fromDisk answers the pieces whose blocks can be checked by themselves, and
// returns the others.
func (d *Device) fromDisk(ctx context.Context, pieces []piece) []piece {
	missed := pieces[:0]
	for _, pc := range pieces {
		start := time.Now()
		if !d.blocks(ctx, &pc) {
			missed = append(missed, pc)
			continue
		}
		d.count.read(TierDisk, len(pc.p))
		d.slow.note(pc.i, TierDisk, start)
	}
	return missed
}
