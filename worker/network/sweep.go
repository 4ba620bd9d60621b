package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// Adopt takes over the network of a sandbox that another worker took it for: its
// rules are put in force again as they were, names are answered again. Errors:
// sandbox.ErrUnknown when there is none, or not all of it.
func (n *Network) Adopt(ctx context.Context, id string) (*Link, error) {
	if !validID(id) {
		return nil, fmt.Errorf("%w: %.80q", sandbox.ErrUnknown, id)
	}
	r, err := n.readRecord(id)
	if err != nil {
		return nil, err
	}
	ready, err := compile(r.Policy, n.refused(), func(netip.Addr) bool { return false })
	if err != nil {
		return nil, err
	}
	s, err := n.slot(r.Slot)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", sandbox.ErrUnknown, err)
	}
	if s.gateway != r.Gateway {
		return nil, fmt.Errorf("%w: the network of %s is of another range than %s, with the gateway %s", sandbox.ErrUnknown, id, n.cfg.Range, r.Gateway)
	}
	if !isNamespace(s.path) {
		return nil, fmt.Errorf("%w: the namespace of %s is gone", sandbox.ErrUnknown, id)
	}
	if !s.bare() {
		if _, err := netlink.LinkByName(s.veth); err != nil {
			return nil, fmt.Errorf("%w: the veth of %s: %w", sandbox.ErrUnknown, id, err)
		}
	}
	l := n.newLink(id, s)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := n.enter(l); err != nil {
		return nil, err
	}
	if err := l.resume(r, ready); err != nil {
		n.leave(l)
		return nil, fmt.Errorf("adopt the network of %s: %w", id, err)
	}
	return l, nil
}

func (n *Network) leave(l *Link) {
	n.mu.Lock()
	if n.links[l.ID] == l {
		delete(n.links, l.ID)
	}
	n.mu.Unlock()
}

// resume puts a record in force. The caller holds mu.
func (l *Link) resume(r record, ready *policy) error {
	l.policy, l.ready, l.generation = r.Policy, ready, r.Generation
	for _, e := range r.Names {
		l.names.at[e.pair] = e.At
	}
	if l.slot.bare() {
		l.sound = true
		return nil
	}
	l.rules.rev = r.Revision
	if err := l.serve(); err != nil {
		return err
	}
	if err := l.install(); err != nil {
		s := l.server
		l.server = nil
		l.mu.Unlock() // an answer under way wants it
		s.Close()
		l.mu.Lock()
		l.gone = true
		return err
	}
	l.cut()
	return nil
}

// install puts the policy in force whatever the table has of this sandbox. The
// caller holds mu.
func (l *Link) install() error {
	found, err := l.n.table.find(l.slot)
	if err != nil {
		return err
	}
	next := *l.rules
	next.rev = max(next.rev, found.rev) + 1
	before := l.rules.rev
	l.rules.rev = next.rev
	err = l.n.writeRecord(l.record())
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		// The record there is has the same policy, and a revision is always one that the
		// table does not have.
		l.n.cfg.Log.Warn("which revision of a policy is in force is not written down: the disk is full", "sandbox", l.ID, "err", err)
		err = nil
	}
	if err == nil {
		err = l.n.table.do(func(c *nftables.Conn) {
			found.unturn(c, mapOut, mapIn)
			next.create(c)
			next.install(c, l.ready, l.names)
			found.removeRevisions(c)
		})
	}
	if l.sound = err == nil; !l.sound {
		l.rules.rev = before
	}
	return err
}

// Release removes the network of a sandbox, however often it is called and
// whatever is left of it. The sandbox's processes have ended before.
func (n *Network) Release(ctx context.Context, id string) error {
	if !validID(id) {
		return nil
	}
	n.mu.Lock()
	l := n.links[id]
	n.mu.Unlock()
	if l == nil {
		r, err := n.readRecord(id)
		if errors.Is(err, sandbox.ErrUnknown) && r.ID == "" {
			return n.removeRecord(id) // none, or one that says nothing: Sweep finds what it meant
		}
		if err != nil {
			return err
		}
		s, err := n.slot(r.Slot)
		if err != nil {
			return errors.Join(err, n.removeRecord(id))
		}
		l = n.newLink(id, s)
	}
	if err := l.remove(); err != nil {
		return fmt.Errorf("release the network of %s: %w", id, err)
	}
	n.leave(l)
	return nil
}

// remove undoes everything, the rules first and the record last: what an interrupted
// one leaves is found by it. Without its rules an interface of ours lets nothing pass.
func (l *Link) remove() error {
	l.mu.Lock()
	l.gone = true
	l.mu.Unlock()
	l.stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.removed {
		return nil // by another call meanwhile: the slot may be somebody else's now
	}
	var errs []error
	if !l.slot.bare() {
		errs = append(errs, l.removeRules(), l.n.reaper.ask(l.slot.veth, l.slot.guest, nil).wait())
	}
	errs = append(errs, dropNamespace(l.slot.path))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := l.n.removeRecord(l.ID); err != nil {
		return err
	}
	l.removed = true
	l.n.freeSlot(l.slot)
	return nil
}

func (l *Link) removeRules() error {
	if l.sound {
		l.sound = false
		err := l.n.table.do(func(c *nftables.Conn) {
			l.rules.unturn(c)
			l.rules.uninstall(c, l.ready)
			l.rules.destroy(c)
		})
		if err == nil {
			return nil
		}
		l.n.cfg.Log.Warn("rules not removed by name", "sandbox", l.ID, "error", err)
	}
	found, err := l.n.table.find(l.slot)
	if err != nil {
		return err
	}
	return l.n.table.do(found.removeAll)
}

func (n *Network) removeRecord(id string) error {
	for _, path := range []string{n.recordPath(id), n.recordPath(id) + ".new"} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// found is what the table has of one slot.
type found struct {
	t      *table
	slot   *slot
	rev    int64 // the highest
	maps   []string
	chains []string
	sets   []string
	count  bool // the counter
}

// find looks for what the table has of a slot, of all revisions.
func (t *table) find(s *slot) (*found, error) {
	f := &found{t: t, slot: s}
	base := "s" + s.name
	err := t.read(func(c *nftables.Conn) error {
		chains, sets, objects, err := t.list(c)
		if err != nil {
			return err
		}
		for _, name := range chains {
			if strings.HasPrefix(name, base+".") {
				f.chains = append(f.chains, name)
				f.rev = max(f.rev, revision(name))
			}
		}
		for _, name := range sets {
			if strings.HasPrefix(name, base+".") {
				f.sets = append(f.sets, name)
				f.rev = max(f.rev, revision(name))
			}
		}
		f.count = slices.Contains(objects, base)
		for _, m := range []string{mapOut, mapIn, mapDeny} {
			elements, err := c.GetSetElements(t.verdicts(m))
			if err != nil {
				return fmt.Errorf("list the map %s: %w", m, err)
			}
			if slices.ContainsFunc(elements, func(e nftables.SetElement) bool { return slices.Equal(e.Key, ifname(s.veth)) }) {
				f.maps = append(f.maps, m)
			}
		}
		return nil
	})
	return f, err
}

// list returns the names of what is in the table.
func (t *table) list(c *nftables.Conn) (chains, sets, objects []string, err error) {
	all, err := c.ListChainsOfTableFamily(t.tab.Family)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("list chains: %w", err)
	}
	for _, ch := range all {
		if ch.Table.Name == t.tab.Name {
			chains = append(chains, ch.Name)
		}
	}
	ss, err := c.GetSets(t.tab)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("list sets: %w", err)
	}
	for _, s := range ss {
		sets = append(sets, s.Name)
	}
	oo, err := c.GetNamedObjects(t.tab)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("list counters: %w", err)
	}
	for _, o := range oo {
		if o, ok := o.(*nftables.NamedObj); ok {
			objects = append(objects, o.Name)
		}
	}
	return chains, sets, objects, nil
}

// revision reads the number in s12.3.out; 0 is in names without one.
func revision(name string) int64 {
	parts := strings.SplitN(name, ".", 3)
	var rev int64
	if len(parts) == 3 {
		fmt.Sscan(parts[1], &rev)
	}
	return rev
}

func (f *found) unturn(c *nftables.Conn, maps ...string) {
	for _, m := range maps {
		if slices.Contains(f.maps, m) {
			c.SetDeleteElements(f.t.verdicts(m), []nftables.SetElement{{Key: ifname(f.slot.veth)}})
		}
	}
}

// removeRevisions removes chains and sets of policies. Those that go to others go
// first: a chain in use cannot be removed.
func (f *found) removeRevisions(c *nftables.Conn) {
	f.removeChains(c, func(name string) bool { return revision(name) > 0 })
}

func (f *found) removeChains(c *nftables.Conn, which func(string) bool) {
	for _, name := range f.chains {
		if which(name) {
			c.FlushChain(&nftables.Chain{Table: f.t.tab, Name: name})
		}
	}
	for _, name := range f.chains {
		if which(name) {
			c.DelChain(&nftables.Chain{Table: f.t.tab, Name: name})
		}
	}
	for _, name := range f.sets {
		c.DelSet(&nftables.Set{Table: f.t.tab, Name: name})
	}
}

func (f *found) removeAll(c *nftables.Conn) {
	f.unturn(c, mapOut, mapIn, mapDeny)
	f.removeChains(c, func(string) bool { return true })
	if f.count {
		c.DeleteObject(&nftables.NamedObj{Table: f.t.tab, Name: "s" + f.slot.name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	}
}

// Sweep releases every network of this folder that is not of one of these
// sandboxes, whoever made it: namespaces, veth pairs, rules, tracked connections.
// It is called before the first Take, or with all sandboxes that have one.
func (n *Network) Sweep(ctx context.Context, live []string) error {
	var errs []error
	ids, err := n.records()
	if err != nil {
		return err
	}
	held := map[string]bool{} // slots that stay
	var releases errgroup.Group
	releases.SetLimit(64) // so many share a round of the reaper
	var mu sync.Mutex
	for _, id := range ids {
		if !slices.Contains(live, id) {
			releases.Go(func() error {
				err := n.Release(ctx, id)
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
				return nil
			})
			continue
		}
		if r, err := n.readRecord(id); err == nil {
			held[r.Slot] = true
		}
	}
	releases.Wait()
	strays, err := n.strays(held)
	return errors.Join(append(errs, err, n.removeSlots(strays))...)
}

// removeSlots removes what no record names: what was prepared and never taken.
func (n *Network) removeSlots(slots []*slot) error {
	var errs []error
	var last *round
	for _, s := range slots {
		if s.bare() {
			continue
		}
		found, err := n.table.find(s)
		if err == nil {
			err = n.table.do(found.removeAll)
		}
		errs = append(errs, err)
		last = n.reaper.ask(s.veth, s.guest, nil)
	}
	if last != nil {
		errs = append(errs, last.wait()) // rounds are done in turn
	}
	for _, s := range slots {
		errs = append(errs, dropNamespace(s.path))
	}
	return errors.Join(errs...)
}

// strays are the slots of which something is there, and that nobody holds.
func (n *Network) strays(held map[string]bool) ([]*slot, error) {
	names := map[string]bool{}
	entries, err := os.ReadDir(filepath.Join(n.cfg.Folder, "ns"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		names[e.Name()] = true
	}
	links, err := List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		if number, ok := strings.CutPrefix(l.Attrs().Name, n.prefix); ok {
			names[number] = true
		}
	}
	err = n.table.read(func(c *nftables.Conn) error {
		chains, sets, objects, err := n.table.list(c)
		for _, name := range slices.Concat(chains, sets, objects) {
			number, ok := strings.CutPrefix(name, "s")
			number, _, _ = strings.Cut(number, ".")
			if ok && strings.Trim(number, "0123456789") == "" && number != "" {
				names[number] = true
			}
		}
		return err
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []*slot
	for name := range names {
		if held[name] || n.slots[name] {
			continue
		}
		if s, slotErr := n.slot(name); slotErr == nil {
			out = append(out, s)
		}
	}
	return out, err
}
