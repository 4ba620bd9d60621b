package blockdev

import (
	"context"
	"errors"
	"fmt"

	"quarry/store/chunk"
)

// flight is one chunk being fetched, waited for by any number of reads. p and
// err are set before done is closed and not changed after.
type flight struct {
	done chan struct{}
	p    []byte
	err  error // *ReadError
}

// get returns n chunks from first on, from the cache, from fetches that others
// began, or from one fetch of all the rest.
func (d *Device) get(ctx context.Context, first, n int) ([][]byte, error) {
	if n == 0 {
		return nil, nil
	}
	data := make([][]byte, n)
	// A fetch that another read began may be near the end of its time; that
	// is no reason to fail a read that has just come.
	for again := true; again; {
		waits, err := d.plan(ctx, first, data)
		if err != nil {
			return nil, err
		}
		again = false
		for _, w := range waits {
			select {
			case <-w.f.done:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			switch {
			case w.f.err == nil:
				data[w.i] = w.f.p
			case w.joined && errors.Is(w.f.err, context.DeadlineExceeded):
				again = true
			default:
				return nil, w.f.err
			}
		}
	}
	return data, nil
}

// wait is a read's interest in a flight.
type wait struct {
	i      int // place in the read's data
	f      *flight
	joined bool // the flight was begun by another read
}

// plan takes what the cache has and returns what to wait for, having begun to
// fetch what nobody had.
func (d *Device) plan(ctx context.Context, first int, data [][]byte) ([]wait, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ErrClosed
	}
	var waits []wait
	var missing []int
	for i := range data {
		if data[i] != nil {
			continue
		}
		c := d.chunks[first+i]
		// Another image's table may lie about the length; arrive refuses it here.
		if p := d.cache.get(c.Digest); len(p) == int(c.Len) {
			data[i] = p
			continue
		}
		f, joined := d.flights[first+i]
		if !joined {
			f = &flight{done: make(chan struct{})}
			d.flights[first+i] = f
			missing = append(missing, first+i)
		}
		waits = append(waits, wait{i: i, f: f, joined: joined})
	}
	if len(missing) > 0 {
		d.startFetch(ctx, missing)
	}
	return waits, nil
}

// startFetch fetches chunks in the background, under a deadline of its own: the
// read that began it may be cancelled while others wait. Called with mu held.
func (d *Device) startFetch(ctx context.Context, missing []int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.timeout)
	d.running[&cancel] = struct{}{}
	d.fetching.Go(func() { // ends with its deadline, at the latest
		defer func() {
			cancel()
			d.mu.Lock()
			delete(d.running, &cancel)
			d.mu.Unlock()
		}()
		d.fetch(ctx, missing)
	})
}

// fetch gets chunks in one batch and ends the flight of each.
func (d *Device) fetch(ctx context.Context, missing []int) {
	byDigest := make(map[chunk.Digest]int, len(missing))
	digests := make([]chunk.Digest, len(missing))
	var total int64
	for k, i := range missing {
		digests[k] = d.chunks[i].Digest
		byDigest[digests[k]] = i
		total += int64(d.chunks[i].Len)
	}
	err := d.budget.Acquire(ctx, min(total, maxFetchBytes))
	if err == nil {
		defer d.budget.Release(min(total, maxFetchBytes))
		d.fetches.Add(1)
		err = d.src.GetBatch(ctx, digests, func(digest chunk.Digest, p []byte, err error) error {
			if i, ok := byDigest[digest]; ok {
				delete(byDigest, digest)
				d.arrive(ctx, i, p, err)
			}
			return nil
		})
	}
	if err == nil {
		err = errors.New("store gave no answer")
	}
	for _, i := range byDigest {
		d.arrive(ctx, i, nil, err)
	}
}

// arrive ends a chunk's flight. p is copied: it is the store's.
func (d *Device) arrive(ctx context.Context, i int, p []byte, err error) {
	c := d.chunks[i]
	if err == nil && len(p) != int(c.Len) {
		err = fmt.Errorf("store gave %d bytes, the bootstrap says %d", len(p), c.Len)
	}
	var data []byte
	if err == nil {
		data = append(make([]byte, 0, c.Len), p...)
		d.fetched.Add(1)
		d.chunkBytes.Add(int64(c.Len))
	} else {
		err = d.failed(ctx, i, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.flights[i]
	delete(d.flights, i)
	if err == nil {
		d.cache.add(c.Digest, data)
	}
	f.p, f.err = data, err
	close(f.done)
}

// failed counts and tells that chunk i could not be had.
func (d *Device) failed(ctx context.Context, i int, err error) error {
	c := d.chunks[i]
	e := &ReadError{Chunk: c.Digest, Off: d.mapped + c.DevOff, Path: d.pathOf(i), Err: err}
	d.errs.Add(1)
	d.log.ErrorContext(ctx, "chunk cannot be read", "chunk", c.Digest, "path", e.Path, "off", e.Off, "err", err)
	if d.onError != nil {
		d.onError(e)
	}
	return e
}
