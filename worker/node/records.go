package node

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// loadRecords reads what earlier nodes have recorded.
func (n *Node) loadRecords(ctx context.Context) error {
	list, damaged, err := n.records.load()
	if err != nil {
		return err
	}
	for _, err := range damaged {
		n.log.WarnContext(ctx, "a record of a sandbox cannot be read and is left alone", "err", err)
	}
	for _, r := range list {
		n.ended[r.Sandbox.ID] = r
		n.claim(r)
	}
	return nil
}

// claim binds a record's key to it. Of two the later one has it: the first create
// failed, which freed the key.
func (n *Node) claim(r record) {
	if r.Key == "" || r.Failed {
		return
	}
	if have, ok := n.keys[r.Key]; ok {
		if other, ended := n.ended[have.id]; !ended || other.Sandbox.Created.After(r.Sandbox.Created) {
			return
		}
	}
	n.keys[r.Key] = keyed{id: r.Sandbox.ID, body: r.Body}
}

const (
	// tidyEvery is how often records are counted, and mounts looked at.
	tidyEvery = 30 * time.Second
	// tidySoon is when mounts are looked at that a sandbox has just left: a process
	// that is being taken apart may have been in the way.
	tidySoon = time.Second
)

// mountsLeft has the janitor look at the mounts soon.
func (n *Node) mountsLeft() {
	select {
	case n.left <- struct{}{}:
	default:
	}
}

// janitor works until Close.
func (n *Node) janitor() {
	tick := time.NewTicker(tidyEvery)
	defer tick.Stop()
	var soon <-chan time.Time
	for {
		n.trimRecords()
		if n.diskLow() == "" { // else New has told, or save has taken it
			_ = n.records.keepReserve()
		}
		if err := n.c.Worker.SweepMounts(n.life); err != nil && n.life.Err() == nil {
			n.log.WarnContext(n.life, "images without a user stay mounted", "err", err)
		}
		select {
		case <-n.life.Done():
			return
		case <-tick.C:
		case <-soon:
			soon = nil
		case <-n.left:
			soon = time.After(tidySoon)
		}
	}
}

// trimRecords forgets records that are too old or too many, the oldest first.
func (n *Node) trimRecords() {
	n.mu.Lock()
	list := make([]record, 0, len(n.ended))
	for _, r := range n.ended {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b record) int {
		return cmp.Or(a.Sandbox.End.At.Compare(b.Sandbox.End.At), cmp.Compare(a.Sandbox.ID, b.Sandbox.ID))
	})
	oldest := n.now().Add(-n.c.RecordAge)
	var gone []string
	for i, r := range list {
		_, cleaning := n.boxes[r.Sandbox.ID]
		if cleaning || i >= len(list)-n.c.MaxRecords && !r.Sandbox.End.At.Before(oldest) {
			continue
		}
		delete(n.ended, r.Sandbox.ID)
		if n.keys[r.Key].id == r.Sandbox.ID {
			delete(n.keys, r.Key)
		}
		gone = append(gone, r.Sandbox.ID)
	}
	n.mu.Unlock()
	for _, id := range gone {
		if err := n.records.remove(id); err != nil {
			n.log.WarnContext(n.life, "a record that is too old stays", "sandbox", id, "err", err)
		}
	}
}
