package node

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"quarry/worker"
	"quarry/worker/cgroup"
	"quarry/worker/guest"
	"quarry/worker/holder"
	"quarry/worker/network"
	modelwait "quarry/worker/network/wait"
	"quarry/worker/sandbox"
)

// box is one sandbox, from its admission until nothing is left of it. One goroutine
// owns it: it makes it, waits for its end, and takes it apart. All others read what mu
// guards, or ask for its end.
type box struct {
	n     *Node
	id    string
	dir   string
	group *cgroup.Group // nil where control groups cannot be used

	mu      sync.Mutex // guards what follows
	j       journal    // as it is on the disk, but for what is about to be written
	state   sandbox.State
	expires time.Time // in this process's own clock; zero is never
	used    time.Time // when the last exec or file call ended
	busy    int       // execs and file calls under way
	h       *holder.Client
	mount   *worker.Mount
	link    *network.Link
	model   *modelwait.Watched // nil where nobody watches for its model
	idler   *idler             // nil where it is not paused for being idle
	base    *specs.Process     // what the first process has, and execs that do not say
	gifts   []gift
	giving  map[string]bool // targets of shares on their way
	files   *guest.Files
	paused  pauses
	nap     nap
	how     *holder.Ended // how it ended by itself
	cause   *cause        // why the node ends it: the first one holds
	failure error         // why its create failed

	judging sync.Mutex        // guards what follows
	begun   map[string]begin  // execs that run
	blamed  map[string]string // execs under which the image failed
	watched map[string]bool   // execs whose end is awaited, or told
	inTurn  []string          // the same, as they came

	pausing  sync.Mutex    // held over a Pause or Resume, so that what is known follows what is; guards held
	held     want          // who wants it paused
	lets     int           // how often a call has let go of it
	expected time.Duration // for how long it is being paused; 0 is not known
	shut     bool          // no packet reaches it, for a hibernation

	memory boxMemory

	unsaved *record // of its end, when that could not be written; the owner's alone
	strays  bool    // processes of it may run that neither holder nor group knows; the owner's alone

	ask     chan struct{} // closed when there is a cause
	dead    chan struct{} // closed when the sandbox or its holder has ended
	starved chan struct{} // closed when the kernel has killed a part of it for memory
	wake    chan struct{} // tells the owner to look at its timers again
	settled chan struct{} // closed when the create has succeeded or failed
	over    chan struct{} // closed when its record stands
	gone    chan struct{} // closed when nothing is left of it, or that has taken too long
}

func (n *Node) newBox(j journal) *box {
	b := &box{
		n: n, id: j.ID, dir: filepath.Join(n.c.boxesDir(), j.ID), j: j, state: sandbox.StateCreating, used: n.now(),
		watched: map[string]bool{}, begun: map[string]begin{}, blamed: map[string]string{}, ask: make(chan struct{}), dead: make(chan struct{}), starved: make(chan struct{}), wake: make(chan struct{}, 1), settled: make(chan struct{}), over: make(chan struct{}), gone: make(chan struct{}),
	}
	if n.tree != nil {
		b.group = n.tree.Group(j.ID)
	}
	if j.Expires != nil {
		b.expires = *j.Expires
	}
	return b
}

// tell adds an event.
func (b *box) tell(kind string) {
	b.n.events.add(sandbox.Event{At: b.n.now().UTC(), Sandbox: b.id, Type: kind})
}

// update changes the journal, on the disk first: what a caller was told is known to
// the next node too.
func (b *box) update(change func(*journal)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := b.j
	change(&next)
	if err := next.write(b.dir); err != nil {
		return fmt.Errorf("journal of sandbox %s: %w", b.id, err)
	}
	b.j = next
	return nil
}

// end asks for the sandbox's end. Only the first cause counts.
func (b *box) end(c cause) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cause != nil || b.state == sandbox.StateEnded {
		return
	}
	c.At = b.n.now().UTC()
	b.cause = &c
	close(b.ask)
}

// poke has the owner look at its timers again.
func (b *box) poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// use notes that somebody uses the sandbox, until the returned function is called.
func (b *box) use() (done func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.busy++
	return sync.OnceFunc(func() {
		b.mu.Lock()
		b.busy--
		b.used = b.n.now()
		b.mu.Unlock()
		b.poke()
	})
}

// deadline is when the node is to end the sandbox, and what for; zero is never.
func (b *box) deadline() (time.Time, cause) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at, why := b.expires, cause{Reason: sandbox.ReasonTTL, Limit: "ttl", Message: fmt.Sprintf("its time was over after %d seconds", b.j.Asked.TTL)}
	if b.j.Asked.Idle > 0 && b.busy == 0 {
		idle := b.used.Add(time.Duration(b.j.Asked.Idle) * time.Second)
		if at.IsZero() || idle.Before(at) {
			at, why = idle, cause{Reason: sandbox.ReasonIdle, Limit: "idle", Message: fmt.Sprintf("nobody used it for %d seconds", b.j.Asked.Idle)}
		}
	}
	return at, why
}

// own makes the sandbox, waits for its end and takes it apart.
func (b *box) own(create bool) {
	if create {
		b.create()
		if b.failed() == nil {
			b.tell("running")
		}
		close(b.settled)
	}
	if b.failed() == nil && !b.supervise() {
		return // the node is closed, and leaves it running
	}
	b.finish()
}

func (b *box) failed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failure
}

// supervise waits until the sandbox has ended or is to be ended. It reports false when
// the node is closed.
func (b *box) supervise() bool {
	ctx, cancel := context.WithCancel(b.n.life)
	defer cancel()
	if b.group != nil {
		go func() { // ends with ctx
			err := b.group.AwaitOOM(ctx)
			if err == nil {
				close(b.starved)
			} else if ctx.Err() == nil {
				b.n.log.WarnContext(ctx, "the memory of a sandbox is not watched", "sandbox", b.id, "err", err)
			}
		}()
	}
	for {
		at, why := b.deadline()
		var timer <-chan time.Time
		if !at.IsZero() {
			left := at.Sub(b.n.now())
			if left <= 0 {
				b.end(why)
				return true
			}
			timer = time.After(left)
		}
		select {
		case <-b.ask:
			return true
		case <-b.dead:
			return true
		case <-b.starved:
			return true
		case <-b.n.life.Done():
			return false
		case <-b.wake:
		case <-timer:
		}
	}
}

// view is what callers are told.
func (b *box) view() sandbox.Sandbox {
	b.mu.Lock()
	s := b.j.sandbox()
	s.State = b.state
	link := b.link
	s.Pauses, s.PausedFor = b.paused.count, b.paused.total(b.n.now()).Milliseconds()
	if b.paused.now && s.State == sandbox.StateRunning {
		s.State = sandbox.StatePaused
		if b.nap.now {
			s.State = sandbox.StateHibernated
		}
	}
	if !b.expires.IsZero() {
		at := b.expires.UTC().Round(0)
		s.Expires = &at
	}
	b.mu.Unlock()
	if link != nil {
		s.Network = link.State()
	}
	return s
}

// sandbox is what the journal says of it.
func (j journal) sandbox() sandbox.Sandbox {
	a := j.Asked
	return sandbox.Sandbox{
		ID: j.ID, State: sandbox.StateCreating, Image: a.Image, ImageDigest: j.ImageDigest, ImageID: j.ImageID,
		CPUMilli: a.CPUMilli, MemoryMB: a.MemoryMB, DiskMB: a.DiskMB, OutputMB: a.OutputMB, PIDs: a.PIDs,
		Labels: a.Labels, Group: a.Group, Role: a.Role, Created: j.Created, Expires: j.Expires,
		Network: sandbox.Network{Policy: j.Policy, Generation: j.Generation, Applied: j.Generation},
		Timings: maps.Clone(j.Timings),
	}
}

// wait returns when ch is closed, or ctx ends.
func wait(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
