package network

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Maps and sets of the whole table. The maps say by interface what is done with its
// packets; an interface of ours that is in none is let nothing through.
const (
	mapOut   = "out"   // what comes from a guest
	mapIn    = "in"    // what goes to one
	mapDeny  = "deny"  // what is refused of a guest later than by its chain
	setNever = "never" // what no guest reaches
)

// What the guest may ask its answerer, in packets: more than Server looks at, less
// than what keeps a processor busy.
const (
	askPerSecond = 500
	askBurst     = 1000
)

// How often a guest is told that it was denied: a program that is told fails at once,
// where one that is not waits for minutes.
const (
	tellPerSecond = 50
	tellBurst     = 200
)

func (t *table) named(name string, key nftables.SetDatatype) *nftables.Set {
	return &nftables.Set{Table: t.tab, Name: name, KeyType: key}
}

func (t *table) verdicts(name string) *nftables.Set {
	s := t.named(name, nftables.TypeIFName)
	s.IsMap, s.DataType = true, nftables.TypeVerdict
	return s
}

func (t *table) neverSet() *nftables.Set {
	s := t.named(setNever, nftables.TypeIPAddr)
	s.Interval = true
	return s
}

// setUp makes what all sandboxes share, or makes it anew: what sandboxes have in the
// maps stays, so that those of a worker that was killed are held at every moment.
func (t *table) setUp(pool netip.Prefix, refuse []netip.Prefix) error {
	base := t.baseChains(pool)
	return t.do(func(c *nftables.Conn) {
		for _, name := range []string{mapOut, mapIn, mapDeny} {
			c.AddSet(t.verdicts(name), nil)
		}
		set := t.neverSet()
		c.AddSet(set, nil)
		c.FlushSet(set)
		var all []span
		for _, p := range append(append([]netip.Prefix{pool}, never...), refuse...) {
			if p.Addr().Is4() {
				all = append(all, spanOf(p))
			}
		}
		addElements(c, set, intervals(merge(all)))
		for _, b := range base {
			chain := c.AddChain(b.chain)
			c.FlushChain(chain)
			for _, r := range b.rules {
				c.AddRule(&nftables.Rule{Table: t.tab, Chain: chain, Exprs: r})
			}
		}
	})
}

// probe makes and removes what rules of sandboxes are made of, in one transaction, so
// that a kernel that lacks a part of it is found before a sandbox is asked for.
func (t *table) probe() error {
	const name = "probe"
	s := &slot{name: name, veth: t.prefix + name, gateway: netip.AddrFrom4([4]byte{127, 0, 0, 1}), guest: netip.AddrFrom4([4]byte{127, 0, 0, 2})}
	r := &ruleset{t: t, slot: s, flows: 1, rev: 1}
	p := &policy{spans: map[port][]span{{}: {{s.gateway, s.guest}}, {protoTCP, 1}: {{s.gateway, s.guest}}}}
	p.hosts = []hostRule{{ports: []port{{}}}, {ports: []port{{protoTCP, 1}}}}
	err := t.do(func(c *nftables.Conn) {
		r.create(c)
		r.install(c, p, known{})
		r.unturn(c)
		r.uninstall(c, p)
		r.destroy(c)
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("the kernel lacks a part of nftables (modules nft_ct, nft_limit, nft_connlimit, nft_masq, nft_reject_ipv4, before Linux 6.2 nft_objref): %w", err)
	}
	return err
}

// intervals are the elements of a set of ranges: where each begins, and where what
// is not in it begins.
func intervals(spans []span) []nftables.SetElement {
	var out []nftables.SetElement
	for _, s := range spans {
		out = append(out, nftables.SetElement{Key: s.first.AsSlice()})
		if after := s.last.Next(); after.Is4() {
			out = append(out, nftables.SetElement{Key: after.AsSlice(), IntervalEnd: true})
		}
	}
	return out
}

type baseChain struct {
	chain *nftables.Chain
	rules [][]expr.Any
}

// baseChains are the chains that packets come to by themselves. They concern those
// from and to interfaces that are ours, and pass over all others.
func (t *table) baseChains(pool netip.Prefix) []baseChain {
	ask := func(own match, port uint32) match {
		return rule(own, protocol(protoUDP), loadPort(reg0, port), equal(reg0, []byte{0, 53}))
	}
	accept := nftables.ChainPolicyAccept
	chain := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, p *nftables.ChainPriority, rules ...[]expr.Any) baseChain {
		return baseChain{&nftables.Chain{Table: t.tab, Name: name, Type: kind, Hooknum: hook, Priority: p, Policy: &accept}, rules}
	}
	drop := verdict(expr.VerdictDrop)
	return []baseChain{
		// Questions for names need no tracking, and a flood of them must not fill the
		// node's table of connections.
		chain("untracked-from", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityRaw,
			rule(ask(t.fromOurs(), 2), loadDest(reg0), within(pool, reg0), match{&expr.Notrack{}})),
		chain("untracked-to", nftables.ChainTypeFilter, nftables.ChainHookOutput, nftables.ChainPriorityRaw,
			rule(ask(t.toOurs(), 0), match{&expr.Notrack{}})),
		// After tracking, before any translation and routing: the destination is the
		// one that the guest wrote.
		chain("from", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle,
			rule(dispatch(expr.MetaKeyIIFNAME, mapOut)), rule(t.fromOurs(), drop)),
		// The node itself: nothing but questions for names, to the address that the
		// guest's chain let them through to.
		chain("node", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter,
			rule(ask(t.fromOurs(), 2), loadDest(reg0), within(pool, reg0), verdict(expr.VerdictAccept)),
			rule(dispatch(expr.MetaKeyIIFNAME, mapDeny)), rule(t.fromOurs(), drop)),
		// What another program's translation made of a destination is judged again.
		chain("through", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter,
			rule(t.fromOurs(), loadDest(reg0), in(setNever, reg0), dispatch(expr.MetaKeyIIFNAME, mapDeny)),
			rule(t.fromOurs(), t.toOurs(), dispatch(expr.MetaKeyIIFNAME, mapDeny)),
			rule(t.fromOurs(), t.toOurs(), drop)),
		chain("to", nftables.ChainTypeFilter, nftables.ChainHookPostrouting, nftables.ChainPriorityFilter,
			rule(dispatch(expr.MetaKeyOIFNAME, mapIn)), rule(t.toOurs(), drop)),
		chain("masquerade", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource,
			rule(loadSource(reg0), within(pool, reg0), t.toOthers(), match{&expr.Masq{}})),
	}
}

// within matches an address in a prefix.
func within(p netip.Prefix, reg uint32) match {
	mask := netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, 255}), p.Bits()).Masked().Addr()
	return match{
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mask.AsSlice(), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: p.Masked().Addr().AsSlice()},
	}
}

// ruleset is what a sandbox has in the table. Chains and sets are made anew for each
// policy, with a number of their own, and the maps are turned to them in the same
// transaction; the counter and the chain that denies stay.
type ruleset struct {
	t     *table
	slot  *slot
	flows int
	rev   int64
	// refuse is what names do not open, beside what never is.
	refuse []netip.Prefix
}

func (r *ruleset) base() string { return "s" + r.slot.name }
func (r *ruleset) name(part string) string {
	return r.base() + "." + strconv.FormatInt(r.rev, 10) + "." + part
}
func (r *ruleset) denyName() string { return r.base() + ".deny" }
func (r *ruleset) newName() string  { return r.base() + ".new" }
func (r *ruleset) tellName() string { return r.base() + ".tell" }

// Sets of a revision.
const (
	partAny       = "any"        // ranges that are reached at every TCP and UDP port
	partPort      = "port"       // ranges with a port
	partFreshAny  = "fresh-any"  // addresses of names that were answered a short time ago: for new connections
	partFreshPort = "fresh-port" // the same with a port
	partKeptAny   = "kept-any"   // addresses of names that were ever answered: for connections that stand
	partKeptPort  = "kept-port"
)

func (r *ruleset) set(part string) *nftables.Set {
	s := r.t.named(r.name(part), nftables.TypeIPAddr)
	if strings.HasSuffix(part, partPort) {
		s.KeyType, s.Concatenation = portType, true
	}
	switch part {
	case partAny, partPort:
		s.Interval = true
	case partFreshAny, partFreshPort:
		s.HasTimeout = true
	}
	return s
}

// parts are the sets that a policy needs.
func parts(p *policy) []string {
	var out []string
	if len(p.spans[port{}]) > 0 {
		out = append(out, partAny)
	}
	for k := range p.spans {
		if k != (port{}) {
			out = append(out, partPort)
			break
		}
	}
	var anyPort, onePort bool
	for _, h := range p.hosts {
		all := h.ports[0] == (port{})
		anyPort, onePort = anyPort || all, onePort || !all
	}
	if anyPort {
		out = append(out, partFreshAny, partKeptAny)
	}
	if onePort {
		out = append(out, partFreshPort, partKeptPort)
	}
	return out
}

// create adds what a sandbox keeps under every policy.
func (r *ruleset) create(c *nftables.Conn) {
	c.AddObj(&nftables.NamedObj{Table: r.t.tab, Name: r.base(), Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
	deny := c.AddChain(&nftables.Chain{Table: r.t.tab, Name: r.denyName()})
	c.FlushChain(deny)
	c.AddRule(&nftables.Rule{Table: r.t.tab, Chain: deny, Exprs: rule(counter(r.base()), verdict(expr.VerdictDrop))})
	// What the guest sends and may not is answered with a reset or "prohibited".
	tell := c.AddChain(&nftables.Chain{Table: r.t.tab, Name: r.tellName()})
	c.FlushChain(tell)
	rare := func() match { return limit(tellPerSecond, tellBurst) }
	for _, e := range [][]expr.Any{
		rule(counter(r.base())),
		rule(protocol(protoTCP), rare(), match{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}),
		rule(protocol(protoUDP), rare(), match{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: icmpProhibited}}),
		rule(verdict(expr.VerdictDrop)),
	} {
		c.AddRule(&nftables.Rule{Table: r.t.tab, Chain: tell, Exprs: e})
	}
	c.SetAddElements(r.t.verdicts(mapDeny), []nftables.SetElement{r.turn(r.tellName())})
	// Connections are counted here and not in the chain of a policy, so that another
	// policy does not begin at none.
	fresh := c.AddChain(&nftables.Chain{Table: r.t.tab, Name: r.newName()})
	c.FlushChain(fresh)
	c.AddRule(&nftables.Rule{Table: r.t.tab, Chain: fresh, Exprs: rule(
		match{&expr.Connlimit{Count: uint32(r.flows), Flags: expr.NFT_CONNLIMIT_F_INV}}, gotoChain(r.tellName()))})
}

// destroy removes what create added, after the policy's.
func (r *ruleset) destroy(c *nftables.Conn) {
	c.SetDeleteElements(r.t.verdicts(mapDeny), []nftables.SetElement{{Key: ifname(r.slot.veth)}})
	for _, name := range []string{r.newName(), r.tellName(), r.denyName()} {
		chain := &nftables.Chain{Table: r.t.tab, Name: name}
		c.FlushChain(chain)
		c.DelChain(chain)
	}
	c.DeleteObject(&nftables.NamedObj{Table: r.t.tab, Name: r.base(), Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
}

// turn is the element of a map that sends this sandbox's packets to a chain.
func (r *ruleset) turn(chain string) nftables.SetElement {
	return nftables.SetElement{Key: ifname(r.slot.veth), VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}

// install adds the chains and sets of a policy and turns the maps to them.
func (r *ruleset) install(c *nftables.Conn, p *policy, names known) {
	has := map[string]bool{}
	for _, part := range parts(p) {
		has[part] = true
		set := r.set(part)
		c.AddSet(set, nil)
		addElements(c, set, r.elements(part, p, names))
	}
	for _, ch := range []struct {
		part, dir string
		rules     [][]expr.Any
	}{{"out", mapOut, r.out(has)}, {"in", mapIn, r.in(has)}} {
		chain := c.AddChain(&nftables.Chain{Table: r.t.tab, Name: r.name(ch.part)})
		for _, e := range ch.rules {
			c.AddRule(&nftables.Rule{Table: r.t.tab, Chain: chain, Exprs: e})
		}
		c.SetAddElements(r.t.verdicts(ch.dir), []nftables.SetElement{r.turn(r.name(ch.part))})
	}
}

// elements are what a set of a policy begins with.
func (r *ruleset) elements(part string, p *policy, names known) []nftables.SetElement {
	switch part {
	case partAny:
		return intervals(p.spans[port{}])
	case partPort:
		var out []nftables.SetElement
		for k, spans := range p.spans {
			for _, s := range spans {
				if k != (port{}) {
					out = append(out, nftables.SetElement{Key: portKey(s.first, k), KeyEnd: portKey(s.last, k)})
				}
			}
		}
		return out
	}
	return names.elements(part, p, r.refuse)
}

// out judges what comes from the guest: every packet of every connection.
func (r *ruleset) out(has map[string]bool) [][]expr.Any {
	deny, accept, drop := gotoChain(r.tellName()), verdict(expr.VerdictAccept), gotoChain(r.denyName())
	key := rule(loadDest(reg0), loadMeta(expr.MetaKeyL4PROTO, reg1), loadPort(reg2, 2))
	ask := rule(loadDest(reg0), equal(reg0, r.slot.gateway.AsSlice()), protocol(protoUDP), loadPort(reg0, 2), equal(reg0, []byte{0, 53}))
	out := [][]expr.Any{
		rule(loadSource(reg0), differs(reg0, r.slot.guest.AsSlice()), drop),
		// Options can route a packet elsewhere than to its destination.
		rule(headerWords(), differs(reg0, []byte{5}), drop),
		rule(ask, limit(askPerSecond, askBurst), accept),
		rule(ask, drop),
		rule(loadDest(reg0), in(setNever, reg0), deny),
		// What tracking makes nothing of is not translated, and would leave with a
		// private address.
		rule(state(expr.CtStateBitINVALID|expr.CtStateBitUNTRACKED), drop),
		rule(state(expr.CtStateBitNEW), match{&expr.Verdict{Kind: expr.VerdictJump, Chain: r.newName()}}),
	}
	for _, part := range []string{partAny, partFreshAny} {
		if has[part] {
			out = append(out, rule(tcpOrUDP(loadMeta(expr.MetaKeyL4PROTO, reg0)), loadDest(reg0), in(r.name(part), reg0), accept))
		}
	}
	for _, part := range []string{partPort, partFreshPort} {
		if has[part] {
			out = append(out, rule(key, in(r.name(part), reg0), accept))
		}
	}
	if has[partKeptAny] {
		out = append(out, rule(state(expr.CtStateBitESTABLISHED), tcpOrUDP(loadMeta(expr.MetaKeyL4PROTO, reg0)), loadDest(reg0), in(r.name(partKeptAny), reg0), accept))
	}
	if has[partKeptPort] {
		out = append(out, rule(state(expr.CtStateBitESTABLISHED), key, in(r.name(partKeptPort), reg0), accept))
	}
	return append(out, rule(deny))
}

// in judges what goes to the guest: answers to what the policy lets it send now, by
// the destination that the guest wrote, and what routers say about them.
func (r *ruleset) in(has map[string]bool) [][]expr.Any {
	deny, accept := gotoChain(r.denyName()), verdict(expr.VerdictAccept)
	const original = 0
	dest := match{&expr.Ct{Key: expr.CtKeyDST, Register: reg0, Direction: original}}
	key := rule(dest, match{
		&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: reg1},
		&expr.Ct{Key: expr.CtKeyPROTODST, Register: reg2, Direction: original},
	})
	answers := rule(
		match{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg0}}, equal(reg0, []byte{1}),
		state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED))
	out := [][]expr.Any{
		rule(loadDest(reg0), differs(reg0, r.slot.guest.AsSlice()), deny),
		rule(loadSource(reg0), equal(reg0, r.slot.gateway.AsSlice()), protocol(protoUDP), loadPort(reg0, 0), equal(reg0, []byte{0, 53}), accept),
		// What the node itself says of a packet that was denied, or is too long.
		rule(ofNode(), protocol(protoTCP), tcpReset(), accept),
		rule(ofNode(), loadSource(reg0), equal(reg0, r.slot.gateway.AsSlice()), protocol(protoICMP), icmpUnreachable(), accept),
	}
	for _, part := range []string{partAny, partFreshAny, partKeptAny} {
		if has[part] {
			out = append(out, rule(answers, tcpOrUDP(match{&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: reg0}}), dest, in(r.name(part), reg0), accept))
		}
	}
	for _, part := range []string{partPort, partFreshPort, partKeptPort} {
		if has[part] {
			out = append(out, rule(answers, key, in(r.name(part), reg0), accept))
		}
	}
	return append(out, rule(deny))
}

// uninstall removes the chains and sets of a policy that the maps no longer turn to.
func (r *ruleset) uninstall(c *nftables.Conn, p *policy) {
	for _, part := range []string{"out", "in"} {
		chain := &nftables.Chain{Table: r.t.tab, Name: r.name(part)}
		c.FlushChain(chain)
		c.DelChain(chain)
	}
	for _, part := range parts(p) {
		c.DelSet(r.set(part))
	}
}

// unturn takes the sandbox out of the maps of its policy.
func (r *ruleset) unturn(c *nftables.Conn) {
	for _, m := range []string{mapOut, mapIn} {
		c.SetDeleteElements(r.t.verdicts(m), []nftables.SetElement{{Key: ifname(r.slot.veth)}})
	}
}

// denied reads the counter.
func (r *ruleset) denied() (packets, bytes int64, err error) {
	err = r.t.read(func(c *nftables.Conn) error {
		o, err := c.GetObject(&nftables.NamedObj{Table: r.t.tab, Name: r.base(), Type: nftables.ObjTypeCounter})
		if err != nil {
			return fmt.Errorf("read counter %s: %w", r.base(), err)
		}
		switch n := o.(type) {
		case *nftables.CounterObj:
			packets, bytes = int64(n.Packets), int64(n.Bytes)
		case *nftables.NamedObj:
			if x, ok := n.Obj.(*expr.Counter); ok {
				packets, bytes = int64(x.Packets), int64(x.Bytes)
			}
		}
		return nil
	})
	return packets, bytes, err
}
