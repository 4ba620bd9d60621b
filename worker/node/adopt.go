package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/worker/sandbox"
)

const (
	// adoptAtOnce is how many sandboxes a node adopts side by side.
	adoptAtOnce = 16
	// adoptPatience bounds the adoption of one: its holder answers at once, or is
	// stopped, or has ended.
	adoptPatience = 10 * time.Second
)

// adoptAll takes over what an earlier node has left: what runs goes on, everything
// else is ended with a record. It returns when it is known what becomes of each.
func (n *Node) adoptAll(ctx context.Context) error {
	entries, err := os.ReadDir(n.c.boxesDir())
	if err != nil {
		return err
	}
	var g errgroup.Group
	g.SetLimit(adoptAtOnce)
	for _, e := range entries {
		if !idPattern.MatchString(e.Name()) {
			n.log.WarnContext(ctx, "not a sandbox's folder, and left alone", "path", filepath.Join(n.c.boxesDir(), e.Name()))
			continue
		}
		g.Go(func() error { n.adopt(ctx, e.Name()); return nil })
	}
	g.Wait()
	n.sweep(ctx)
	return ctx.Err()
}

// adopt takes over one sandbox's folder.
func (n *Node) adopt(ctx context.Context, id string) {
	dir := filepath.Join(n.c.boxesDir(), id)
	j, err := readJournal(dir)
	n.mu.Lock()
	r, recorded := n.ended[id]
	n.mu.Unlock()
	known := err == nil
	if !known {
		// Nothing but the folder is made before the journal. One that is damaged names
		// nothing to adopt, and may have left anything.
		if !errors.Is(err, fs.ErrNotExist) {
			n.log.ErrorContext(ctx, "the journal of a sandbox cannot be read; the sandbox is ended", "err", err)
		}
		j = journal{Version: journalVersion, ID: id, Boot: n.boot, Phase: phaseCreating, Created: n.now().UTC().Round(0), Timings: map[string]int64{}}
	}
	b := n.newBox(j)
	b.strays = true
	close(b.settled)
	if mt, err := n.c.Worker.Inherited(j.Ref); err == nil {
		b.mount = mt
	}
	n.mu.Lock()
	n.boxes[id] = b
	if !recorded && j.Key != "" {
		n.keys[j.Key] = keyed{id: id, body: j.Body}
	}
	n.mu.Unlock()
	if recorded || !known && errors.Is(err, fs.ErrNotExist) { // only its remains
		b.state = sandbox.StateEnded
		close(b.over)
		if recorded && r.Sandbox.End == nil {
			panic("a record without an end was loaded")
		}
		n.work.Go(func() { b.clean(context.Background()) })
		return
	}
	n.ledger.adopt(amountOf(j.Asked))
	if err := b.takeOver(ctx, known); err != nil {
		n.log.WarnContext(ctx, "a sandbox of an earlier node is ended", "sandbox", id, "err", err)
	}
	n.work.Go(func() { b.own(false) })
}

// takeOver finds the holder of a sandbox and what it stands on, or sets why it is to
// be ended.
func (b *box) takeOver(ctx context.Context, known bool) error {
	lost := func(reason, message string) error {
		b.failure = errLost
		if b.j.Phase == phaseRunning {
			b.failure = nil
		}
		b.end(cause{Reason: reason, Message: message})
		return errors.New(message)
	}
	switch {
	case !known:
		return lost(sandbox.ReasonNodeLost, "its journal is damaged")
	case b.j.Phase == phaseEnding:
		c := *b.j.Cause
		b.end(c)
		switch c.Reason {
		case sandbox.ReasonCreateFailed, sandbox.ReasonImage, sandbox.ReasonVerify:
			b.failure = errLost // so that its key is free
		}
		b.connect(ctx)
		return nil
	case b.j.Phase == phaseCreating && (len(b.j.Asked.Shares) > 0 || len(b.j.Asked.Network.Allow) > 0):
		// It may run without what it was to be given once it runs.
		b.connect(ctx)
		return lost(sandbox.ReasonCreateFailed, "the node ended while the sandbox was made")
	case b.j.Boot != b.n.boot:
		return lost(sandbox.ReasonNodeLost, "the machine was started anew while it ran")
	}
	if err := b.connect(ctx); err != nil {
		if b.j.Phase == phaseCreating {
			return lost(sandbox.ReasonCreateFailed, "the node ended while the sandbox was made")
		}
		close(b.dead) // how it ended may stand in its folder
		return fmt.Errorf("its holder does not answer: %w", err)
	}
	if b.n.c.Network != nil {
		l, err := b.n.c.Network.Adopt(ctx, b.id)
		if err != nil {
			return lost(sandbox.ReasonNetwork, "its network policy could not be put in force again: "+err.Error())
		}
		b.link = l
	}
	if err := b.adopted(); err != nil {
		return lost(sandbox.ReasonNodeLost, err.Error())
	}
	b.mendMemory()
	if err := b.takePause(); err != nil {
		return lost(sandbox.ReasonRuntime, err.Error())
	}
	b.mu.Lock()
	b.state = sandbox.StateRunning
	b.mu.Unlock()
	b.watchAll(ctx)
	return nil
}

// adopted notes that the sandbox has another node. On a full disk the journal has it with
// its next change: what the next node could miss is how many nodes there were, and that
// the create of one that runs has succeeded, which it finds out as this one did.
func (b *box) adopted() error {
	change := func(j *journal) { j.Phase = phaseRunning; j.Restarts++ }
	err := b.update(change)
	if !isFull(err) {
		return err
	}
	b.n.log.Warn("that a sandbox is adopted is not written down: the disk is full", "sandbox", b.id, "err", err)
	b.mu.Lock()
	change(&b.j)
	b.mu.Unlock()
	return nil
}

// watchAll waits for the ends of the execs that run: a sandbox that has one is not
// idle.
func (b *box) watchAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, adoptPatience)
	defer cancel()
	list, err := b.h.Execs(ctx)
	if err != nil {
		b.n.log.WarnContext(ctx, "the execs of a sandbox are not known, and do not count as its use", "sandbox", b.id, "err", err)
		return
	}
	for _, st := range list {
		b.watches(st.ID)
		if !final(st) {
			b.judging.Lock()
			b.begun[st.ID] = begin{at: st.Started} // every read that failed since the sandbox has the image counts: when is not known
			b.judging.Unlock()
			b.await(st, b.use())
		}
	}
}

// errLost says that a sandbox was not made when an earlier node ended.
var errLost = fmt.Errorf("%w: the node ended while the sandbox was made", sandbox.ErrRuntime)

// sweep removes networks and control groups that no sandbox has: of folders that
// somebody has removed.
func (n *Node) sweep(ctx context.Context) {
	n.mu.Lock()
	live := make([]string, 0, len(n.boxes))
	has := map[string]bool{}
	for id := range n.boxes {
		live = append(live, id)
		has[id] = true
	}
	n.mu.Unlock()
	if n.c.Network != nil {
		if err := n.c.Network.Sweep(ctx, live); err != nil {
			n.log.WarnContext(ctx, "networks without a sandbox stay", "err", err)
		}
	}
	if n.tree == nil {
		return
	}
	names, err := n.tree.List()
	for _, id := range names {
		if has[id] {
			continue
		}
		g := n.tree.Group(id)
		ctx, cancel := context.WithTimeout(ctx, endPatience)
		err = errors.Join(err, g.Kill(ctx), g.Remove(ctx))
		cancel()
	}
	if err != nil {
		n.log.WarnContext(ctx, "control groups without a sandbox stay", "err", err)
	}
}
