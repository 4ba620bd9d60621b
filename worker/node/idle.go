package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"quarry/worker/holder"
	modelwait "quarry/worker/network/wait"
	"quarry/worker/sandbox"
)

const (
	// MinIdlePause is the least idle pause: the processor is looked at in quarters of it.
	MinIdlePause = 100 * time.Millisecond
	// idleAgain is how soon a pause is tried again that the sandbox's holder refused, and
	// how soon a sandbox is looked at again whose files are being read.
	idleAgain = 50 * time.Millisecond
)

// idler pauses a sandbox whose agent is outside of it while the agent has nothing for
// it to do. A nil one does nothing.
type idler struct {
	b *box

	mu    sync.Mutex // guards what follows
	idle  *modelwait.Idle
	looks int           // reads under way that must not keep it awake
	spent time.Duration // of the processor, by such reads
	from  time.Duration // what was spent in all when the first of those under way began
	known bool          // from is
	again bool          // one of them woke it: it is paused again after
	tried time.Time     // when a pause was refused

	kick chan struct{} // Next may be sooner; one is enough
}

// idlePath is an empty file that stands while a sandbox is paused for being idle, so
// that the next node knows that a command wakes it.
func (b *box) idlePath() string { return filepath.Join(b.dir, "idle") }

// watchIdle begins to watch a sandbox that runs for being idle, when its Spec says so.
func (b *box) watchIdle() {
	after := time.Duration(b.j.Asked.IdlePause) * time.Millisecond
	if after <= 0 {
		return
	}
	d := &idler{b: b, idle: modelwait.NewIdle(after, 0, b.n.now()), kick: make(chan struct{}, 1)}
	b.mu.Lock()
	b.idler = d
	b.mu.Unlock()
	b.n.work.Go(d.watch)
}

func (b *box) idles() *idler {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.idler
}

// poke has watch ask for the next time again.
func (d *idler) poke() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// use notes something that the sandbox has to run for, until done is called.
func (d *idler) use() (done func()) {
	if d == nil {
		return func() {}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.again = false
	d.idle.Use()
	return sync.OnceFunc(func() {
		d.mu.Lock()
		d.idle.Done(d.b.n.now())
		d.mu.Unlock()
		d.poke()
	})
}

// rouse is use, and has the sandbox run when it returns without an error.
func (d *idler) rouse() (done func(), err error) {
	done = d.use()
	if d == nil {
		return done, nil
	}
	if err := d.b.wakeIdle(); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// wakeIdle resumes the sandbox if it is paused for being idle.
func (b *box) wakeIdle() error {
	b.pausing.Lock()
	defer b.pausing.Unlock()
	if b.held&byIdle == 0 {
		return nil
	}
	if err := b.letGo(byIdle); err != nil {
		return err
	}
	return remove(b.idlePath())
}

// notIdle forgets that it is paused for being idle: somebody else who has paused it
// resumes it. b.pausing is held.
func (b *box) notIdle() error {
	if b.held&^byIdle == 0 {
		return nil
	}
	b.held &^= byIdle
	return remove(b.idlePath())
}

// look notes a read of the guest's files, until done is called: with tasks it needs the
// guest to run, but it neither counts as use nor does the processor time that it takes.
func (d *idler) look(tasks bool) (done func(), err error) {
	if d == nil {
		return func() {}, nil
	}
	before, err := d.b.processorUsed()
	d.mu.Lock()
	if d.looks == 0 {
		d.from, d.known = before, err == nil
	}
	d.looks++
	d.mu.Unlock()
	done = sync.OnceFunc(func() {
		after, err := d.b.processorUsed()
		d.mu.Lock()
		if d.looks--; d.looks == 0 && d.known && err == nil && after > d.from {
			d.spent += after - d.from
		}
		d.mu.Unlock()
		d.poke()
	})
	if !tasks {
		return done, nil
	}
	d.b.pausing.Lock()
	was := d.b.held&byIdle != 0
	d.b.pausing.Unlock()
	if !was {
		return done, nil
	}
	d.mu.Lock()
	d.again = true
	d.mu.Unlock()
	if err := d.b.wakeIdle(); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// paused notes that the sandbox stands or runs, whoever did that.
func (d *idler) paused(is bool) {
	if d == nil {
		return
	}
	d.mu.Lock()
	d.idle.Paused(is, d.b.n.now())
	d.mu.Unlock()
	d.poke()
}

// next is when to look at the sandbox; zero is not before the next kick.
func (d *idler) next() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := d.idle.Next()
	if at.IsZero() {
		return at
	}
	if d.looks > 0 {
		return d.b.n.now().Add(idleAgain)
	}
	if d.again {
		at = d.b.n.now()
	}
	if again := d.tried.Add(idleAgain); at.Before(again) {
		at = again
	}
	return at
}

// watch pauses the sandbox when it is idle, until it has ended or the node is closed.
func (d *idler) watch() {
	for {
		var due <-chan time.Time
		if at := d.next(); !at.IsZero() {
			due = time.After(at.Sub(d.b.n.now()))
		}
		select {
		case <-d.b.n.life.Done():
			return
		case <-d.b.ask:
			return
		case <-d.b.dead:
			return
		case <-d.b.starved:
			return
		case <-d.kick:
			continue
		case <-due:
		}
		if !d.sample() {
			continue
		}
		if err := d.pause(); err != nil && !errors.Is(err, holder.ErrBusy) {
			d.b.n.log.Debug("an idle sandbox is not paused yet", "sandbox", d.b.id, "err", err)
		}
	}
}

// sample reads what the sandbox has used and says whether to pause it.
func (d *idler) sample() (pause bool) {
	used, err := d.b.processorUsed()
	busy := d.b.asksModel()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.looks > 0 {
		return false
	}
	pause = d.idle.Sample(used-d.spent, err, busy, d.b.n.now())
	if d.again {
		d.again = false
		pause = !busy && err == nil && !d.idle.Next().IsZero()
	}
	return pause
}

// asksModel reports whether an agent in the sandbox waits for the answer of a model
// that is watched: the answer would not resume what is paused for being idle.
func (b *box) asksModel() bool {
	b.mu.Lock()
	x := b.model
	b.mu.Unlock()
	return x != nil && x.Asks()
}

// pause pauses the sandbox if nothing needs it any more, and nobody has.
func (d *idler) pause() error {
	b := d.b
	b.pausing.Lock()
	defer b.pausing.Unlock()
	d.mu.Lock()
	idle := !d.idle.Next().IsZero() && d.looks == 0 // a use that comes now waits for b.pausing
	d.tried = b.n.now()
	d.mu.Unlock()
	if !idle || b.held != 0 || b.asksModel() {
		return nil
	}
	if err := os.WriteFile(b.idlePath(), nil, 0o600); err != nil {
		return err
	}
	err := b.hold(byIdle)
	if err == nil && b.asksModel() { // it has asked just now
		err = b.letGo(byIdle)
	}
	if errors.Is(err, errLeft) {
		return err // the mark stays, as it may stand
	}
	if b.held&byIdle == 0 {
		err = errors.Join(err, remove(b.idlePath()))
	}
	return err
}

// rouse has a sandbox that waits for its model, or is idle, run for what needs its
// tasks, until release is called.
func (b *box) rouse(ctx context.Context) (release func(), err error) {
	done, err := b.idles().rouse()
	if err != nil {
		return nil, err
	}
	return b.useModel(ctx, done)
}

// useModel has a sandbox run that waits for its model, until release is called, which
// calls done too.
func (b *box) useModel(ctx context.Context, done func()) (release func(), err error) {
	if err := b.wakeBefore(); err != nil {
		done()
		return nil, err
	}
	b.mu.Lock()
	x := b.model
	b.mu.Unlock()
	if x == nil {
		return done, nil
	}
	used, err := x.Use(ctx)
	if err != nil {
		done()
		return nil, err
	}
	return func() { used(); done() }, nil
}

// glance is rouse for a read of files, which does not keep an idle sandbox awake.
func (b *box) glance(ctx context.Context) (release func(), err error) {
	done, err := b.idles().look(true)
	if err != nil {
		return nil, err
	}
	return b.useModel(ctx, done)
}

// idlePause fills in when a sandbox is paused for being idle: the node's own time is
// for those whose agent is outside, so that one with a first process of its own must
// ask for it.
func (n *Node) idlePause(s *sandbox.Spec) error {
	if s.IdlePause == 0 && len(s.Entrypoint) == 0 {
		s.IdlePause = n.c.IdlePause.Milliseconds()
	}
	if s.IdlePause > 0 && s.IdlePause < MinIdlePause.Milliseconds() || s.IdlePause > maxSeconds*1000 {
		return invalid("idle_pause_ms %d: want %d or more, or less than 0 for never", s.IdlePause, MinIdlePause.Milliseconds())
	}
	return nil
}

// checkIdlePause holds the node's own time against what one can be.
func checkIdlePause(d time.Duration) error {
	if d < 0 || d > 0 && d < MinIdlePause {
		return fmt.Errorf("idle pause %v: want 0, or %v or more", d, MinIdlePause)
	}
	return nil
}
