package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"quarry/worker"
	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// A command that reads of its image fail under ends in any way: the guest may swallow
// the error, or take it for the truth. So every exec is looked at when it has ended,
// and a mount that nobody serves any more ends its sandboxes.

const (
	// judgePatience bounds the holder's answer when an exec is to be marked.
	judgePatience = 5 * time.Second
	// imagesEvery is how often mounts are looked at. One is given up when it is found
	// dead twice.
	imagesEvery = time.Second
	// maxBlamed bounds the execs whose mark the node knows without their holder.
	maxBlamed = 1024
)

// begin is what an exec is judged by when it has ended.
type begin struct {
	failed int64 // reads of the image that had failed before
	at     time.Time
}

// begins notes how many reads of the image have failed before an exec. The returned
// function takes that back.
func (b *box) begins(exec string) (undo func()) {
	at := b.n.now()
	b.n.lookAtDisk() // it may have room again by the next look
	failed, err := b.failedReads()
	if err != nil {
		failed = -1 // the next count says so
	}
	b.judging.Lock()
	defer b.judging.Unlock()
	if _, known := b.begun[exec]; known {
		return func() {}
	}
	b.begun[exec] = begin{failed, at}
	return func() {
		b.judging.Lock()
		defer b.judging.Unlock()
		delete(b.begun, exec)
	}
}

// watches notes that the end of an exec is awaited, and reports false when it was before.
// Those that even the holder has forgotten are, too.
func (b *box) watches(exec string) bool {
	b.judging.Lock()
	defer b.judging.Unlock()
	if b.watched[exec] {
		return false
	}
	b.watched[exec] = true
	b.inTurn = append(b.inTurn, exec)
	for len(b.inTurn) > 2*holder.KeptExecs {
		oldest := b.inTurn[0]
		b.inTurn = b.inTurn[1:]
		if _, runs := b.begun[oldest]; runs {
			b.inTurn = append(b.inTurn, oldest)
			continue
		}
		delete(b.watched, oldest)
	}
	return true
}

// failedReads counts the reads of the image that failed since the sandbox has it.
func (b *box) failedReads() (int64, error) {
	b.mu.Lock()
	mt, since := b.mount, b.j.Served
	b.mu.Unlock()
	if mt == nil {
		return 0, nil
	}
	return mt.FailedSince(since)
}

// judge says of an exec that has ended whether the image failed under it, and has the
// holder keep that in mind.
func (b *box) judge(ctx context.Context, st sandbox.ExecState) sandbox.ExecState {
	b.mu.Lock()
	runs := b.state == sandbox.StateRunning
	b.mu.Unlock()
	if !final(st) || st.Infra != "" || !runs { // of one that ends its record tells
		return st
	}
	why, first := b.verdict(st.ID)
	st.Infra = why
	if !first {
		return st
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), judgePatience)
	defer cancel()
	if err := b.h.Blame(ctx, st.ID, why); err != nil {
		b.n.log.WarnContext(ctx, "that an image failed under an exec is not kept", "sandbox", b.id, "exec", st.ID, "err", err)
	}
	b.n.events.add(sandbox.Event{At: b.n.now().UTC(), Sandbox: b.id, Type: "image_failed", Exec: st.ID, Message: why})
	return st
}

// verdict says why the node may be to blame for the end of an exec, "" when it is not,
// and whether nobody was told before.
func (b *box) verdict(exec string) (why string, first bool) {
	b.judging.Lock()
	defer b.judging.Unlock()
	if why, known := b.blamed[exec]; known {
		return why, false
	}
	before, known := b.begun[exec]
	if !known {
		return "", false
	}
	delete(b.begun, exec)
	now, err := b.failedReads()
	switch failed := now - max(before.failed, 0); {
	case b.n.wasFull(before.at):
		why = "the node's disk was full while it ran: what the command wrote may have failed for that"
	case errors.Is(err, worker.ErrUnserved):
		why = err.Error() + ", and reads of the image failed"
	case err != nil:
		why = "reads of the image may have failed uncounted: " + err.Error()
	case failed > 0:
		why = fmt.Sprintf("%d reads of the image failed while it ran", failed)
	default:
		return "", false
	}
	if len(b.blamed) < maxBlamed {
		b.blamed[exec] = why
	}
	return why, true
}

// watchImages ends the sandboxes whose image nobody serves any more, until Close.
func (n *Node) watchImages() {
	tick := time.NewTicker(imagesEvery)
	defer tick.Stop()
	dead := map[*box]bool{}
	for {
		select {
		case <-n.life.Done():
			return
		case <-tick.C:
		}
		dead = n.deadImages(dead)
	}
}

// deadImages looks at each mount once, ends the sandboxes that were found without one
// before, and returns those found now.
func (n *Node) deadImages(before map[*box]bool) map[*box]bool {
	type server struct {
		root  string
		pid   int
		start uint64
	}
	looked, found := map[server]error{}, map[*box]bool{}
	for _, b := range n.all() {
		b.mu.Lock()
		mt, s, runs := b.mount, b.j.Served, b.state == sandbox.StateRunning && b.cause == nil && !b.nap.now // for a restore it is mounted anew
		b.mu.Unlock()
		if mt == nil || !runs {
			continue
		}
		k := server{mt.Root(), s.PID, s.Start}
		err, known := looked[k]
		if !known {
			_, err = mt.FailedSince(s)
			looked[k] = err
		}
		if !errors.Is(err, worker.ErrUnserved) {
			continue
		}
		found[b] = true
		if before[b] {
			n.events.add(sandbox.Event{At: n.now().UTC(), Sandbox: b.id, Type: "image_failed", Message: err.Error()})
			b.end(cause{Reason: sandbox.ReasonImageIO, Message: err.Error() + ": nothing more can be read of it"})
		}
	}
	return found
}
