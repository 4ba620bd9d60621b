package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// Get implements sandbox.Node. One that has ended is found as long as its record is
// kept.
func (n *Node) Get(_ context.Context, id string) (sandbox.Sandbox, error) {
	n.mu.Lock()
	r, over := n.ended[id]
	b, live := n.boxes[id]
	n.mu.Unlock()
	switch {
	case over:
		return r.Sandbox, nil
	case live && b.listed():
		return b.view(), nil
	}
	return sandbox.Sandbox{}, unknown(id)
}

// listed reports whether the box is a sandbox, and not the remains of one.
func (b *box) listed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state != sandbox.StateEnded
}

// Bounds of a page of List.
const (
	defaultPage = 100
	maxPage     = 1000
)

// List implements sandbox.Node.
func (n *Node) List(ctx context.Context, f sandbox.Filter) (page []sandbox.Sandbox, next string, err error) {
	if f.Limit < 0 {
		return nil, "", invalid("limit %d", f.Limit)
	}
	limit := min(f.Limit, maxPage)
	if limit == 0 {
		limit = defaultPage
	}
	n.mu.Lock()
	ids := map[string]bool{}
	for id := range n.boxes {
		ids[id] = true
	}
	for id := range n.ended {
		ids[id] = true
	}
	n.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		if id <= f.After {
			continue
		}
		sb, err := n.Get(ctx, id)
		if err != nil || !matches(sb, f) {
			continue
		}
		if len(page) == limit {
			return page, page[limit-1].ID, nil
		}
		page = append(page, sb)
	}
	return page, "", nil
}

func matches(s sandbox.Sandbox, f sandbox.Filter) bool {
	if f.Group != "" && s.Group != f.Group || f.State != "" && s.State != f.State || f.State == "" && s.State == sandbox.StateEnded {
		return false
	}
	for k, v := range f.Labels {
		if have, ok := s.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// Delete implements sandbox.Node. It returns when nothing is left of the sandbox, or
// when its record stands and what is left takes too long: the node goes on with that.
func (n *Node) Delete(ctx context.Context, id string) (sandbox.End, error) {
	n.mu.Lock()
	b, live := n.boxes[id]
	r, over := n.ended[id]
	n.mu.Unlock()
	if !live {
		if !over {
			return sandbox.End{}, unknown(id)
		}
		return *r.Sandbox.End, nil
	}
	b.end(cause{Reason: sandbox.ReasonDeleted, Message: "it was deleted"})
	if err := wait(ctx, b.gone); err != nil {
		return sandbox.End{}, err
	}
	n.mu.Lock()
	r, over = n.ended[id]
	n.mu.Unlock()
	if !over {
		return sandbox.End{}, unknown(id)
	}
	return *r.Sandbox.End, nil
}

// running finds a sandbox that commands and files can be used of. Of one that is being
// ended it waits for the record, so that callers learn how. Errors: sandbox.ErrUnknown,
// sandbox.ErrEnded, sandbox.ErrNotReady.
func (n *Node) running(ctx context.Context, id string) (*box, error) {
	b, err := n.box(id)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	state, ending := b.state, b.cause != nil
	b.mu.Unlock()
	switch {
	case state == sandbox.StateEnding, state == sandbox.StateEnded, ending:
		return nil, b.explain(ctx, fmt.Errorf("%w: %s is being ended", sandbox.ErrEnded, id))
	case state == sandbox.StateCreating:
		return nil, fmt.Errorf("%w: %s is still being made: its create answers when it runs", sandbox.ErrNotReady, id)
	}
	return b, nil
}

// explainPatience is for a caller whose call failed as the sandbox ended under it.
const explainPatience = 5 * time.Second

// explain puts the sandbox's end in the place of what it did to a call. That it has
// ended, its caller waits for a moment longer to learn how, also one that only wanted
// to know what is now.
func (b *box) explain(ctx context.Context, err error) error {
	over := errors.Is(err, sandbox.ErrEnded)
	switch {
	case err == nil, !over && (ctx.Err() != nil || typed(err)):
		return err
	case errors.Is(err, holder.ErrPaused), errors.Is(err, holder.ErrHibernated):
		return fmt.Errorf("%w: %w: resume it first", sandbox.ErrNotReady, err)
	case !over && !errors.Is(err, holder.ErrLost):
		return fmt.Errorf("%w: %w", sandbox.ErrRuntime, err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), explainPatience)
	defer cancel()
	switch waited := wait(ctx, b.over); {
	case waited != nil && !b.ending(): // nobody is told that it has ended before it is known how
		return fmt.Errorf("%w: it does not answer, and why is not known yet: try again: %v", sandbox.ErrNotReady, err)
	case waited != nil:
		return fmt.Errorf("%w: %w", sandbox.ErrEnded, err)
	}
	if _, ended := b.n.box(b.id); ended != nil {
		return ended
	}
	return fmt.Errorf("%w: %w", sandbox.ErrEnded, err)
}

// typed reports whether an error already is one of the contract's.
func typed(err error) bool {
	for _, e := range []error{
		sandbox.ErrInvalid, sandbox.ErrNoProcess, sandbox.ErrUnknown, sandbox.ErrEnded, sandbox.ErrNotReady, sandbox.ErrExecUnknown, sandbox.ErrExecConflict,
		sandbox.ErrExecEnded, sandbox.ErrStdinOffset, sandbox.ErrCapacity, sandbox.ErrRate, sandbox.ErrFileNotFound, sandbox.ErrFileType,
		sandbox.ErrFilePath, sandbox.ErrFileExists, sandbox.ErrFileStuck, sandbox.ErrTooLarge, sandbox.ErrDigest, sandbox.ErrDiskFull,
		sandbox.ErrShare, sandbox.ErrUnsupported, sandbox.ErrImage, sandbox.ErrImagePending, sandbox.ErrImagePull, sandbox.ErrImageVerify,
		sandbox.ErrRuntime, sandbox.ErrDraining, sandbox.ErrNotHibernated,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// SetTTL implements sandbox.Node. The time runs in the clock of this process, which a
// change of the machine's does not move; the next node goes by the date.
func (n *Node) SetTTL(ctx context.Context, id string, seconds int64) (sandbox.Sandbox, error) {
	if seconds <= 0 || seconds > maxSeconds {
		return sandbox.Sandbox{}, invalid("ttl_s %d: want 1 to %d", seconds, maxSeconds)
	}
	if top := int64(n.c.Max.TTL.Seconds()); top > 0 && seconds > top {
		return sandbox.Sandbox{}, invalid("ttl_s %d: at most %d", seconds, top)
	}
	b, err := n.running(ctx, id)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	at := n.now().Add(time.Duration(seconds) * time.Second)
	b.mu.Lock()
	longer := !b.expires.IsZero() && at.After(b.expires)
	b.mu.Unlock()
	if longer {
		wall := at.UTC().Round(0)
		if err := b.update(func(j *journal) { j.Expires = &wall }); err != nil {
			return sandbox.Sandbox{}, n.whoseDisk(err)
		}
		b.mu.Lock()
		if at.After(b.expires) {
			b.expires = at
		}
		b.mu.Unlock()
		b.poke()
	}
	return b.view(), nil
}

// SetNetwork implements sandbox.Node.
func (n *Node) SetNetwork(ctx context.Context, id string, p sandbox.Policy) (sandbox.Network, error) {
	b, err := n.running(ctx, id)
	if err != nil {
		return sandbox.Network{}, err
	}
	if b.link == nil {
		if len(p.Allow) == 0 {
			return b.view().Network, nil
		}
		return sandbox.Network{}, fmt.Errorf("%w: its worker gives sandboxes no network: start it without --no-network", sandbox.ErrUnsupported)
	}
	if len(p.Allow) > maxRules {
		return sandbox.Network{}, invalid("network: %d rules, at most %d", len(p.Allow), maxRules)
	}
	// A caller that goes away leaves no policy half in force.
	gen, err := b.link.Apply(context.WithoutCancel(ctx), p)
	if err != nil {
		return b.link.State(), err
	}
	if err := b.update(func(j *journal) { j.Policy, j.Generation = p, gen }); err != nil {
		return b.link.State(), n.whoseDisk(err)
	}
	b.tell("network")
	return b.link.State(), nil
}

// Status implements sandbox.Node.
func (n *Node) Status(context.Context) (sandbox.NodeStatus, error) {
	low := n.diskLow()
	n.mu.Lock()
	boxes := slices.Collect(maps.Values(n.boxes))
	s := sandbox.NodeStatus{
		Version: n.c.Version, Runsc: n.runsc, CgroupV2: n.tree != nil && n.tree.V2(), Draining: n.draining, NotReady: low,
		Sandboxes: map[sandbox.State]int{}, MaxSandboxes: n.c.MaxSandboxes, CannotDo: append(slices.Clone(n.cannot), n.memoryLimits()...),
	}
	s.Sandboxes[sandbox.StateEnded] = len(n.ended)
	n.mu.Unlock()
	for _, b := range boxes {
		if b.listed() {
			s.Sandboxes[b.view().State]++
		}
	}
	l := n.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	s.Memory = sandbox.Amount{Total: l.has.memory, Used: l.used.memory}
	s.Disk = sandbox.Amount{Total: l.has.disk, Used: l.used.disk}
	s.PIDs = sandbox.Amount{Total: l.has.pids, Used: l.used.pids}
	s.Refused = maps.Clone(l.refused)
	return s, nil
}

// Drain implements sandbox.Node. With end it returns when every sandbox has ended.
func (n *Node) Drain(ctx context.Context, end bool) error {
	n.mu.Lock()
	n.draining = true
	boxes := slices.Collect(maps.Values(n.boxes))
	n.mu.Unlock()
	if !end {
		return nil
	}
	for _, b := range boxes {
		b.end(cause{Reason: sandbox.ReasonDrained, Message: "the node was drained"})
	}
	var stuck []string
	for _, b := range boxes {
		if wait(ctx, b.gone) != nil {
			stuck = append(stuck, b.id)
		}
	}
	if len(stuck) > 0 {
		return fmt.Errorf("drain: %s still end: %w", strings.Join(stuck, ", "), ctx.Err())
	}
	return nil
}
