package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"quarry/worker/holder"
	"quarry/worker/memory"
	"quarry/worker/sandbox"
)

// A hibernated sandbox is paused, and its memory is a file (docs/decisions/hibernate.md).
// What it was given of the node stays its own, so that a wake is refused for want of room
// on a full disk alone. Its holder says whether it is hibernated; that a call has asked for
// it is a mark in its folder.

// napTurn is how long a sandbox waits until others have been put to disk: one after the
// other, as all write to the same one.
const napTurn = time.Minute

// nap is what a node knows of a hibernation without asking the holder.
type nap struct {
	now   bool
	bytes int64     // on the disk
	tried time.Time // when it was refused for want of room in memory
}

// Hibernate implements sandbox.Node.
func (n *Node) Hibernate(ctx context.Context, id string) error {
	b, err := n.running(ctx, id)
	if err != nil {
		return err
	}
	done, err := n.turnToNap(ctx)
	if err != nil {
		return err
	}
	defer done()
	b.pausing.Lock()
	defer b.pausing.Unlock()
	alone := b.held&byCall == 0
	err = b.hold(byCall)
	if errors.Is(err, holder.ErrBusy) {
		return fmt.Errorf("%w: %w: try again when that is over", sandbox.ErrNotHibernated, err)
	}
	if err != nil {
		return b.explain(ctx, err)
	}
	if err = os.WriteFile(b.askedPath(), nil, 0o600); err == nil {
		err = b.hibernate()
	}
	if errors.Is(err, errLeft) {
		return err // the mark stays: it may be on the disk
	}
	if err != nil {
		err = errors.Join(err, remove(b.askedPath()))
		if alone { // it runs on, unless it waits for its model
			err = errors.Join(err, b.letGo(byCall))
		}
		return b.explain(ctx, err)
	}
	// Neither an answer of its model nor its idleness' end wakes it, nor does the next node.
	return errors.Join(b.noLonger(), b.notIdle())
}

// Wake implements sandbox.Node. Who has resumed a sandbox has also woken it.
func (n *Node) Wake(ctx context.Context, id string) error { return n.Resume(ctx, id) }

// turnToNap waits until no other sandbox is being put to disk.
func (n *Node) turnToNap(ctx context.Context) (done func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, napTurn)
	defer cancel()
	select {
	case n.naps <- struct{}{}:
		return func() { <-n.naps }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: other sandboxes are being put to disk: %w", sandbox.ErrNotHibernated, context.Cause(ctx))
	}
}

// hibernate puts a paused sandbox to disk. b.pausing is held. Refused, it stays paused.
// Errors: sandbox.ErrNotHibernated.
func (b *box) hibernate() error {
	if b.napping() {
		return nil
	}
	began := time.Now()
	size, err := b.putToDisk()
	b.n.c.Naps.hibernated(time.Since(began), resultOf(err))
	if errors.Is(err, holder.ErrNotHibernated) {
		return fmt.Errorf("%w: %w", sandbox.ErrNotHibernated, err)
	}
	if err != nil {
		return err
	}
	b.noteNap(nap{now: true, bytes: size})
	b.tell("hibernated")
	return nil
}

// putToDisk has the holder do it. Nothing reaches the sandbox from before the checkpoint
// until it is woken, or that is refused.
func (b *box) putToDisk() (size int64, err error) {
	if b.n.life.Err() != nil {
		return 0, errLeft
	}
	b.mu.Lock()
	link := b.link
	b.mu.Unlock()
	if link != nil {
		if err := link.Shut(); err != nil {
			return 0, fmt.Errorf("%w: %w", holder.ErrNotHibernated, err)
		}
		b.shut = true
	}
	b.forgetMemory()
	if err = b.cannotNap(b.n.life); err == nil {
		err = b.noteReads()
	}
	if err == nil {
		err = b.alter(0, func(ctx context.Context) error { size, err = b.h.Hibernate(ctx); return err })
	}
	if errors.Is(err, sandbox.ErrInvalid) {
		err = fmt.Errorf("%w: the process that holds it is of an earlier quarry, which could not", holder.ErrNotHibernated)
	}
	if err != nil && !errors.Is(err, errLeft) && !b.ending() {
		b.readyMemory()
		b.offerMemory(true)
		err = errors.Join(err, b.reopen())
	}
	return size, err
}

// noteReads writes down how many reads of the image have failed, before the sandbox is put
// to disk: who serves the image may end meanwhile, and the count with it.
func (b *box) noteReads() error {
	failed, err := b.failedReads()
	b.mu.Lock()
	known := b.j.FailedReads
	b.mu.Unlock()
	if err == nil && failed > known {
		err = b.update(func(j *journal) { j.FailedReads = failed })
	}
	if err != nil {
		return fmt.Errorf("%w: which reads of its image failed is not kept: %w", holder.ErrNotHibernated, err)
	}
	return nil
}

// forgetMemory lets go of the memory of a sandbox that is about to be put to disk: a file
// of it that is open would keep it.
func (b *box) forgetMemory() {
	b.n.waiting.Drop(b.id)
	m := &b.memory
	m.mu.Lock()
	f := m.file
	m.file = nil
	m.mu.Unlock()
	if f != nil {
		f.Close()
	}
}

func resultOf(err error) string {
	switch {
	case err == nil:
		return napDone
	case errors.Is(err, holder.ErrNotHibernated), errors.Is(err, holder.ErrNoRoom):
		return napRefused
	}
	return napFailed
}

// cannotNap says why a sandbox is not put to disk: what the disk has left is for those
// that run, and what was mounted in it while it ran is known to its Sentry alone, so that
// a restore could not give it again.
func (b *box) cannotNap(ctx context.Context) error {
	if low := b.n.diskLow(); low != "" {
		return fmt.Errorf("%w: %s", holder.ErrNotHibernated, low)
	}
	raw, err := b.cat(ctx, "/proc/1/mountinfo")
	if err != nil {
		return fmt.Errorf("%w: what is mounted in it is not known: %w", holder.ErrNotHibernated, err)
	}
	for line := range strings.Lines(string(raw)) {
		before, after, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(before); len(fields) > 4 && strings.HasPrefix(after, "erofs ") {
			return fmt.Errorf("%w: a share that the image has no place for is at %s, and a restore cannot give it again: take it away first", holder.ErrNotHibernated, fields[4])
		}
	}
	return nil
}

func (b *box) ending() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.cause != nil || b.state == sandbox.StateEnding || b.state == sandbox.StateEnded
}

func (b *box) napping() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nap.now
}

func (b *box) noteNap(now nap) {
	b.mu.Lock()
	before := b.nap
	b.nap = now
	b.mu.Unlock()
	b.n.c.Naps.holds(now.bytes - before.bytes)
}

// LongWait is from when on a wait costs more than a hibernation (docs/decisions/hibernate.md).
const LongWait = 5 * time.Minute

// worthANap reports whether a sandbox that waits for so long, as is known, is better put
// to disk: unless it can go to swap on one, where the same bytes lie and wake sooner.
func (n *Node) worthANap(wait time.Duration) bool {
	if wait < LongWait || n.c.PausedMemory != PausedReclaim {
		return false
	}
	r, err := memory.Machine{}.Read()
	return err == nil && (r.SwapFull() || !memory.SwapOnDisk())
}

// napSoon puts a sandbox that was just paused to disk, where every pause is followed by
// that, or it is known that it waits for long. b.pausing is held.
func (b *box) napSoon() {
	switch {
	case b.n.c.PausedMemory == PausedHibernate:
		b.napInTurn(func() bool { return b.held != 0 })
	case b.n.worthANap(b.expected):
		b.napForCall()
	}
}

// napForCall puts a sandbox to disk that a call has paused for long, as long as that pause
// lasts: the next one may be short. b.pausing is held.
func (b *box) napForCall() {
	lets := b.lets
	b.napInTurn(func() bool { return b.held&byCall != 0 && b.lets == lets })
}

// napInTurn puts the sandbox to disk when its turn comes, if that is wanted still.
func (b *box) napInTurn(wanted func() bool) {
	b.n.work.Go(func() { // ends with Close, and bounded by the holder
		done, err := b.n.turnToNap(b.n.life)
		if err != nil {
			if b.n.life.Err() == nil {
				b.n.log.Info("a paused sandbox is not hibernated: others are", "sandbox", b.id, "err", err)
			}
			return
		}
		defer done()
		b.pausing.Lock()
		defer b.pausing.Unlock()
		if !wanted() || b.n.life.Err() != nil {
			return
		}
		if err := b.hibernate(); err != nil && !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, holder.ErrLost) {
			b.n.log.Info("a paused sandbox is not hibernated", "sandbox", b.id, "err", err)
		}
	})
}

func (n *Node) closing() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.closed
}

// takePause finds out why a sandbox of an earlier node is paused, or hibernated, and
// begins to watch it: before it is resumed, as it may ask its next question at once. The
// earlier node may have ended in the middle of a hibernation or a wake, which the holder
// brings to its end: nobody waits for that but who changes the same.
func (b *box) takePause() error {
	b.pausing.Lock()
	b.watchModel()
	b.watchIdle()
	if _, err := os.Lstat(filepath.Join(b.dir, "hibernated")); err != nil {
		defer b.pausing.Unlock()
		b.takeStand()
		return errors.Join(b.afterWake(), remove(b.askedPath()), b.takeHeld())
	}
	b.n.work.Go(func() { // ends with the node's life, or the holder's answer
		defer b.pausing.Unlock()
		var st holder.State
		err := b.alter(0, func(ctx context.Context) (err error) { st, err = b.h.Settled(ctx); return err })
		if err == nil {
			b.mu.Lock()
			b.paused = pausesOf(st, b.n.now())
			b.mu.Unlock()
			b.noteNap(nap{now: st.Hibernated, bytes: st.OnDisk})
			b.takeStand()
			if !st.Hibernated {
				err = errors.Join(b.afterWake(), remove(b.askedPath()))
			}
			err = errors.Join(err, b.takeHeld())
		}
		if err != nil && b.n.life.Err() == nil && !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, holder.ErrLost) {
			b.end(cause{Reason: sandbox.ReasonRuntime, Message: err.Error()})
		}
	})
	return nil
}

// takeStand has the memory of a sandbox taken that stands, and says so to who watches for
// it being idle. b.pausing is held.
func (b *box) takeStand() {
	b.mu.Lock()
	stands, asleep := b.paused.now, b.nap.now
	b.mu.Unlock()
	b.idles().paused(stands)
	if stands && !asleep { // one that is hibernated has none
		b.readyMemory()
		b.offerMemory(true)
	}
}
