package blockdev

import (
	"context"
	"errors"
	"fmt"
	"time"

	"quarry/store"
	"quarry/store/chunk"
)

const (
	// maxDiskReads bounds reads of the disk: a disk that answers no more holds up
	// 64 of them, with at most 64 chunks of 256 KiB, 16 MiB.
	maxDiskReads = 64
	// diskPatience is what a disk has to answer; a working one takes
	// milliseconds under load, and the store is always there instead.
	diskPatience = 2 * time.Second
	// diskRest is how long a disk that did not answer is left alone.
	diskRest = 30 * time.Second
)

// Disk is a disk cache of plain chunks. Nothing that it gives is trusted.
type Disk interface {
	// ReadAt fills p with bytes at off of the chunk's cached copy, not verified.
	// Errors: store.ErrNotFound, or one that wraps store.ErrLocalDisk. Safe for
	// concurrent use.
	ReadAt(d chunk.Digest, p []byte, off int64) error
	// Has reports whether there is a copy. Safe for concurrent use, and quick.
	Has(d chunk.Digest) bool
	// Offer gives it a chunk to write some time, or to leave. It never blocks; p is
	// never changed after. Safe for concurrent use.
	Offer(d chunk.Digest, p []byte)
	// Drop says that the copy is bad. Safe for concurrent use.
	Drop(d chunk.Digest)
}

// AheadDisk is a Disk that keeps chunks which no read has asked for apart, so
// that they are evicted first.
type AheadDisk interface {
	// OfferSpeculative is Offer for such a chunk.
	OfferSpeculative(d chunk.Digest, p []byte)
	// Touch says that a read has asked for it now, and was answered from memory. Safe
	// for concurrent use, and quick.
	Touch(d chunk.Digest)
}

// errDiskAway says that a disk did not answer a short while ago.
var errDiskAway = fmt.Errorf("%w: it did not answer in %v", store.ErrLocalDisk, diskPatience)

// diskRead reads from the disk into p, which belongs to this call even after an
// error: a disk that hangs may write it later.
func (d *Device) diskRead(ctx context.Context, digest chunk.Digest, p []byte, off int64) error {
	m := d.memory
	if time.Now().UnixNano() < m.diskAway.Load() {
		return errDiskAway
	}
	t := time.NewTimer(diskPatience)
	defer t.Stop()
	select {
	case m.diskSlots <- struct{}{}:
	case <-t.C:
		return d.diskIsAway(ctx)
	}
	done := make(chan error, 1)
	go func() { // ends when the disk answers; there are maxDiskReads at most
		done <- d.disk.ReadAt(digest, p, off)
		<-m.diskSlots
	}()
	select {
	case err := <-done:
		return err
	case <-t.C:
		return d.diskIsAway(ctx)
	}
}

func (d *Device) diskIsAway(ctx context.Context) error {
	d.log.WarnContext(ctx, "cache disk does not answer", "outcome", store.LocalDisk, "left_alone_for", diskRest)
	d.memory.diskAway.Store(time.Now().Add(diskRest).UnixNano())
	return errDiskAway
}

// blocks answers a piece from the disk when its blocks have tags, and reports
// whether it did.
func (d *Device) blocks(ctx context.Context, pc *piece) bool {
	c := d.chunks[pc.i]
	tags := d.memory.tags.get(c.Digest)
	if tags == nil {
		return false
	}
	first := pc.in / blockSize
	from, to := first*blockSize, min(blocksOf(pc.in+int64(len(pc.p)))*blockSize, int64(c.Len))
	buf := make([]byte, to-from)
	if err := d.diskRead(ctx, c.Digest, buf, from); err != nil {
		d.diskMissed(ctx, pc.i, err)
		return false
	}
	if !d.memory.tags.check(tags, first, buf) {
		d.diskLied(ctx, pc.i)
		return false
	}
	copy(pc.p, buf[pc.in-from:])
	return true
}

// load takes a whole chunk from the disk; nil when it has no good copy.
func (d *Device) load(ctx context.Context, i int) []byte {
	c := d.chunks[i]
	p := make([]byte, c.Len)
	if err := d.diskRead(ctx, c.Digest, p, 0); err != nil {
		d.diskMissed(ctx, i, err)
		return nil
	}
	if chunk.Sum(p) != c.Digest {
		d.diskLied(ctx, i)
		return nil
	}
	d.memory.tags.add(c.Digest, p)
	d.count.disk.fetched.add(int64(c.Len))
	return p
}

// diskMissed counts a disk that failed, which a miss is not.
func (d *Device) diskMissed(ctx context.Context, i int, err error) {
	if errors.Is(err, store.ErrNotFound) {
		return
	}
	d.count.diskFailed.Add(1)
	if !errors.Is(err, errDiskAway) { // said once, by who waited for it
		d.log.WarnContext(ctx, "cache disk failed", "chunk", d.chunks[i].Digest, "outcome", store.LocalDisk, "err", err)
	}
}

// diskLied drops a bad copy of chunk i.
func (d *Device) diskLied(ctx context.Context, i int) {
	c := d.chunks[i].Digest
	d.count.diskCorrupt.Add(1)
	d.log.WarnContext(ctx, "cache disk has wrong bytes", "chunk", c, "path", d.paths.of(i), "outcome", store.Corrupt)
	d.memory.tags.drop(c)
	d.disk.Drop(c)
}

// onDisk reports whether the disk has a copy of a chunk.
func (d *Device) onDisk(i int) bool { return d.disk != nil && d.disk.Has(d.chunks[i].Digest) }

// offer gives the disk a chunk that came from elsewhere, after whoever waits for
// it has it.
func (d *Device) offer(digest chunk.Digest, p []byte, ahead bool) {
	if d.disk == nil {
		return
	}
	d.memory.tags.add(digest, p)
	if k, ok := d.disk.(AheadDisk); ok && ahead {
		k.OfferSpeculative(digest, p)
		return
	}
	d.disk.Offer(digest, p)
}

// used tells the disk that a chunk that was fetched ahead is read.
func (d *Device) used(digest chunk.Digest) {
	if k, ok := d.disk.(AheadDisk); ok {
		k.Touch(digest)
	}
}
