// Package blockdev makes the block device of an image from its bootstrap and a
// chunk store. It is where a block read of the kernel becomes chunk digests, and
// where "the right bytes or an error" is kept: it answers with nothing but
// verified chunks, the bootstrap, and zeros where the format says zeros.
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
	"quarry/store/chunk"
)

const (
	// DefaultTimeout ends a fetch well before the 270 s after which a shim
	// answers its kernel, so that a read has time for another try.
	DefaultTimeout = 60 * time.Second
	// maxFetchBytes bounds the chunks being fetched: 256 stalled fetches of one
	// 256 KiB chunk, more than the 128 requests of a loop device.
	maxFetchBytes = 64 << 20
	blockSize     = 4096
)

// Config describes a device.
type Config struct {
	// Bootstrap is the image's bootstrap, already verified; not changed or
	// copied.
	Bootstrap []byte
	// Image is the decoded Bootstrap. Without its tree errors name no path.
	Image *rafs.Image
	// Chunks gives verified chunks.
	Chunks store.BatchGetter
	// Cache keeps plain chunks in memory for all devices that share it; nil
	// means one of this device's own.
	Cache *Cache
	// Timeout is for one fetch; 0 means DefaultTimeout.
	Timeout time.Duration
	// Log gets a line for every chunk that could not be read. nil discards.
	Log *slog.Logger
	// OnError, if not nil, is told of every chunk that could not be read. It may
	// be called concurrently.
	OnError func(*ReadError)
}

// ReadError says which chunk a read needed and could not get.
type ReadError struct {
	Chunk chunk.Digest
	Off   int64  // of the chunk in the flattened device
	Path  string // first file of the image that uses it; "" when not known
	Err   error
}

func (e *ReadError) Error() string {
	return fmt.Sprintf("read chunk %s of %s: %v", e.Chunk, e.Path, e.Err)
}

// Unwrap returns the store's error.
func (e *ReadError) Unwrap() error { return e.Err }

// Stats counts what a device did since New.
type Stats struct {
	Fetches    int64 // GetBatch calls
	Chunks     int64 // chunks fetched
	ChunkBytes int64 // their plain bytes
	ReadBytes  int64 // bytes asked of the device
	Errors     int64 // chunks that could not be fetched
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
	cache     *Cache
	timeout   time.Duration
	log       *slog.Logger
	onError   func(*ReadError)
	pathOf    func(i int) string
	budget    *semaphore.Weighted // bytes being fetched
	fetching  sync.WaitGroup

	mu      sync.Mutex                       // guards what follows
	flights map[int]*flight                  // chunks being fetched
	running map[*context.CancelFunc]struct{} // the fetches
	closed  bool

	fetches, fetched, chunkBytes, readBytes, errs atomic.Int64
}

var _ nbd.Device = (*Device)(nil)

// ErrClosed says that the device was closed.
var ErrClosed = errors.New("device is closed")

// New makes the device of cfg.Image.
func New(cfg Config) (*Device, error) {
	if int64(len(cfg.Bootstrap)) != cfg.Image.Size {
		return nil, fmt.Errorf("bootstrap has %d bytes, its image says %d", len(cfg.Bootstrap), cfg.Image.Size)
	}
	d := &Device{
		bootstrap: cfg.Bootstrap,
		size:      cfg.Image.DeviceSize(),
		mapped:    cfg.Image.Size,
		src:       cfg.Chunks,
		timeout:   cfg.Timeout,
		log:       cfg.Log,
		onError:   cfg.OnError,
		pathOf:    pathFinder(cfg.Image),
		budget:    semaphore.NewWeighted(maxFetchBytes),
		cache:     cfg.Cache,
		flights:   map[int]*flight{},
		running:   map[*context.CancelFunc]struct{}{},
	}
	if b := cfg.Image.Blob; b != nil {
		d.mapped, d.chunks = b.MappedOff, b.Chunks
	}
	if d.cache == nil {
		d.cache = NewCache(0)
	}
	if d.timeout == 0 {
		d.timeout = DefaultTimeout
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	return d, nil
}

// Size returns the length of the flattened device.
func (d *Device) Size() int64 { return d.size }

// Stats returns the counters.
func (d *Device) Stats() Stats {
	return Stats{
		Fetches:    d.fetches.Load(),
		Chunks:     d.fetched.Load(),
		ChunkBytes: d.chunkBytes.Load(),
		ReadBytes:  d.readBytes.Load(),
		Errors:     d.errs.Load(),
	}
}

// Close ends the fetches under way and waits for them; reads that need them,
// and later ones, fail.
func (d *Device) Close() error {
	d.mu.Lock()
	d.closed = true
	for cancel := range d.running {
		(*cancel)()
	}
	d.mu.Unlock()
	d.fetching.Wait()
	return nil
}

// ReadAt fills p. Errors: *ReadError when a chunk of this range cannot be had,
// ctx's, ErrClosed. Nothing of an error outlasts it: the next read tries again.
func (d *Device) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > d.size || int64(len(p)) > d.size-off {
		return fmt.Errorf("read of %d bytes at %d is outside the device of %d", len(p), off, d.size)
	}
	d.readBytes.Add(int64(len(p)))
	first, n := d.span(off, int64(len(p)))
	data, err := d.get(ctx, first, n)
	if err != nil {
		return err
	}
	d.fill(p, off, first, data)
	return nil
}

// span returns which chunks hold bytes of a range: n of them from first on.
func (d *Device) span(off, length int64) (first, n int) {
	from, to := off-d.mapped, off-d.mapped+length
	if to <= 0 || length == 0 || len(d.chunks) == 0 {
		return 0, 0
	}
	first = d.chunkAt(max(from, 0))
	return first, d.chunkAt(to-1) - first + 1
}

// chunkAt returns the chunk in whose blocks the data device's byte off lies.
func (d *Device) chunkAt(off int64) int {
	return sort.Search(len(d.chunks), func(i int) bool { return d.chunks[i].DevOff > off }) - 1
}

// fill puts the bytes at off into p; data are the chunks from first on.
func (d *Device) fill(p []byte, off int64, first int, data [][]byte) {
	for len(p) > 0 {
		var n int
		switch {
		case off < int64(len(d.bootstrap)):
			n = copy(p, d.bootstrap[off:])
		case off < d.mapped:
			n = zero(p, d.mapped-off)
		default:
			c, in := data[0], off-d.mapped-d.chunks[first].DevOff
			if in < int64(len(c)) {
				n = copy(p, c[in:])
				break
			}
			end := (int64(len(c)) + blockSize - 1) &^ (blockSize - 1)
			n = zero(p, end-in)
			if in+int64(n) == end {
				first, data = first+1, data[1:]
			}
		}
		p, off = p[n:], off+int64(n)
	}
}

// zero clears at most n bytes of p and returns how many.
func zero(p []byte, n int64) int {
	n = min(n, int64(len(p)))
	clear(p[:n])
	return int(n)
}

// BootstrapDevice is the bootstrap alone, for kernels before Linux 6.4, which
// take bootstrap and data as two devices.
func (d *Device) BootstrapDevice() nbd.Device {
	return section{d: d, size: int64(len(d.bootstrap))}
}

// DataDevice is the data alone, nil for an image without.
func (d *Device) DataDevice() nbd.Device {
	if len(d.chunks) == 0 {
		return nil
	}
	return section{d: d, off: d.mapped, size: d.size - d.mapped}
}

// section is a part of a device.
type section struct {
	d         *Device
	off, size int64
}

// Size returns the section's length.
func (s section) Size() int64 { return s.size }

// ReadAt fills p; see Device.ReadAt.
func (s section) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > s.size || int64(len(p)) > s.size-off {
		return fmt.Errorf("read of %d bytes at %d is outside the section of %d", len(p), off, s.size)
	}
	return s.d.ReadAt(ctx, p, s.off+off)
}

// pathFinder returns a function from a chunk's number to the first path that
// uses it. The table is made at the first call: most devices never need it.
func pathFinder(m *rafs.Image) func(i int) string {
	table := sync.OnceValue(func() map[chunk.Digest]string {
		if m.Tree == nil {
			return nil
		}
		paths := make(map[chunk.Digest]string, len(m.Blob.Chunks))
		m.Walk(func(path string, n *rafs.Inode) error {
			for _, d := range n.Chunks {
				if _, ok := paths[d]; !ok {
					paths[d] = path
				}
			}
			return nil
		})
		return paths
	})
	return func(i int) string { return table()[m.Blob.Chunks[i].Digest] }
}
