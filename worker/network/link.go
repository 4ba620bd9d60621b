package network

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"

	"quarry/worker/network/dns"
	"quarry/worker/sandbox"
)

// Link is the network of one sandbox. Its methods may be called at once.
type Link struct {
	ID        string
	NetnsPath string     // for the bundle's namespace of type network
	Veth      string     // the host's side; "" without a veth, and then there is no address either
	Addr      netip.Addr // the guest's, in a /31 with Gateway
	Gateway   netip.Addr // the host's side
	DNS       netip.Addr // who answers the guest's questions for names: Gateway

	n    *Network
	slot *slot

	mu         sync.Mutex // guards what follows, and its order in the kernel
	gone       bool       // released, or never held
	removed    bool       // nothing of it is left
	sound      bool       // the table has what rules says, and nothing else of this sandbox
	policy     sandbox.Policy
	ready      *policy
	generation int64
	rules      *ruleset
	names      known
	server     *dns.Server
	denied     Counters // the last that were read
}

func (n *Network) newLink(id string, s *slot) *Link {
	l := &Link{ID: id, NetnsPath: s.path, Veth: s.veth, Addr: s.guest, Gateway: s.gateway, DNS: s.gateway, n: n, slot: s}
	l.names = known{hold: n.cfg.Hold, at: map[pair]time.Time{}}
	l.rules = &ruleset{t: n.table, slot: s, flows: n.cfg.Flows, refuse: n.cfg.Refuse}
	return l
}

// ResolvConf returns what the guest's /etc/resolv.conf is to hold; it is empty
// without a veth, so that lookups fail at once.
func (l *Link) ResolvConf() []byte {
	if l.slot.bare() {
		return nil
	}
	return []byte("nameserver " + l.DNS.String() + "\n")
}

// record is what the file of this sandbox has to say. The caller holds mu.
func (l *Link) record() record {
	r := record{ID: l.ID, Slot: l.slot.name, Gateway: l.slot.gateway, Policy: l.policy, Generation: l.generation, Revision: l.rules.rev}
	for p, t := range l.names.at {
		r.Names = append(r.Names, recordName{p, t})
	}
	slices.SortFunc(r.Names, func(a, b recordName) int { return a.At.Compare(b.At) })
	return r
}

// start puts a first policy in force.
func (l *Link) start(p sandbox.Policy, ready *policy) error {
	l.policy, l.ready, l.generation, l.rules.rev = p, ready, 1, 1
	if err := l.n.writeRecord(l.record()); err != nil {
		return err
	}
	if l.slot.bare() {
		l.sound = true
		return nil
	}
	if err := l.serve(); err != nil {
		return err
	}
	err := l.n.table.do(func(c *nftables.Conn) {
		l.rules.create(c)
		l.rules.install(c, ready, l.names)
	})
	l.sound = err == nil
	return err
}

// serve starts the answerer.
func (l *Link) serve() error {
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(l.Gateway, 53)))
	if err != nil {
		return fmt.Errorf("answer names for %s: %w", l.ID, err)
	}
	l.server = dns.Serve(dns.Config{Conn: conn, Upstream: l.n.upstream, Allowed: l.allowed, Admit: l.admit, Log: l.n.cfg.Log})
	return nil
}

// allowed reports whether the policy in force has a name.
func (l *Link) allowed(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.gone && len(l.ready.portsOfName(name)) > 0
}

// admit lets the guest reach what a name was answered with, and returns of that what
// no rule of the node refuses.
func (l *Link) admit(ctx context.Context, name string, addrs []netip.Addr) ([]netip.Addr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ports := l.ready.portsOfName(name)
	if l.gone || len(ports) == 0 {
		return nil, nil // another policy came in force meanwhile
	}
	addrs = slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return !l.ready.tellable(a, ports, l.n.refused()) || ownAddress(a) })
	now := time.Now()
	add := slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return l.names.recent(pair{name, a}, now) })
	if len(add) == 0 {
		return addrs, ctx.Err()
	}
	forgotten := l.names.add(name, add, now)
	if err := l.n.writeRecord(l.record()); err != nil {
		l.names.remove(name, add)
		return nil, err
	}
	if err := l.n.table.do(func(c *nftables.Conn) { l.rules.admit(c, l.ready, l.names, name, add, forgotten) }); err != nil {
		l.names.remove(name, add)
		return nil, err
	}
	return addrs, nil
}

// Apply puts another policy in force and returns its generation. When it returns
// without an error no packet passes that the policy does not allow, of whatever
// connection, and connections that it allows go on. On an error the policy before
// is in force. Errors: sandbox.ErrInvalid, ErrNoVeth, and sandbox.ErrUnknown of one
// that was released.
func (l *Link) Apply(ctx context.Context, p sandbox.Policy) (int64, error) {
	ready, err := compile(p, l.n.refused(), ownAddress)
	if err != nil {
		return 0, err
	}
	if l.slot.bare() && rules(p) {
		return 0, fmt.Errorf("%w: %s", ErrNoVeth, l.ID)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if l.gone {
		return 0, fmt.Errorf("%w: the network of %s was released", sandbox.ErrUnknown, l.ID)
	}
	before := *l.rules
	after := before
	after.rev++
	old := l.record()
	next := old
	next.Policy, next.Generation, next.Revision = clean(p), l.generation+1, after.rev
	if err := l.n.writeRecord(next); err != nil {
		return 0, err
	}
	if !l.slot.bare() {
		err = l.n.table.do(func(c *nftables.Conn) {
			before.unturn(c)
			after.install(c, ready, l.names)
			before.uninstall(c, l.ready)
		})
	}
	if err != nil {
		if back := l.n.writeRecord(old); back != nil {
			l.n.cfg.Log.Error("record of a network not written back", "sandbox", l.ID, "error", back)
		}
		return 0, fmt.Errorf("put the network policy of %s in force: %w", l.ID, err)
	}
	l.policy, l.ready, l.generation = next.Policy, ready, next.Generation
	*l.rules = after
	l.cut()
	return l.generation, nil
}

// cut removes what the kernel tracks of connections that the policy does not allow.
// No packet of them passes without it: this frees their places.
func (l *Link) cut() {
	if l.slot.bare() {
		return
	}
	ready, names := l.ready, l.names.clone()
	stays := func(dest netip.Addr, p port) bool { return ready.reaches(dest, p) || names.reach(dest, p, ready) }
	l.n.reaper.ask("", l.Addr, stays) // nobody waits: a failure leaves places taken until they time out
}

// State returns the policy, its generation, the one in force and the packets that
// were denied.
func (l *Link) State() sandbox.Network {
	c, err := l.Counters()
	if err != nil {
		l.n.cfg.Log.Warn("denied packets not read", "sandbox", l.ID, "error", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return sandbox.Network{Policy: clean(l.policy), Generation: l.generation, Applied: l.generation, Denied: c.DeniedPackets}
}

// Counters are of one sandbox, since it was made.
type Counters struct {
	DeniedPackets int64
	DeniedBytes   int64
	Names         int64 // questions that were answered; this and what follows since the worker started
	NamesRefused  int64 // questions for names that are not allowed
	NamesDropped  int64 // questions over the rate, and what is no question
	NamesFailed   int64 // questions that the node's resolvers did not answer
}

// Counters returns what was counted; with an error, what was last read.
func (l *Link) Counters() (Counters, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slot.bare() || l.gone || !l.sound {
		return l.denied, nil
	}
	packets, bytes, err := l.rules.denied()
	if err == nil {
		l.denied.DeniedPackets, l.denied.DeniedBytes = packets, bytes
	}
	if l.server != nil {
		s := l.server.Counters()
		l.denied.Names, l.denied.NamesRefused, l.denied.NamesDropped, l.denied.NamesFailed = s.Answered, s.Refused, s.Dropped, s.Failed
	}
	return l.denied, err
}

// stop ends the answerer. It is called without mu, which an answer under way wants.
func (l *Link) stop() {
	l.mu.Lock()
	s := l.server
	l.server = nil
	l.mu.Unlock()
	if s != nil {
		s.Close()
	}
}
