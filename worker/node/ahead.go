package node

import (
	"context"
	"sync"
	"time"

	"quarry/worker"
)

// The kernel charges a page of an image to the control group of who has it read first,
// for as long as it is in memory. What runs of an image touch is therefore read by the
// node, once a mount: the pages are the node's own then, of whose sandboxes none pays for
// what all of them use (docs/decisions/hibernate.md).

const (
	// aheadAtOnce is how many mounts are read ahead at once: one alone is as fast as the
	// reader, and another need not wait for one whose store is slow.
	aheadAtOnce = 2
	// aheadTime ends the reading ahead of one mount: what sandboxes have not touched in half
	// a minute they may do without.
	aheadTime = 30 * time.Second
	// maxAheadMounts bounds the mounts that are known to have been read ahead.
	maxAheadMounts = 1024
)

// ahead is which mounts have been read ahead.
type ahead struct {
	turns chan struct{} // of aheadAtOnce

	mu     sync.Mutex               // guards mounts
	mounts map[string]worker.Served // what served the one at this path
}

// begin reports whether the mount was not read ahead yet, and notes that it is.
func (a *ahead) begin(root string, s worker.Served) bool {
	s.FailedReads = 0
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mounts[root] == s {
		return false
	}
	if len(a.mounts) >= maxAheadMounts {
		clear(a.mounts) // to read a mount ahead again is of no harm
	}
	a.mounts[root] = s
	return true
}

// forget has the next sandbox of the mount try again.
func (a *ahead) forget(root string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.mounts, root)
}

// readAhead begins to read what runs of an image touch, unless its mount was read ahead
// already. Nobody waits for it.
func (n *Node) readAhead(mt *worker.Mount, s worker.Served, im Fetched) {
	if im.Ahead == nil || !n.ahead.begin(mt.Root(), s) {
		return
	}
	n.work.Go(func() {
		ctx, cancel := context.WithTimeout(n.life, aheadTime)
		defer cancel()
		select {
		case n.ahead.turns <- struct{}{}:
			defer func() { <-n.ahead.turns }()
		case <-ctx.Done():
			n.ahead.forget(mt.Root())
			return
		}
		began := time.Now()
		size, err := mt.ReadAhead(ctx, im.Image, im.Ahead(ctx))
		n.mountsLeft()
		if size == 0 {
			n.ahead.forget(mt.Root())
		}
		n.log.DebugContext(ctx, "an image was read ahead", "image_id", im.ID, "bytes", size, "took", time.Since(began), "err", err)
	})
}
