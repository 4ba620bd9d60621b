package blockdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"quarry/store"
	"quarry/store/chunk"
)

// foreignPatience is what a read waits for a chunk that another device fetches,
// from a store that may be another: after that it asks its own.
const foreignPatience = 5 * time.Second

// ReadError says which chunk a read needed and could not get.
type ReadError struct {
	Chunk   chunk.Digest
	Off     int64         // of the chunk in the flattened device
	Path    string        // first file of the image that uses it; "" when not known
	Outcome store.Outcome // why, in a word
	Err     error
}

func (e *ReadError) Error() string {
	return fmt.Sprintf("read chunk %s of %s: %v", e.Chunk, e.Path, e.Err)
}

// Unwrap returns the store's error.
func (e *ReadError) Unwrap() error { return e.Err }

// wait is a piece's interest in a flight.
type wait struct {
	pc     piece
	f      *flight
	joined bool // the flight was begun by another read
}

// demand answers pieces that neither memory nor the blocks on the disk could.
func (d *Device) demand(ctx context.Context, pieces []piece) error {
	start := time.Now()
	var foreign map[chunk.Digest]bool // chunks that other devices have failed to get
	for len(pieces) > 0 {
		waits, err := d.join(ctx, pieces, foreign)
		if err != nil {
			return err
		}
		pieces = nil
		for _, w := range waits {
			err := d.await(ctx, w)
			switch {
			case err == nil:
				copy(w.pc.p, w.f.p[w.pc.in:])
				if d.memory.given(w.f.d, w.pc.in, int64(len(w.pc.p))) {
					d.used(w.f.d)
				}
				d.count.read(w.f.tier, len(w.pc.p))
				d.slow.note(w.pc.i, w.f.tier, start)
			case w.f.owner != d:
				if foreign == nil {
					foreign = map[chunk.Digest]bool{}
				}
				foreign[w.f.d] = true
				pieces = append(pieces, w.pc)
			// A fetch that another read began may be near the end of its time; that
			// is no reason to fail a read that has just come.
			case w.joined && errors.Is(err, context.DeadlineExceeded) && time.Since(start) < d.timeout:
				pieces = append(pieces, w.pc)
			default:
				d.slow.note(w.pc.i, "", start)
				return err
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// await waits for a flight. Errors: the flight's, ctx's, ErrClosed, and for a
// flight of another device errForeign.
func (d *Device) await(ctx context.Context, w wait) error {
	var patience <-chan time.Time
	if w.f.owner != d {
		t := time.NewTimer(foreignPatience)
		defer t.Stop()
		patience = t.C
	}
	select {
	case <-w.f.done:
	case <-ctx.Done():
		return ctx.Err()
	case <-d.gone:
		return ErrClosed
	case <-patience:
		return errForeign
	}
	if w.f.err != nil {
		return w.f.err
	}
	if have, want := len(w.f.p), d.chunks[w.pc.i].Len; have != int(want) {
		return d.failed(ctx, w.pc.i, wrongLength(w.f.d, have, want))
	}
	return nil
}

// errForeign says that another device did not get a chunk in time.
var errForeign = errors.New("another image's fetch takes long")

// wrongLength says that a chunk has another length than the bootstrap says.
func wrongLength(d chunk.Digest, have int, want uint32) error {
	return &store.CorruptError{Want: d, Err: fmt.Errorf("it has %d bytes, the bootstrap says %d", have, want)}
}

// join finds or begins the flight of every piece's chunk; chunks of alone are not
// left to other devices.
func (d *Device) join(ctx context.Context, pieces []piece, alone map[chunk.Digest]bool) ([]wait, error) {
	m := d.memory
	waits := make([]wait, 0, len(pieces))
	var mine []*flight
	m.mu.Lock()
	for _, pc := range pieces {
		c := d.chunks[pc.i]
		f, joined := m.flights[c.Digest]
		if h := m.at[c.Digest]; h != nil && len(h.p) == int(c.Len) { // it has just come
			f, joined = &flight{d: c.Digest, owner: d, done: closedChan, p: h.p, tier: TierMemory}, false
		} else if !joined || f.owner != d && alone[c.Digest] {
			if joined {
				d.count.hedged.add(int64(c.Len))
			}
			f, joined = &flight{d: c.Digest, i: pc.i, owner: d, done: make(chan struct{}), other: f}, false
			m.flights[c.Digest] = f
			mine = append(mine, f)
		}
		waits = append(waits, wait{pc, f, joined})
	}
	m.mu.Unlock()
	if len(mine) == 0 {
		return waits, nil
	}
	d.demanding(1)
	started := d.start(ctx, func(ctx context.Context) {
		defer d.demanding(-1)
		d.get(ctx, mine)
	})
	if !started {
		d.demanding(-1)
		for _, f := range mine {
			m.fail(f, ErrClosed)
		}
		return nil, ErrClosed
	}
	return waits, nil
}

var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// start runs a fetch in the background, under a deadline of its own: the read
// that began it may be cancelled while others wait. It reports false when the
// device is closed.
func (d *Device) start(ctx context.Context, fetch func(ctx context.Context)) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.timeout)
	d.running[&cancel] = struct{}{}
	d.fetching.Go(func() { // ends with its deadline, at the latest
		defer func() {
			cancel()
			d.mu.Lock()
			delete(d.running, &cancel)
			d.mu.Unlock()
		}()
		fetch(ctx)
	})
	return true
}

// get ends flights: from the disk, with what is on its way already, and from the
// store.
func (d *Device) get(ctx context.Context, mine []*flight) {
	if d.disk != nil {
		rest := mine[:0]
		for _, f := range mine {
			if p := d.load(ctx, f.i); p != nil {
				d.memory.arrive(arrival{d: f.d, p: p, tier: TierDisk, flight: f})
			} else {
				rest = append(rest, f)
			}
		}
		mine = rest
	}
	onWay, missing := d.memory.met(mine)
	var g sync.WaitGroup // ends before the fetch that it is a part of
	if len(onWay) > 0 {
		g.Go(func() { d.hedged(ctx, onWay) })
	}
	if len(missing) > 0 {
		d.fetch(ctx, request{demanded: missing, ahead: d.neighbours(missing)})
	} else if len(onWay) > 0 {
		d.fetchAhead(mine[0].i)
	}
	g.Wait()
}

// request is one request to the store.
type request struct {
	demanded []*flight
	ahead    []*coming // chunks that nobody has asked for, announced, of one bringer
	patient  bool      // those wait for room in memory
}

// took notes that so many bytes of the request have come, or that it is sent.
func (rq request) took(n int64) {
	if len(rq.ahead) > 0 {
		rq.ahead[0].by.took(n)
	}
}

// fetch makes a request: what reads wait for stands first in it, and each chunk is
// given on as it comes.
func (d *Device) fetch(ctx context.Context, rq request) error {
	flights := make(map[chunk.Digest]*flight, len(rq.demanded))
	ahead := make(map[chunk.Digest]*coming, len(rq.ahead))
	digests := make([]chunk.Digest, 0, len(rq.demanded)+len(rq.ahead))
	var total int64
	for _, f := range rq.demanded {
		digests, flights[f.d] = append(digests, f.d), f
		total += int64(d.chunks[f.i].Len)
	}
	for _, c := range rq.ahead {
		digests, ahead[c.d] = append(digests, c.d), c
	}
	total = min(total, maxFetchBytes)
	err := d.budget.Acquire(ctx, total)
	if err == nil {
		release := sync.OnceFunc(func() { d.budget.Release(total) })
		defer release()
		d.count.requests.Add(1)
		rq.took(0)
		err = d.src.GetBatch(ctx, digests, func(digest chunk.Digest, p []byte, err error) error {
			if f := flights[digest]; f != nil {
				delete(flights, digest)
				rq.took(int64(d.chunks[f.i].Len))
				d.came(ctx, f, p, err)
				if len(flights) == 0 {
					release()
				}
			} else if c := ahead[digest]; c != nil {
				delete(ahead, digest)
				rq.took(int64(d.chunks[c.i].Len))
				d.cameAhead(c, p, err, rq.patient)
			}
			return nil
		})
	}
	missing := err
	if missing == nil {
		missing = errors.New("store gave no answer")
	}
	for _, f := range flights {
		d.came(ctx, f, nil, missing)
	}
	for _, c := range ahead {
		d.cameAhead(c, nil, missing, rq.patient)
	}
	return err
}

// came ends a flight. p is copied: it is the store's.
func (d *Device) came(ctx context.Context, f *flight, p []byte, err error) {
	c := d.chunks[f.i]
	if err == nil && len(p) != int(c.Len) {
		err = wrongLength(c.Digest, len(p), c.Len)
	}
	if err != nil {
		if !isClosed(f.done) { // it has not come another way
			d.memory.fail(f, d.failed(ctx, f.i, err))
		}
		return
	}
	own := bytes.Clone(p) // which clears no memory, as make does
	d.count.store.fetched.add(int64(len(p)))
	if got := d.arrive(arrival{d: c.Digest, p: own, tier: TierStore, flight: f}); got.fresh {
		d.offer(c.Digest, own, false)
	}
}

// cameAhead keeps a chunk that was fetched before a read asked for it. It fails
// nobody: a read that waits for it asks by itself.
func (d *Device) cameAhead(c *coming, p []byte, err error, patient bool) {
	length := d.chunks[c.i].Len
	defer d.memory.ahead.give(int64(length))
	if err != nil || len(p) != int(length) {
		d.count.ahead.failed.Add(1)
		d.memory.unexpect(c)
		return
	}
	own := bytes.Clone(p) // which clears no memory, as make does
	d.count.store.fetched.add(int64(len(p)))
	d.count.ahead.fetched.add(int64(len(p)))
	a := arrival{d: c.d, p: own, tier: TierStore, coming: c, ahead: &d.count.ahead, patient: patient}
	if got := d.arrive(a); got.fresh {
		d.offer(c.d, own, !got.waited)
	}
}

// arrive gives on a chunk that a store gave.
func (d *Device) arrive(a arrival) arrived {
	got := d.memory.arrive(a)
	if got.again {
		d.count.twice.add(int64(len(a.p)))
	}
	return got
}

// failed counts and tells that chunk i could not be had.
func (d *Device) failed(ctx context.Context, i int, err error) error {
	select {
	case <-d.gone:
		return ErrClosed
	default:
	}
	c := d.chunks[i]
	e := &ReadError{Chunk: c.Digest, Off: d.mapped + c.DevOff, Path: d.paths.of(i), Outcome: store.OutcomeOf(err), Err: err}
	if e.Outcome == "" { // nobody of ours went away
		e.Outcome = store.Unreachable
	}
	d.count.errs.Add(1)
	d.log.ErrorContext(ctx, "chunk cannot be read", "chunk", c.Digest, "path", e.Path, "outcome", e.Outcome, "off", e.Off, "err", err)
	if d.onError != nil {
		d.onError(e)
	}
	return e
}
