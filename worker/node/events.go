package node

import (
	"context"
	"sync"

	"quarry/worker/sandbox"
)

// maxEvents is how many events a node remembers: of 256 sandboxes some 16 each.
const maxEvents = 4096

// eventEpoch is how many events one run of a node may have: the sequence goes on at
// the next multiple with the next node, so that it never goes back. The product stays
// below 2^53 for two million runs, the whole numbers of JSON in most languages.
const eventEpoch = 1 << 32

// EventLost says that events before it are not remembered any more: who needs to know
// lists the sandboxes.
const EventLost = "lost"

// events is a ring of the last events.
type events struct {
	mu    sync.Mutex // guards what follows
	first uint64     // sequence of ring[0]
	ring  []sandbox.Event
	more  chan struct{} // closed when there is another
}

func newEvents(epoch uint64) *events {
	return &events{first: epoch*eventEpoch + 1, more: make(chan struct{})}
}

func (e *events) add(v sandbox.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v.Sequence = e.first + uint64(len(e.ring))
	if len(e.ring) == maxEvents {
		// Half at once, so that one event does not move all of them.
		e.ring = append(e.ring[:0:0], e.ring[maxEvents/2:]...)
		e.first += maxEvents / 2
	}
	e.ring = append(e.ring, v)
	close(e.more)
	e.more = make(chan struct{})
}

// since returns the events after a sequence number, and a channel that is closed when
// there are others. lost says that some are not remembered.
func (e *events) since(after uint64) (out []sandbox.Event, lost bool, more <-chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	next := e.first + uint64(len(e.ring))
	switch {
	case after >= next: // of a folder that was removed meanwhile
		return e.ring[:len(e.ring):len(e.ring)], true, e.more
	case after+1 < e.first:
		return e.ring[:len(e.ring):len(e.ring)], after != 0, e.more
	}
	i := int(after + 1 - e.first)
	return e.ring[i:len(e.ring):len(e.ring)], false, e.more
}

// last is the sequence number of the last event.
func (e *events) last() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.first + uint64(len(e.ring)) - 1
}

// Events implements sandbox.Node. After 0 it begins with what is remembered. When
// events after the number are not, one of type EventLost comes first.
func (n *Node) Events(ctx context.Context, after uint64, id string, fn func(sandbox.Event) error) error {
	for {
		list, lost, more := n.events.since(after)
		if lost {
			at := n.events.last()
			if len(list) > 0 {
				at = list[0].Sequence - 1
			}
			if err := fn(sandbox.Event{Sequence: at, At: n.now(), Type: EventLost}); err != nil {
				return err
			}
			after = at
		}
		for _, v := range list {
			after = v.Sequence
			if id != "" && v.Sandbox != id {
				continue
			}
			if err := fn(v); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-more:
		}
	}
}
