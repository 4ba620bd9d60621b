package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"quarry/nbd"
	"quarry/nbd/attach"
)

// lastPatience is for a read when the reader has been away for the deadline of a
// read: enough to find one that is there again, which the read itself looks for.
// Readers of one page come one after the other, each with a read of its own, when
// the first one's has failed: they must not each wait for the whole deadline.
const lastPatience = 100 * time.Millisecond

var (
	// errDeadline says that a read had no answer in its time.
	errDeadline = errors.New("no answer within the deadline")
	// errCancelled says that the mount is being taken apart.
	errCancelled = errors.New("mount ends")
)

// table remembers the reads that have no answer, in the order they came. A read
// that was sent stays in it until its reply is there as a whole, so that it can
// be sent again when the reader is lost. It is what is attached.
type table struct {
	size     int64
	deadline time.Duration // of a read, from its Start
	counts   *attach.Counts
	wanted   func() // called when a read begins to wait for a reader
	log      *slog.Logger

	mu      sync.Mutex  // guards what follows, and the entries
	client  *nbd.Client // nil while no reader is known
	away    time.Time   // since when there is none
	heard   time.Time   // when a reader last answered anything
	ended   error       // why every read fails from now on
	first   *entry      // the oldest unanswered read
	last    *entry
	waiting int    // of them, those that no reader has been sent
	free    *entry // for the next reads

	poke chan struct{} // wakes watch
}

var _ attach.Starter = (*table)(nil)

// entry is one unanswered read.
type entry struct {
	call  nbd.Call
	read  *attach.Read
	came  time.Time
	with  *nbd.Client // who was asked; nil while it waits
	held  bool        // it is in the table
	older *entry
	newer *entry // also the next free one
}

func newTable(c *nbd.Client, deadline time.Duration, counts *attach.Counts, wanted func(), log *slog.Logger) *table {
	return &table{size: c.Size(), deadline: deadline, counts: counts, wanted: wanted, log: log, client: c, poke: make(chan struct{}, 1)}
}

// Size returns the export's length.
func (t *table) Size() int64 { return t.size }

// Start begins a read; see attach.Starter.
func (t *table) Start(r *attach.Read) { t.start(r, true) }

// start returns the entry when it will not be used again.
func (t *table) start(r *attach.Read, reuse bool) *entry {
	t.mu.Lock()
	if err := t.ended; err != nil {
		t.mu.Unlock()
		t.answer(r, nil, err)
		return nil
	}
	e := t.free
	if e == nil || !reuse {
		e = &entry{}
		e.call.End = func(p []byte, err error) { t.replied(e, p, err, reuse) }
	} else {
		t.free = e.newer
	}
	e.read, e.came, e.call.Off, e.call.N = r, time.Now(), r.Off, r.N
	t.push(e)
	c := t.client
	e.with = c
	if c == nil {
		t.waiting++
	}
	hurry := c == nil && e.came.Sub(t.away) > t.deadline-lastPatience
	t.mu.Unlock()
	if hurry {
		select {
		case t.poke <- struct{}{}:
		default: // it is about to look
		}
	}
	t.ask(c, e)
	return e
}

// ask sends e to c, or wants a reader.
func (t *table) ask(c *nbd.Client, e *entry) {
	if c == nil {
		t.wanted()
		return
	}
	c.Start(&e.call)
}

// push puts e at the end of the table; t.mu is held.
func (t *table) push(e *entry) {
	e.held, e.older, e.newer = true, t.last, nil
	if t.last == nil {
		t.first = e
	} else {
		t.last.newer = e
	}
	t.last = e
}

// take takes e out of the table and reports whether it was in it: the read is
// the caller's to answer then. t.mu is held.
func (t *table) take(e *entry) bool {
	if !e.held {
		return false
	}
	e.held = false
	if e.with == nil {
		t.waiting--
	}
	if e.older == nil {
		t.first = e.newer
	} else {
		e.older.newer = e.newer
	}
	if e.newer == nil {
		t.last = e.older
	} else {
		e.newer.older = e.older
	}
	return true
}

// replied is the end of a call: the whole payload, the reader's error, or the
// loss of the reader, after which the read is sent again.
func (t *table) replied(e *entry, p []byte, err error, reuse bool) {
	t.mu.Lock()
	if err != nil && e.held && t.ended == nil && errors.As(err, new(*nbd.ConnError)) {
		// The connection may have been replaced since the read was sent.
		c := t.client
		if c == e.with {
			c = nil
			t.lose(time.Now())
		}
		e.with = c
		if c == nil {
			t.waiting++
		}
		t.mu.Unlock()
		t.ask(c, e)
		return
	}
	t.heard = time.Now()
	r, mine := e.read, t.take(e)
	if mine && err == nil && reuse {
		// Nobody else knows e, and the thread that shows p is done with it.
		e.newer, t.free = t.free, e
	}
	t.mu.Unlock()
	if mine {
		t.answer(r, p, err)
	}
}

// answer counts what is about to become an EIO.
func (t *table) answer(r *attach.Read, p []byte, err error) {
	if err != nil {
		t.countFailed()
	}
	r.Answer(p, err)
}

func (t *table) countFailed() {
	if err := t.counts.AddFailedRead(); err != nil {
		t.log.Error("failed read not counted", "err", err)
	}
}

// lost says that c is gone: no read is sent to it any more.
func (t *table) lost(c *nbd.Client) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.client == c {
		t.lose(time.Now())
	}
}

// lose says that there is no reader since a moment; t.mu is held.
func (t *table) lose(since time.Time) {
	if t.client != nil {
		t.client, t.away = nil, since
	}
}

// resume sends all reads that wait to c, oldest first, and from now on the others
// too. It returns how many waited.
func (t *table) resume(c *nbd.Client) int {
	t.mu.Lock()
	t.client = c
	var again []*entry
	for e := t.first; e != nil; e = e.newer {
		if e.with == nil {
			e.with = c
			again = append(again, e)
		}
	}
	t.waiting -= len(again)
	t.mu.Unlock()
	if err := t.counts.AddReader(); err != nil {
		t.log.Error("new reader not counted", "err", err)
	}
	for _, e := range again {
		c.Start(&e.call)
	}
	return len(again)
}

// anyWaiting reports whether a read waits for a reader.
func (t *table) anyWaiting() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.waiting > 0
}

// Cancel implements attach.Starter.
func (t *table) Cancel() { t.end(errCancelled) }

// end answers every read with err, now and later.
func (t *table) end(err error) {
	t.mu.Lock()
	if t.ended == nil {
		t.ended = err
	}
	reads := t.takeAll()
	t.mu.Unlock()
	t.fail(reads, err)
}

// refuse answers every read that has no answer with err: a reader is there, and says
// that it cannot serve the image. Later reads have it asked anew.
func (t *table) refuse(err error) {
	t.mu.Lock()
	reads := t.takeAll()
	t.mu.Unlock()
	t.fail(reads, err)
}

// takeAll takes every read, for good; t.mu is held.
func (t *table) takeAll() (reads []*attach.Read) {
	for t.first != nil {
		reads = append(reads, t.takeFirst())
	}
	return reads
}

// takeFirst takes the oldest read, for good; t.mu is held.
func (t *table) takeFirst() *attach.Read {
	e := t.first
	t.take(e)
	if e.with != nil {
		e.with.Abandon(&e.call)
	}
	return e.read
}

func (t *table) fail(reads []*attach.Read, err error) {
	for _, r := range reads {
		t.answer(r, nil, err)
	}
}

// watch answers reads whose time is over, until ctx ends. It sleeps until the
// oldest read's is; that of a later read is later.
func (t *table) watch(ctx context.Context) {
	for {
		reads, deaf, sleep, err := t.overdue(time.Now())
		t.fail(reads, err)
		if deaf != nil {
			t.log.WarnContext(ctx, "reader has answered nothing within the deadline")
			deaf.Close()
		}
		select {
		case <-ctx.Done():
			return
		case <-t.poke:
		case <-time.After(sleep):
		}
	}
}

// overdue takes the reads whose time is over, with the error that they get, and
// tells how long none will be. A reader that has answered nothing since the
// oldest of them came is lost: it is returned for its connection to be closed.
func (t *table) overdue(now time.Time) (reads []*attach.Read, deaf *nbd.Client, sleep time.Duration, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = errDeadline
	for e := t.first; e != nil && !t.due(e).After(now); e = t.first {
		if c := t.client; c != nil && e.with == c && !t.heard.After(e.came) {
			deaf = c
			t.lose(e.came)
		}
		reads = append(reads, t.takeFirst())
	}
	if t.client == nil {
		err = fmt.Errorf("%w: no reader for %v", errDeadline, now.Sub(t.away).Round(time.Millisecond))
	}
	if t.first == nil {
		return reads, deaf, t.deadline, err
	}
	return reads, deaf, t.due(t.first).Sub(now), err
}

// due is when a read's time is over; t.mu is held.
func (t *table) due(e *entry) time.Time {
	due := e.came.Add(t.deadline)
	if t.client != nil {
		return due
	}
	last := t.away.Add(t.deadline) // from then on the reader is taken for gone
	if last.Before(e.came) {
		last = e.came
	}
	if last = last.Add(lastPatience); last.Before(due) {
		return last
	}
	return due
}

// View shows bytes of the export; see attach.Source.
func (t *table) View(ctx context.Context, off int64, n int, fn func(p []byte) error) error {
	done := make(chan error, 1)
	e := t.start(&attach.Read{Off: off, N: n, Answer: func(p []byte, err error) {
		if err == nil {
			err = fn(p)
		}
		done <- err
	}}, false)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	if e != nil && t.drop(e) {
		t.countFailed()
		return ctx.Err()
	}
	return <-done
}

// drop takes a read out of the table for good.
func (t *table) drop(e *entry) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.take(e) {
		return false
	}
	if e.with != nil {
		e.with.Abandon(&e.call)
	}
	return true
}
