// Package network gives sandboxes their network: a namespace each, and to those
// whose policy has a rule a veth pair, a private address and the answerer of names
// behind it. The rules stand on the host's side of the veth, where the guest cannot
// reach them: runsc takes frames from the namespace by packet socket, so a rule
// inside it would never see them (docs/decisions/network.md).
//
// A sandbox reaches what its policy allows now, whatever it had open before: every
// packet of both directions is judged by the policy in force.
package network

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/worker/network/dns"
	"quarry/worker/sandbox"
)

// DefaultRange is where the addresses of sandboxes come from.
var DefaultRange = netip.MustParsePrefix("10.231.0.0/16")

// Config is what a Network is made of. The zero value of a field is its default.
type Config struct {
	// Folder holds the namespaces and the state of each sandbox's network, and is
	// of this Network alone. Names of interfaces and of the nftables table come from
	// a digest of its path, so that two workers of one machine do not meet.
	Folder string
	Range  netip.Prefix   // IPv4, at most a /8 and at least a /30; a sandbox takes a /31
	Ready  int            // namespaces with a veth that are kept prepared; default 4, -1 is none
	Bare   int            // namespaces without one that are kept prepared; default 8, -1 is none
	Refuse []netip.Prefix // never reached, beside what never is: other nodes, the node's public address
	// Resolvers are asked for allowed names. The default is what /etc/resolv.conf
	// says when a name is asked for.
	Resolvers []netip.AddrPort
	Forward   bool          // turn on net.ipv4.ip_forward where it is off
	Flows     int           // connections one sandbox may have tracked at once; default 4096
	Hold      time.Duration // how long new connections to an answered address are allowed; default 10 minutes
	Log       *slog.Logger
}

// What callers branch on beside the errors of package sandbox. Both are
// sandbox.ErrUnsupported.
var (
	ErrForward = fmt.Errorf("%w: it does not forward packets: set net.ipv4.ip_forward=1, or let the worker do so", sandbox.ErrUnsupported)
	ErrNoVeth  = fmt.Errorf("%w: a sandbox made without network rules has no network, and is given none while it runs", sandbox.ErrUnsupported)
)

// upstreamAtOnce is how many names the sandboxes of a node ask its resolvers for at once.
const upstreamAtOnce = 64

// Network makes and keeps the networks of one worker's sandboxes. Its methods may be
// called at once from any number of goroutines.
type Network struct {
	cfg      Config
	prefix   string // of the host's side of each veth
	lock     *proc.Lock
	table    *table
	guard    *guard // nil of a table that is owned
	reaper   *reaper
	upstream *dns.Upstream
	making   chan struct{}

	stopFill, stopReaper context.CancelFunc // Close calls them, and waits
	filling, reaping     sync.WaitGroup
	guarding             sync.WaitGroup

	mu    sync.Mutex
	links map[string]*Link // by sandbox
	slots map[string]bool  // names that are in use
	pool  pool
	next  int
}

// Names returns the name of the nftables table, of family ip, and the prefix of the
// interfaces of the worker whose folder this is.
func Names(folder string) (table, prefix string) {
	sum := sha256.Sum256([]byte(folder))
	short := hex.EncodeToString(sum[:3])
	return "quarry-" + short, "q" + short + "-"
}

// groupOf is the group of interfaces that a worker removes: a number that other
// programs, which count from 0, do not use.
func groupOf(folder string) uint32 {
	sum := sha256.Sum256([]byte(folder))
	return 1<<30 | binary.BigEndian.Uint32(sum[:])>>2
}

// New makes the table of rules, or takes over the one that a worker of the same
// folder left, whose sandboxes stay held by it. It removes nothing: see Sweep.
func New(ctx context.Context, cfg Config) (*Network, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	for _, dir := range []string{"ns", "sandboxes"} {
		if err := os.MkdirAll(filepath.Join(cfg.Folder, dir), 0o700); err != nil {
			return nil, err
		}
	}
	lock, err := proc.TryLock(filepath.Join(cfg.Folder, "lock"))
	if err != nil {
		return nil, err
	}
	name, prefix := Names(cfg.Folder)
	n := &Network{
		cfg: cfg, prefix: prefix, lock: lock,
		upstream: dns.NewUpstream(cfg.Resolvers, upstreamAtOnce),
		making:   make(chan struct{}, makers),
		links:    map[string]*Link{}, slots: map[string]bool{},
		pool: pool{wake: make(chan struct{}, 1)},
	}
	if err := n.open(name); err != nil {
		lock.Unlock()
		return nil, err
	}
	fill, stopFill := context.WithCancel(context.Background())
	reap, stopReaper := context.WithCancel(context.Background())
	n.stopFill, n.stopReaper = stopFill, stopReaper
	n.filling.Go(func() { n.fill(fill) })
	n.reaping.Go(func() { n.reaper.run(reap) })
	if n.guard != nil {
		n.guarding.Go(func() { n.guard.run(n.repair) })
	}
	return n, nil
}

func (n *Network) open(name string) error {
	if err := rangeIsFree(n.cfg.Range); err != nil {
		return err
	}
	if n.cfg.Forward && !forwards() {
		if err := sysctl("net/ipv4/ip_forward", "1"); err != nil {
			return fmt.Errorf("turn forwarding on: %w", err)
		}
	}
	t, err := openTable(name, n.prefix)
	if err != nil {
		return err
	}
	n.table = t
	if !t.owned {
		if n.guard, err = newGuard(t); err != nil {
			return errors.Join(err, t.close())
		}
	}
	if err = t.setUp(n.cfg.Range, n.cfg.Refuse); err == nil {
		err = t.probe()
	}
	if err == nil {
		n.reaper, err = newReaper(groupOf(n.cfg.Folder))
	}
	if err != nil {
		if n.guard != nil {
			n.guard.conn.Close()
		}
		return errors.Join(err, t.close())
	}
	return nil
}

func (c *Config) complete() error {
	if !filepath.IsAbs(c.Folder) {
		return fmt.Errorf("the folder of sandbox networks %q is no absolute path", c.Folder)
	}
	c.Folder = filepath.Clean(c.Folder)
	if !c.Range.IsValid() {
		c.Range = DefaultRange
	}
	if !c.Range.Addr().Is4() || c.Range.Bits() < 8 || c.Range.Bits() > 30 {
		return fmt.Errorf("the range of sandbox addresses %s is not one of IPv4 from /8 to /30", c.Range)
	}
	c.Range = c.Range.Masked()
	defaults := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
		*v = max(*v, 0)
	}
	defaults(&c.Ready, 4)
	defaults(&c.Bare, 8)
	defaults(&c.Flows, 4096)
	if c.Hold <= 0 {
		c.Hold = 10 * time.Minute
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// refused is what the node refuses beside what never is reached.
func (n *Network) refused() []netip.Prefix { return append(slices.Clone(n.cfg.Refuse), n.cfg.Range) }

// ownAddress reports whether an address is one of the node's: the kernel would take
// packets for it itself.
func ownAddress(a netip.Addr) bool {
	routes, err := netlink.RouteGet(a.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

func forwards() bool {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

// rangeIsFree says whether the node has a way to addresses of the range that is not a
// sandbox's: those it would lose.
func rangeIsFree(r netip.Prefix) error {
	routes, err := List(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, route := range routes {
		if route.Dst == nil || route.LinkIndex == 0 {
			continue
		}
		a, _ := netip.AddrFromSlice(route.Dst.IP.To4())
		ones, _ := route.Dst.Mask.Size()
		if !a.IsValid() || ones == 0 || !r.Overlaps(netip.PrefixFrom(a, ones)) {
			continue
		}
		link, err := netlink.LinkByIndex(route.LinkIndex)
		if err != nil || isSandbox(link.Attrs().Name) {
			continue // gone again, or of a worker of this machine
		}
		return fmt.Errorf("the range of sandbox addresses %s is not free: the node reaches %s by %s; choose another range", r, route.Dst, link.Attrs().Name)
	}
	return nil
}

// isSandbox reports whether an interface has a name of some worker's.
func isSandbox(name string) bool {
	return len(name) > 8 && name[0] == 'q' && name[7] == '-' && strings.Trim(name[1:7], "0123456789abcdef") == ""
}

// Close stops preparing and answering, and leaves what was taken as it is, for the
// next worker to adopt. What was prepared and not taken is removed, and the table
// with it when no sandbox is left.
func (n *Network) Close() error {
	if n.guard != nil {
		n.guard.conn.Close()
		n.guarding.Wait()
	}
	n.mu.Lock()
	links := n.links
	n.links = map[string]*Link{}
	n.mu.Unlock()
	for _, l := range links {
		l.stop()
		l.mu.Lock()
		l.gone = true
		l.mu.Unlock()
	}
	n.upstream.Close()
	n.stopFill()
	n.filling.Wait()
	n.mu.Lock()
	idle := slices.Concat(n.pool.ready, n.pool.bare)
	n.pool.ready, n.pool.bare = nil, nil
	n.mu.Unlock()
	err := n.removeSlots(idle)
	n.stopReaper()
	n.reaping.Wait()
	if ids, listErr := n.records(); listErr == nil && len(ids) == 0 {
		// Nothing is held by it any more.
		err = errors.Join(err, n.table.do(func(c *nftables.Conn) { c.DelTable(n.table.tab) }))
	}
	err = errors.Join(err, n.table.close())
	n.lock.Unlock()
	return err
}

// Take gives a sandbox its network. When it returns the policy is in force, as
// generation 1. A policy without a rule gets a namespace with a loopback alone, and
// can have no rule later. Errors: sandbox.ErrInvalid of the policy, ErrForward.
func (n *Network) Take(ctx context.Context, id string, p sandbox.Policy) (*Link, error) {
	if !validID(id) {
		return nil, fmt.Errorf("%w: %.80q is no id of a sandbox", sandbox.ErrInvalid, id)
	}
	ready, err := compile(p, n.refused(), ownAddress)
	if err != nil {
		return nil, err
	}
	if rules(p) && !forwards() {
		return nil, ErrForward
	}
	s, err := n.takeSlot(ctx, !rules(p))
	if err != nil {
		return nil, fmt.Errorf("a network for %s: %w", id, err)
	}
	l := n.newLink(id, s)
	l.mu.Lock()
	if err := n.enter(l); err != nil {
		l.mu.Unlock()
		n.mu.Lock()
		n.putBack(s)
		n.mu.Unlock()
		return nil, err
	}
	err = l.start(clean(p), ready)
	l.mu.Unlock()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		return l, nil
	}
	err = fmt.Errorf("a network for %s: %w", id, err)
	return nil, errors.Join(err, n.Release(context.WithoutCancel(ctx), id))
}

// putBack gives a slot that was not used to those that are prepared. The caller
// holds mu.
func (n *Network) putBack(s *slot) {
	if s.bare() {
		n.pool.bare = append(n.pool.bare, s)
		return
	}
	n.pool.ready = append(n.pool.ready, s)
}

// enter makes a link the one of its sandbox.
func (n *Network) enter(l *Link) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.links[l.ID] != nil {
		return fmt.Errorf("%w: the sandbox %s has a network", sandbox.ErrInvalid, l.ID)
	}
	if _, err := os.Lstat(n.recordPath(l.ID)); err == nil && l.slot != nil && !l.sound {
		if r, err := n.readRecord(l.ID); err != nil || r.Slot != l.slot.name {
			return fmt.Errorf("%w: the sandbox %s has a network that another worker made", sandbox.ErrInvalid, l.ID)
		}
	}
	n.links[l.ID] = l
	n.slots[l.slot.name] = true
	return nil
}
