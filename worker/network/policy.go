package network

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"quarry/worker/network/dns"
	"quarry/worker/sandbox"
)

// What a policy may have.
const (
	maxRules = 256
	maxPorts = 64
	maxPairs = 4096 // destination ranges times ports, of all rules together
	// Ports of all rules with a name together: an address that is answered has an
	// element for each.
	maxNamePorts = 64
)

// never holds what no sandbox reaches, whatever its policy says: this host, links,
// metadata services of clouds, and what is no address of one destination.
var never = prefixes(
	"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4",
	"100.100.100.200/32", // metadata of Alibaba Cloud
	"168.63.129.16/32",   // the host of a machine of Azure
	"192.0.0.192/32",     // metadata of Oracle Cloud
)

// private holds what is reached by a rule that lies within it and no other: a rule
// of 0.0.0.0/0 means the internet, not the network that the node stands in, and a
// name that someone else answers for opens none of it.
var private = prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "192.0.0.0/24", "198.18.0.0/15")

func prefixes(s ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(s))
	for i := range s {
		out[i] = netip.MustParsePrefix(s[i])
	}
	return out
}

// port is one port of one protocol; the zero value is every TCP and UDP port.
type port struct {
	proto  uint8
	number uint16
}

const (
	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17
)

// span is the addresses from first to last.
type span struct{ first, last netip.Addr }

// policy is a sandbox.Policy made ready to be put in force.
type policy struct {
	hosts []hostRule
	spans map[port][]span // disjoint and in order, without what is never reached
}

type hostRule struct {
	dns.Pattern
	ports []port // the zero port alone means every one
}

// Check says whether a policy can be had: its error is sandbox.ErrInvalid and names
// the rule.
func Check(p sandbox.Policy) error {
	_, err := compile(p, nil, func(netip.Addr) bool { return false })
	return err
}

// compile makes a policy ready. refuse is what the node never lets be reached,
// beside never; own reports whether an address is the node's.
func compile(p sandbox.Policy, refuse []netip.Prefix, own func(netip.Addr) bool) (*policy, error) {
	if len(p.Allow) > maxRules {
		return nil, fmt.Errorf("%w: a network policy of %d rules; %d are the most", sandbox.ErrInvalid, len(p.Allow), maxRules)
	}
	c := &policy{spans: map[port][]span{}}
	for i, r := range p.Allow {
		if err := c.add(r, refuse, own); err != nil {
			return nil, fmt.Errorf("%w: network rule %d: %w", sandbox.ErrInvalid, i+1, err)
		}
	}
	named := map[port]bool{}
	for _, h := range c.hosts {
		for _, p := range h.ports {
			named[p] = true
		}
	}
	if len(named) > maxNamePorts {
		return nil, fmt.Errorf("%w: a network policy with %d ports of names; %d are the most", sandbox.ErrInvalid, len(named), maxNamePorts)
	}
	pairs := 0
	for k, s := range c.spans {
		c.spans[k] = merge(s)
		pairs += len(c.spans[k])
	}
	if pairs > maxPairs {
		return nil, fmt.Errorf("%w: a network policy of %d pairs of a range and a port; %d are the most", sandbox.ErrInvalid, pairs, maxPairs)
	}
	return c, nil
}

func (c *policy) add(r sandbox.Rule, refuse []netip.Prefix, own func(netip.Addr) bool) error {
	ports, err := portsOf(r.Ports)
	if err != nil {
		return err
	}
	if (r.Host == "") == (r.CIDR == "") {
		return fmt.Errorf("has to have one of host and cidr")
	}
	if r.Host != "" {
		p, err := dns.ParsePattern(r.Host)
		if err != nil {
			return err
		}
		c.hosts = append(c.hosts, hostRule{p, ports})
		return nil
	}
	spans, err := spansOf(r.CIDR, refuse)
	if err != nil {
		return err
	}
	// The rules keep guests from all addresses of the node, whatever they are at that
	// moment; this is for who asks for one.
	if len(spans) == 1 && spans[0].first == spans[0].last && own(spans[0].first) {
		return fmt.Errorf("cidr %s is the node's own, which is never reached from a sandbox", r.CIDR)
	}
	for _, p := range ports {
		c.spans[p] = append(c.spans[p], spans...)
	}
	return nil
}

func portsOf(in []sandbox.Port) ([]port, error) {
	if len(in) > maxPorts {
		return nil, fmt.Errorf("has %d ports; %d are the most", len(in), maxPorts)
	}
	if len(in) == 0 {
		return []port{{}}, nil
	}
	var out []port
	for _, p := range in {
		if p.Number < 1 || p.Number > 65535 {
			return nil, fmt.Errorf("port %d is not one of 1 to 65535", p.Number)
		}
		k := port{protoTCP, uint16(p.Number)}
		switch p.Protocol {
		case "", "tcp":
		case "udp":
			k.proto = protoUDP
		default:
			return nil, fmt.Errorf("protocol %.20q is neither tcp nor udp", p.Protocol)
		}
		if !slices.Contains(out, k) {
			out = append(out, k)
		}
	}
	return out, nil
}

// spansOf returns the addresses that a rule of this CIDR allows: without never and
// refuse, and without private unless the CIDR lies within it.
func spansOf(cidr string, refuse []netip.Prefix) ([]span, error) {
	p, err := netip.ParsePrefix(cidr)
	if a, addrErr := netip.ParseAddr(cidr); addrErr == nil && a.Zone() == "" {
		p, err = netip.PrefixFrom(a, a.BitLen()), nil
	}
	if err != nil {
		return nil, fmt.Errorf("cidr %.50q is none", cidr)
	}
	if !p.Addr().Is4() {
		return nil, fmt.Errorf("cidr %s is of IPv6, which sandboxes do not have", p)
	}
	if p != p.Masked() {
		return nil, fmt.Errorf("cidr %s has bits beyond its length; %s is meant", p, p.Masked())
	}
	minus := slices.Concat(never, refuse)
	if !slices.ContainsFunc(private, func(q netip.Prefix) bool { return covers(q, p) }) {
		minus = append(minus, private...)
	}
	left := []span{spanOf(p)}
	for _, m := range minus {
		left = subtract(left, spanOf(m))
	}
	if len(left) == 0 {
		return nil, fmt.Errorf("cidr %s is never reached from a sandbox of this node", p)
	}
	return left, nil
}

// covers reports whether all of p is in q.
func covers(q, p netip.Prefix) bool { return q.Bits() <= p.Bits() && q.Contains(p.Addr()) }

func spanOf(p netip.Prefix) span {
	p = p.Masked()
	last := p.Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		last[i/8] |= 1 << (7 - i%8)
	}
	return span{p.Addr(), netip.AddrFrom4(last)}
}

// subtract returns what is left of in without m.
func subtract(in []span, m span) []span {
	var out []span
	for _, s := range in {
		if s.last.Less(m.first) || m.last.Less(s.first) {
			out = append(out, s)
			continue
		}
		if s.first.Less(m.first) {
			out = append(out, span{s.first, m.first.Prev()})
		}
		if m.last.Less(s.last) {
			out = append(out, span{m.last.Next(), s.last})
		}
	}
	return out
}

// merge puts spans in order and makes one of those that meet: sets of nftables
// refuse elements that overlap.
func merge(in []span) []span {
	in = slices.Clone(in)
	slices.SortFunc(in, func(a, b span) int { return cmp.Or(a.first.Compare(b.first), a.last.Compare(b.last)) })
	var out []span
	for _, s := range in {
		if n := len(out) - 1; n >= 0 && (s.first.Compare(out[n].last) <= 0 || s.first == out[n].last.Next()) {
			if out[n].last.Less(s.last) {
				out[n].last = s.last
			}
			continue
		}
		out = append(out, s)
	}
	return out
}

// portsOfName returns the ports at which a name may be reached; none says that it
// is not allowed.
func (c *policy) portsOfName(name string) []port {
	var out []port
	for _, h := range c.hosts {
		if !h.Match(name) {
			continue
		}
		for _, p := range h.ports {
			if p == (port{}) {
				return []port{{}}
			}
			if !slices.Contains(out, p) {
				out = append(out, p)
			}
		}
	}
	return out
}

// tellable reports whether an address that somebody answered for an allowed name may
// be told to the guest: a private one only where a rule of its own covers it at all
// ports of the name, so that a name cannot open the node's network.
func (c *policy) tellable(a netip.Addr, ports []port, refuse []netip.Prefix) bool {
	in := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	switch {
	case !a.Is4() || in(never) || in(refuse):
		return false
	case !in(private):
		return true
	}
	return !slices.ContainsFunc(ports, func(p port) bool { return !c.reaches(a, p) })
}

// reaches reports whether a rule of CIDRs allows this port of an address.
func (c *policy) reaches(a netip.Addr, p port) bool {
	in := func(s span) bool { return !a.Less(s.first) && !s.last.Less(a) }
	return slices.ContainsFunc(c.spans[port{}], in) || p != (port{}) && slices.ContainsFunc(c.spans[p], in)
}

// rules reports whether anything is allowed.
func rules(p sandbox.Policy) bool { return len(p.Allow) > 0 }

// clean is a copy that the caller of Apply cannot change any more.
func clean(p sandbox.Policy) sandbox.Policy {
	out := sandbox.Policy{Allow: slices.Clone(p.Allow)}
	for i := range out.Allow {
		out.Allow[i].Host = strings.Clone(out.Allow[i].Host)
		out.Allow[i].Ports = slices.Clone(out.Allow[i].Ports)
	}
	return out
}
