package blockdev

import (
	"context"
)

const (
	// maxAheadChunks bounds the chunks of one request that nobody has asked for:
	// with the 32 that a read of 128 KiB touches at most, a request stays within the
	// 1024 that a store node answers at once.
	maxAheadChunks = 960
	// prefetchBatch is how much one request of Prefetch takes: 15 ms at 1 Gbit/s,
	// which is what a demand read that comes in the middle may have to share its
	// link for.
	prefetchBatch = 4 << 20
)

// neighbours returns what to fetch with chunks that reads miss: their groups, and
// what sequential reads come to next. All of them are announced.
func (d *Device) neighbours(missing []*flight) (ahead []*coming) {
	if !d.grouped {
		return nil
	}
	var first int64
	for _, f := range missing {
		first += int64(d.chunks[f.i].Len)
	}
	by := newBringer(first)
	for _, f := range missing {
		if d.count.missed.Add(1) > d.alone {
			a, b := d.groups.of(f.i, len(d.chunks))
			ahead = d.announceAll(by, ahead, a, b)
		}
	}
	for _, f := range missing {
		a, b := d.sequences.due(d.chunks, f.i, true)
		ahead = d.announceAll(by, ahead, a, b)
	}
	return ahead
}

// announceAll appends those of the chunks [from, to) that are nowhere and for which
// there is room; by brings them.
func (d *Device) announceAll(by *bringer, ahead []*coming, from, to int) []*coming {
	for i := from; i < to && len(ahead) < maxAheadChunks; i++ {
		size := int64(d.chunks[i].Len)
		if !d.memory.ahead.take(size) {
			break // too much is under way already
		}
		if c, ok := d.announceFetch(by, i); ok {
			ahead = append(ahead, c)
		} else {
			d.memory.ahead.give(size)
		}
	}
	return ahead
}

// announceFetch announces a chunk that by fetches, unless the disk has it.
func (d *Device) announceFetch(by *bringer, i int) (c *coming, ok bool) {
	if d.onDisk(i) {
		return nil, false
	}
	if c, ok = d.announce(by, i); ok {
		by.size += int64(d.chunks[i].Len)
	}
	return c, ok
}

// fetchAhead fetches what a sequential read comes to next, when it is time, now
// that chunk i is read without having to be fetched.
func (d *Device) fetchAhead(i int) {
	if !d.grouped {
		return
	}
	from, to := d.sequences.due(d.chunks, i, false)
	if from >= to {
		return
	}
	d.start(context.Background(), func(ctx context.Context) {
		if ahead := d.announceAll(newBringer(0), nil, from, to); len(ahead) > 0 {
			d.fetch(ctx, request{ahead: ahead}) // its errors fail no read
		}
	})
}

// demanding counts the fetches that reads wait for.
func (d *Device) demanding(delta int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	was := d.demands
	d.demands += delta
	switch {
	case was == 0 && d.demands > 0:
		d.quiet = make(chan struct{})
	case was > 0 && d.demands == 0:
		close(d.quiet)
	}
}

// isQuiet waits until no read waits for a fetch.
func (d *Device) isQuiet(ctx context.Context) error {
	d.mu.Lock()
	quiet := d.quiet
	d.mu.Unlock()
	select {
	case <-quiet:
		return nil
	case <-d.gone:
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Prefetch fetches the chunks with these numbers that are neither in memory nor on
// the disk, in this order, with one request at a time that begins when no read
// waits. Numbers that the image does not have are left out. Without a disk it ends
// when the memory is full of chunks that were fetched ahead. Errors: the store's,
// ctx's, ErrClosed; no read fails by them.
func (d *Device) Prefetch(ctx context.Context, numbers []uint32) error {
	for len(numbers) > 0 {
		if err := d.isQuiet(ctx); err != nil {
			return err
		}
		if d.disk == nil && d.memory.full() {
			return nil
		}
		var batch []*coming
		var err error
		if batch, numbers, err = d.nextBatch(ctx, numbers); err != nil {
			return err
		}
		if len(batch) == 0 {
			continue
		}
		if err := d.prefetch(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}

// Has reports whether a chunk can be read without the store, now.
func (d *Device) Has(n uint32) bool {
	if int64(n) >= int64(len(d.chunks)) {
		return false
	}
	c := &d.chunks[n]
	return d.memory.holds(c.Digest, c.Len) || d.onDisk(int(n))
}

// nextBatch takes the chunks of the next request from numbers.
func (d *Device) nextBatch(ctx context.Context, numbers []uint32) (batch []*coming, rest []uint32, err error) {
	by := newBringer(0)
	for k, n := range numbers {
		if int64(n) >= int64(len(d.chunks)) {
			continue
		}
		i := int(n)
		size := int64(d.chunks[i].Len)
		if len(batch) > 0 && (by.size+size > min(prefetchBatch, d.memory.limit/4) || len(batch) == maxAheadChunks) {
			return batch, numbers[k:], nil
		}
		if size > d.memory.limit/2 {
			return batch, nil, nil // there is never room
		}
		if !d.memory.ahead.take(size) {
			if len(batch) > 0 {
				return batch, numbers[k:], nil
			}
			if err := d.memory.ahead.wait(ctx, d.gone, size); err != nil {
				return nil, nil, err
			}
		}
		if c, ok := d.announceFetch(by, i); ok {
			batch = append(batch, c)
		} else {
			d.memory.ahead.give(size)
		}
	}
	return batch, nil, nil
}

// prefetch makes one request of Prefetch, which ends with ctx or the device.
func (d *Device) prefetch(ctx context.Context, batch []*coming) error {
	ended := make(chan error, 1)
	started := d.start(ctx, func(own context.Context) {
		own, cancel := context.WithCancel(own)
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		ended <- d.fetch(own, request{ahead: batch, patient: true})
	})
	if !started {
		for _, c := range batch {
			d.memory.unexpect(c)
			d.memory.ahead.give(int64(d.chunks[c.i].Len))
		}
		return ErrClosed
	}
	return <-ended
}
