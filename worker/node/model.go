package node

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"quarry/worker/holder"
	modelwait "quarry/worker/network/wait"
	"quarry/worker/sandbox"
)

// want is who wants a sandbox paused. It is resumed when nobody does any more.
type want int

const (
	byCall   want = 1 << iota // the API
	byModel                   // it waits for its model
	byIdle                    // its agent, which is outside of it, has nothing for it to do
	byBefore                  // an earlier node, for its model: whose answer nobody sees
)

const (
	// findEndpoints is how often the names of endpoints are asked for.
	findEndpoints = time.Minute
	// findPatience bounds one question.
	findPatience = 10 * time.Second
	// usagePatience bounds a question to the Sentry where there is no control group.
	usagePatience = time.Second
)

// waitingPath is an empty file that stands while a sandbox is paused for its model. A
// node that finds it cannot know whether the answer has come: it resumes the sandbox.
func (b *box) waitingPath() string { return filepath.Join(b.dir, "waiting") }

// beginWaits begins to watch for sandboxes that wait for their model.
func (n *Node) beginWaits(ctx context.Context) error {
	if len(n.c.ModelEndpoints) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, findPatience)
	defer cancel()
	ends, err := modelwait.Resolve(ctx, net.DefaultResolver, n.c.ModelEndpoints)
	if err != nil {
		return err
	}
	name := sha256.Sum256([]byte(n.c.Dir.Path()))
	n.waits, err = modelwait.New(modelwait.Config{Name: fmt.Sprintf("quarry-wait-%x", name[:3]), Endpoints: ends, Metrics: n.c.Waits, Log: n.log})
	if err != nil {
		return fmt.Errorf("watch for sandboxes that wait for their model: %w", err)
	}
	return nil
}

// followEndpoints keeps the endpoints where their names lead.
func (n *Node) followEndpoints() {
	for {
		select {
		case <-n.life.Done():
			return
		case <-time.After(findEndpoints):
		}
		ctx, cancel := context.WithTimeout(n.life, findPatience)
		ends, err := modelwait.Resolve(ctx, net.DefaultResolver, n.c.ModelEndpoints)
		cancel()
		if err == nil {
			err = n.waits.SetEndpoints(ends)
		}
		if err != nil && n.life.Err() == nil {
			n.log.WarnContext(n.life, "the endpoints of models are not known anew", "err", err)
		}
	}
}

// watchModel begins to watch a sandbox that runs.
func (b *box) watchModel() {
	b.mu.Lock()
	link := b.link
	b.mu.Unlock()
	if b.n.waits == nil || link == nil || link.Veth == "" {
		return
	}
	x, err := b.n.waits.Watch(modelwait.Sandbox{
		ID: b.id, Veth: link.Veth, Addr: link.Addr, CPU: b.processorUsed,
		Pause: b.pauseForModel, Resume: b.resumeForModel,
	})
	if err != nil {
		b.n.log.Warn("a sandbox is not paused while it waits for its model", "sandbox", b.id, "err", err)
		return
	}
	b.mu.Lock()
	b.model = x
	b.mu.Unlock()
}

// unwatchModel ends the watch. A sandbox that is paused for its model runs then.
func (b *box) unwatchModel() {
	b.mu.Lock()
	x := b.model
	b.model = nil
	b.mu.Unlock()
	if x != nil {
		x.Close()
	}
}

// closeWaits ends all watches, before the node does.
func (n *Node) closeWaits() {
	if n.waits == nil {
		return
	}
	if err := n.waits.Close(); err != nil {
		n.log.Warn("the watch for sandboxes that wait for their model did not end well", "err", err)
	}
}

func (b *box) processorUsed() (time.Duration, error) {
	if b.group != nil {
		f, err := b.group.Read()
		return f.CPU, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), usagePatience)
	defer cancel()
	u, err := b.h.Usage(ctx)
	return time.Duration(u.CPUNanos), err
}

func (b *box) pauseForModel(ctx context.Context) error {
	b.pausing.Lock()
	defer b.pausing.Unlock()
	if err := ctx.Err(); err != nil {
		return err // the answer has come
	}
	if err := os.WriteFile(b.waitingPath(), nil, 0o600); err != nil {
		return err
	}
	err := b.hold(byModel)
	if errors.Is(err, errLeft) {
		return err // the mark stays, as it may stand
	}
	if err != nil || b.held&byCall != 0 {
		err = errors.Join(err, b.noLonger())
	}
	err = errors.Join(err, b.notIdle()) // the answer resumes it
	if err != nil && b.held&byModel != 0 {
		err = errors.Join(err, b.letGo(byModel)) // who watches takes it for running
	}
	return err
}

func (b *box) resumeForModel(_ context.Context, w modelwait.Wake) error {
	b.pausing.Lock()
	defer b.pausing.Unlock()
	if b.napping() && b.n.closing() {
		return nil // the next node wakes it
	}
	err := b.letGo(byModel)
	if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, holder.ErrLost) || errors.Is(err, errLeft) {
		return nil // there is nothing to resume, or the next node does it
	}
	if err == nil {
		err = b.noLonger()
	}
	if err == nil {
		b.n.log.Debug("a sandbox runs again", "sandbox", b.id, "why", w.Why, "after", time.Since(w.Seen))
	}
	return err
}

// noLonger removes the mark of a pause for the model.
func (b *box) noLonger() error { return remove(b.waitingPath()) }

// remove removes a file that need not be there.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// hold pauses the sandbox for somebody. b.pausing is held.
func (b *box) hold(who want) error {
	if b.held == 0 {
		b.readyMemory()
		err := b.alter(settleTime, func(ctx context.Context) error { return b.h.Pause(ctx, false) })
		if err != nil {
			return err
		}
		if b.notePause(true) {
			b.idles().paused(true)
			b.tell("paused")
		}
		b.offerMemory(false)
		b.napSoon()
	}
	b.held |= who
	return nil
}

// letGo resumes the sandbox if nobody else wants it paused. b.pausing is held.
func (b *box) letGo(who want) error {
	if who&byCall != 0 {
		b.lets++
	}
	if left := b.held &^ who; left != 0 {
		b.held = left
		return nil
	}
	b.bringBack()
	if err := b.runOn(); err != nil {
		return err
	}
	b.held = 0
	if b.notePause(false) {
		b.idles().paused(false)
		b.tell("resumed")
	}
	return nil
}

// takeHeld finds out why a sandbox of an earlier node is paused. One that waited for its
// model is resumed: nobody saw its packets in between. b.pausing is held.
func (b *box) takeHeld() error {
	if _, err := os.Lstat(b.waitingPath()); err == nil {
		err := b.letGo(byModel)
		if notYet(err) { // it is on a disk that is full, say
			b.held = byBefore
			b.n.work.Go(b.wakeWithRoom)
			return nil
		}
		if err != nil {
			return fmt.Errorf("resume what an earlier node paused for its model: %w", err)
		}
		return b.noLonger()
	}
	b.mu.Lock()
	stands := b.paused.now
	b.mu.Unlock()
	_, err := os.Lstat(b.idlePath())
	switch {
	case !stands:
		return remove(b.idlePath())
	case err == nil && b.idles() != nil:
		b.held = byIdle
	default:
		b.held = byCall
	}
	return nil
}

// notYet reports whether a restore was not begun, and may be later.
func notYet(err error) bool {
	return errors.Is(err, sandbox.ErrCapacity) || errors.Is(err, errNotBegun)
}

// wakeBefore resumes a sandbox that an earlier node has paused for its model.
func (b *box) wakeBefore() error {
	if !b.napping() { // else it would run
		return nil
	}
	b.pausing.Lock()
	defer b.pausing.Unlock()
	if b.held&byBefore == 0 {
		return nil
	}
	if err := b.letGo(byBefore); err != nil {
		return err
	}
	return b.noLonger()
}

// wakeWithRoom resumes a sandbox that an earlier node has paused for its model as soon as
// there is what that wants, such as room on the disk, unless somebody needs it before: it
// ends with that, the sandbox, or the node's life.
func (b *box) wakeWithRoom() {
	for {
		select {
		case <-b.n.life.Done():
			return
		case <-b.over:
			return
		case <-time.After(roomEvery):
		}
		err := b.wakeBefore()
		if notYet(err) {
			continue
		}
		if err != nil && !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, holder.ErrLost) && !errors.Is(err, errLeft) {
			b.n.log.Warn("a sandbox that an earlier node paused for its model is not resumed", "sandbox", b.id, "err", err)
		}
		return
	}
}

// roomEvery is how often the disk is looked at for a sandbox that waits for room on it.
const roomEvery = 5 * time.Second

// checkEndpoints says whether a list can be of endpoints.
func checkEndpoints(list []string) error {
	i := slices.IndexFunc(list, func(s string) bool { _, _, err := net.SplitHostPort(s); return err != nil })
	if i >= 0 {
		return fmt.Errorf("model endpoint %q: want HOST:PORT", list[i])
	}
	return nil
}
