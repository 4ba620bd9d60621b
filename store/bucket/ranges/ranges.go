// Package ranges keeps what a store node has read of packs in a remote bucket on the
// node's own disk, bounded, so that it is read there once: also by a burst of readers
// that want the same at once, and also after a restart. It is store/cache with blocks
// of objects in the place of chunks. Nothing depends on it: what it returns may be
// wrong, the caller verifies it, and a disk that fails costs reads of the bucket.
package ranges

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"quarry/store/bucket"
	"quarry/store/cache"
	"quarry/store/chunk"
)

const (
	// blockSize is what is read and kept together: [n·blockSize, (n+1)·blockSize) of an
	// object, and less at its end. docs/decisions/range-cache.md has the measurement.
	blockSize = 64 << 10
	// maxFetch bounds one read of the bucket: what the bucket may ask for a second time
	// when it is slow.
	maxFetch = 4 << 20
	// maxOrphans bounds the reads that go on when everybody who wanted them has left:
	// what was asked of the bucket is kept, unless somebody makes it a game.
	maxOrphans = 64
	// roomTime is how long what was read waits for the disk to take it, and its readers
	// with it. A disk that is slower costs the next reader another read of the bucket.
	roomTime = time.Second
)

// Config describes a cache.
type Config struct {
	// Bucket has the objects. An object that is read here never changes.
	Bucket bucket.Bucket
	// Dir is the cache's own folder, made when missing; store/cache/FORMAT.md says what
	// is in it. One process at a time uses it.
	Dir string
	// Limit bounds the bytes of all files in Dir, between cache.MinLimit and cache.MaxLimit.
	Limit int64
	Log   *slog.Logger // nil = discard
	FS    cache.FS     // as cache.Config has it
}

// Cache reads objects of a bucket. Safe for concurrent use.
type Cache struct {
	bucket  bucket.Bucket
	disk    *cache.Cache
	metrics *metrics

	work sync.WaitGroup // fetches
	slow atomic.Bool    // the disk had no room for what came last: nobody waits for it

	mu      sync.Mutex // guards what follows, and what fetch says
	fetches map[block]*fetch
	orphans int
}

// block is a part of an object.
type block struct {
	key string
	n   int64
}

// name is what the disk has the block under.
func (b block) name() chunk.Digest {
	h := make([]byte, 0, bucket.MaxKey+16)
	h = binary.LittleEndian.AppendUint64(h, blockSize)
	h = binary.LittleEndian.AppendUint64(h, uint64(b.n))
	return chunk.Digest(sha256.Sum256(append(h, b.key...)))
}

// Open opens the cache in its folder. Errors: those of cache.Open.
func Open(cfg Config) (*Cache, error) {
	disk, err := cache.Open(cache.Config{Dir: cfg.Dir, Limit: cfg.Limit, KeepPages: true, OtherNames: true, Log: cfg.Log, FS: cfg.FS})
	if err != nil {
		return nil, err
	}
	c := &Cache{bucket: bucket.Metered(cfg.Bucket), disk: disk, fetches: map[block]*fetch{}}
	c.metrics = newMetrics(disk)
	return c, nil
}

// Close waits for the reads of the bucket under way, writes what was read, and ends the
// use of the folder. No ReadAt may run or follow.
func (c *Cache) Close() error {
	c.mu.Lock()
	for _, f := range c.fetches {
		f.cancel()
	}
	c.mu.Unlock()
	c.work.Wait()
	return c.disk.Close()
}

// ReadAt fills p from offset off of an object that has o.Size bytes, and says whether
// the bucket was asked for any of it. The bytes are NOT verified: they are those of
// the disk, or of the bucket at some time. The caller calls Drop when they are wrong.
// Errors: those of bucket.Bucket.
func (c *Cache) ReadAt(ctx context.Context, o bucket.Object, p []byte, off int64) (asked bool, err error) {
	if len(p) == 0 || off < 0 || off > o.Size || int64(len(p)) > o.Size-off {
		return true, c.bucket.ReadAt(ctx, o.Key, p, off) // which says what it has
	}
	v := view{o, p, off}
	want := blocks(off, int64(len(p)))
	for look := true; ; look = false {
		want = c.fromDisk(v, want)
		if len(want) == 0 {
			return asked, nil
		}
		fetches, later := c.join(ctx, o, want, look)
		asked = asked || len(fetches) > 0
		left, err := c.fromBucket(ctx, v, fetches)
		if err != nil && asIfWhole(err) {
			// The object is shorter than its size says: what is asked for may be there.
			return true, c.bucket.ReadAt(ctx, o.Key, p, off)
		}
		if err != nil {
			return true, err
		}
		want = slices.Sorted(slices.Values(append(left, later...)))
	}
}

// asIfWhole tells an object that ends early from one that is not there.
func asIfWhole(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) }

// Drop forgets the blocks that have n bytes from off on: the bytes were wrong.
func (c *Cache) Drop(o bucket.Object, off, n int64) {
	for _, b := range blocks(off, n) {
		c.disk.Drop(block{o.Key, b}.name())
		c.metrics.dropped.Inc()
	}
}

// view is what one ReadAt wants.
type view struct {
	o   bucket.Object
	p   []byte
	off int64
}

// blocks are the numbers of the blocks that have n bytes from off on.
func blocks(off, n int64) []int64 {
	var ns []int64
	for b := off / blockSize; b*blockSize < off+n; b++ {
		ns = append(ns, b)
	}
	return ns
}

// part returns what of p is in block n, and where it begins in the block.
func (v view) part(n int64) (p []byte, in int64) {
	from, to := max(n*blockSize, v.off), min((n+1)*blockSize, v.off+int64(len(v.p)))
	return v.p[from-v.off : to-v.off], from - n*blockSize
}

// fromDisk fills what the disk has, and returns the blocks that it has not.
func (c *Cache) fromDisk(v view, want []int64) (missing []int64) {
	for _, n := range want {
		p, in := v.part(n)
		if c.disk.ReadAt(block{v.o.Key, n}.name(), p, in) != nil {
			missing = append(missing, n)
			continue
		}
		c.metrics.fromDisk.Inc()
	}
	return missing
}

// fromBucket fills what fetches bring, and returns the blocks of those that ended
// because nobody waited for them.
func (c *Cache) fromBucket(ctx context.Context, v view, fetches []joined) (left []int64, err error) {
	for _, j := range fetches {
		select {
		case <-j.done:
		case <-ctx.Done():
			err = ctx.Err()
		}
		switch {
		case err != nil:
		case j.abandoned():
			left = append(left, j.blocks...)
		case j.err != nil:
			err = j.err
		default:
			for _, n := range j.blocks {
				p, in := v.part(n)
				copy(p, j.buf[(n-j.first)*blockSize+in:])
			}
		}
		c.leave(j.fetch)
	}
	return left, err
}
