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

// answers asks the holder of a sandbox that runs, and by it the Sentry. That of a paused
// one is not asked, as its memory may be taken: it answers when it is resumed, or is
// ended. Nobody asks one that is being paused, hibernated or woken.
func (b *box) answers(ctx context.Context) error {
	b.mu.Lock()
	h, runs := b.h, b.state == sandbox.StateRunning && b.cause == nil && !b.nap.now
	b.mu.Unlock()
	if h == nil || !runs || !b.pausing.TryLock() {
		return nil
	}
	stands := b.held != 0
	b.pausing.Unlock()
	var err error
	if stands {
		_, err = h.State(ctx)
	} else {
		_, err = h.Usage(ctx)
	}
	if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, holder.ErrLost) {
		return nil // which is noticed otherwise
	}
	return err
}
