package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

const (
	// aliveEvery is how often a sandbox's holder and Sentry are asked whether they
	// answer, alivePatience how long that is waited for, and aliveMisses how often in
	// turn they may not: a machine that is short of everything answers late.
	aliveEvery    = 30 * time.Second
	alivePatience = 20 * time.Second
	aliveMisses   = 4
	// aliveAtOnce bounds how many are asked at once.
	aliveAtOnce = 16
)

// watchAnswers ends the sandboxes that answer no more, until Close. One whose processes
// have ended is noticed at once; this is for those that stand.
func (n *Node) watchAnswers() {
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	missed := map[*box]int{}
	for {
		select {
		case <-n.life.Done():
			return
		case <-tick.C:
		}
		missed = n.unanswered(missed, (*box).answers)
	}
}

// unanswered asks every sandbox that runs, ends those that have missed too many answers
// in turn, and returns how many each has missed now.
func (n *Node) unanswered(before map[*box]int, ask func(*box, context.Context) error) map[*box]int {
	var mu sync.Mutex
	var all sync.WaitGroup
	after, turn := map[*box]int{}, make(chan struct{}, aliveAtOnce)
	for _, b := range n.all() {
		turn <- struct{}{}
		all.Go(func() { // ends with ctx at the latest
			defer func() { <-turn }()
			ctx, cancel := context.WithTimeout(n.life, alivePatience)
			defer cancel()
			err := ask(b, ctx)
			if err == nil || n.life.Err() != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			after[b] = before[b] + 1
			n.log.Warn("a sandbox does not answer", "sandbox", b.id, "times", after[b], "of", aliveMisses, "err", err)
			if after[b] >= aliveMisses {
				b.end(cause{Reason: sandbox.ReasonRuntime, Message: fmt.Sprintf("its holder or its Sentry has not answered for %v", (aliveMisses-1)*aliveEvery)})
			}
		})
	}
	all.Wait()
	return after
}

// answers asks the holder of a sandbox, and by it the Sentry of one that runs. That of a
// paused one is not asked, as its memory may be taken: it answers when it is resumed, or
// is ended. Nor is that of one that is being paused, hibernated or woken, for which its
// holder has bounds.
func (b *box) answers(ctx context.Context) error {
	b.mu.Lock()
	h, lives := b.h, b.state == sandbox.StateRunning && b.cause == nil
	b.mu.Unlock()
	if h == nil || !lives {
		return nil
	}
	runs := b.pausing.TryLock()
	if runs {
		runs = b.held == 0
		b.pausing.Unlock()
	}
	var err error
	if runs {
		_, err = h.Usage(ctx)
	} else {
		_, err = h.State(ctx)
	}
	if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, holder.ErrLost) || errors.Is(err, holder.ErrHibernated) {
		return nil // which is noticed otherwise, or has begun just now
	}
	return err
}

// settleTime is how long a node that is closed waits for a pause or a resume under way,
// which takes a part of a second.
const settleTime = 5 * time.Second

// errLeft says that the node was closed in the middle. The holder may go on: the next
// node finds out.
var errLeft = fmt.Errorf("%w: the worker is stopped: ask the next one", sandbox.ErrNotReady)

// alter makes a call of the holder that has the sandbox stand or run. Who asked for it may
// go away, without leaving it unknown what came of it; so it ends with the sandbox, late
// after the node was closed, or when a holder that works would have answered: then the
// sandbox is ended. Errors: sandbox.ErrEnded, errLeft.
func (b *box) alter(late time.Duration, call func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go func() { // ends with ctx
		most, closed, left := time.After(holder.MaxCall), b.n.life.Done(), (<-chan time.Time)(nil)
		for {
			select {
			case <-b.ask:
				cancel(sandbox.ErrEnded)
			case <-b.dead:
				cancel(sandbox.ErrEnded)
			case <-b.starved:
				cancel(sandbox.ErrEnded)
			case <-most:
				message := fmt.Sprintf("its holder has not answered for %v", holder.MaxCall)
				b.end(cause{Reason: sandbox.ReasonRuntime, Message: message})
				cancel(fmt.Errorf("%w: %s", sandbox.ErrEnded, message))
			case <-closed:
				closed, left = nil, time.After(late)
				continue
			case <-left:
				cancel(errLeft)
			case <-ctx.Done():
			}
			return
		}
	}()
	err := call(ctx)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx) // not what a step on the way makes of it
	}
	return err
}
