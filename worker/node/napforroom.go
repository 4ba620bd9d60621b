package node

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"quarry/worker/holder"
	"quarry/worker/memory"
	"quarry/worker/sandbox"
)

const (
	// napAgain is how soon one is looked at again that could not be put to disk: what
	// forbids it, a command or a full disk, seldom ends sooner.
	napAgain = time.Minute
	// napWorth is what one must have in memory: less frees nothing that a restore does not
	// take again, as a Sentry alone has some 15 MiB.
	napWorth = 32 << 20
)

// sleeper is a sandbox that may be put to disk.
type sleeper struct {
	id     string
	paused time.Duration
	own    int64 // bytes in memory
}

// whoNaps chooses one, or none: of those that have waited for long, which wait for long
// still as far as can be told, the one that has most in memory. What is in swap comes back
// into memory for a checkpoint.
func whoNaps(list []sleeper, after time.Duration) (id string, ok bool) {
	list = slices.DeleteFunc(slices.Clone(list), func(s sleeper) bool { return s.paused < after || s.own < napWorth })
	if len(list) == 0 || after < 0 {
		return "", false
	}
	most := slices.MaxFunc(list, func(a, b sleeper) int {
		return cmp.Or(cmp.Compare(a.own, b.own), cmp.Compare(a.paused, b.paused), cmp.Compare(b.id, a.id))
	})
	return most.id, true
}

// napForRoom puts one sandbox to disk, when memory is wanted that swap has no room for.
// It does not wait for that.
func (n *Node) napForRoom() {
	r, err := memory.Machine{}.Read()
	if err != nil || n.c.PausedMemory != PausedReclaim || n.c.HibernateAfter < 0 || !r.SwapFull() {
		return
	}
	id, ok := whoNaps(n.sleepers(), n.c.HibernateAfter)
	if !ok {
		return
	}
	n.mu.Lock()
	b, there := n.boxes[id]
	n.mu.Unlock()
	if !there {
		return // it has ended since
	}
	select {
	case n.naps <- struct{}{}:
	default:
		return // one is on its way
	}
	n.work.Go(func() { // ends with Close, and bounded by the holder
		defer func() { <-n.naps }()
		b.pausing.Lock()
		defer b.pausing.Unlock()
		if b.held == 0 || n.life.Err() != nil {
			return
		}
		switch err := b.hibernate(); {
		case err == nil:
			n.log.Info("a paused sandbox was put to disk: memory is wanted, and swap has no room", "sandbox", id)
		case errors.Is(err, sandbox.ErrEnded), errors.Is(err, holder.ErrLost):
		default:
			b.mu.Lock()
			b.nap.tried = n.now()
			b.mu.Unlock()
			n.log.Info("a paused sandbox keeps its memory, which is wanted", "sandbox", id, "err", err)
		}
	})
}

// sleepers lists the sandboxes that are paused and not hibernated.
func (n *Node) sleepers() (out []sleeper) {
	now := n.now()
	for _, b := range n.all() {
		b.mu.Lock()
		can := b.state == sandbox.StateRunning && b.paused.now && !b.nap.now && now.Sub(b.nap.tried) >= napAgain
		since := b.paused.since
		b.mu.Unlock()
		b.memory.mu.Lock()
		g := b.memory.group
		b.memory.mu.Unlock()
		if !can || g == nil {
			continue
		}
		if held, err := g.Held(); err == nil {
			out = append(out, sleeper{b.id, now.Sub(since), held.Own()})
		}
	}
	return out
}
