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

// retryPause is when a pause may be tried again that a running command forbids.
const retryPause = time.Second

// Pause implements sandbox.Node. While a tool exec or a file call runs it is a
// *sandbox.Busy of sandbox.ErrNotReady: what counts the guest's own time must not see it
// stand still.
func (n *Node) Pause(ctx context.Context, id string, expect time.Duration) error {
	b, err := n.running(ctx, id)
	if err != nil {
		return err
	}
	b.pausing.Lock()
	defer b.pausing.Unlock()
	b.expected = expect
	defer func() { b.expected = 0 }()
	stood := b.held != 0
	err = b.hold(byCall)
	if err == nil && stood && expect > 0 {
		b.napSoon() // for how long it waits was not known when it was paused
	}
	if errors.Is(err, holder.ErrBusy) {
		return &sandbox.Busy{Err: sandbox.ErrNotReady, What: "pause", Why: err.Error() + ": try again when that is over", RetryAfter: retryPause}
	}
	if err != nil {
		return b.explain(ctx, err)
	}
	// Neither an answer of its model nor a command resumes it now, nor does the next node.
	return errors.Join(b.noLonger(), b.notIdle())
}

// Resume implements sandbox.Node. What a call has paused it lets go of last: a sandbox
// that cannot be restored is still its own then.
func (n *Node) Resume(ctx context.Context, id string) error {
	b, err := n.running(ctx, id)
	if err != nil {
		return err
	}
	release, err := b.rouse(ctx) // it may wait for its model as well
	if err != nil {
		return b.explain(ctx, err)
	}
	defer release()
	b.pausing.Lock()
	err = b.letGo(byCall)
	b.pausing.Unlock()
	return b.explain(ctx, err)
}

// notePause notes that the guest stands or goes on, and reports whether that is new.
func (b *box) notePause(paused bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.n.now()
	switch {
	case paused == b.paused.now:
		return false
	case paused:
		b.paused.now, b.paused.since = true, now
		b.paused.count++
	default:
		b.paused.before, b.paused.now = b.paused.total(now), false
	}
	return true
}

// Usage implements sandbox.Node. It does not wake a paused sandbox.
func (n *Node) Usage(ctx context.Context, id string) (sandbox.Usage, error) {
	b, err := n.running(ctx, id)
	if err != nil {
		return sandbox.Usage{}, err
	}
	st, err := b.h.State(ctx)
	if err != nil {
		return sandbox.Usage{}, b.explain(ctx, err)
	}
	b.mu.Lock()
	mt, served, counted, link := b.mount, b.j.Served, b.j.FailedReads, b.link
	u := sandbox.Usage{MemoryLimit: b.j.Asked.MemoryMB << 20, OutputBytes: st.Output}
	b.mu.Unlock()
	u.DiskBytes = diskUsedBy(st.Sentry, b.dir)
	if st.Hibernated {
		u.DiskBytes = st.OnDisk
	}
	if b.group != nil {
		f, err := b.group.Read()
		if err != nil {
			return sandbox.Usage{}, b.explain(ctx, fmt.Errorf("%w: %w", holder.ErrLost, err))
		}
		u.MemoryBytes, u.CPUMicros, u.OOMKills = f.Memory, f.CPU.Microseconds(), f.OOMKills
	}
	if s, err := b.h.Usage(ctx); err == nil {
		u.PIDs = int64(s.PIDs)
		if b.group == nil {
			u.MemoryBytes, u.CPUMicros = int64(s.Memory), int64(s.CPUNanos)/1000
		}
	}
	u.ImageErrors, err = mt.FailedSince(served)
	if errors.Is(err, worker.ErrUnserved) && !st.Hibernated {
		u.ImageErrors = max(1, u.ImageErrors) // nobody counts them any more
	}
	u.ImageErrors = max(counted, u.ImageErrors) // who counted them may have ended while it was hibernated
	if link != nil {
		if c, err := link.Counters(); err == nil {
			u.DeniedPacket = c.DeniedPackets
		}
	}
	return u, nil
}
