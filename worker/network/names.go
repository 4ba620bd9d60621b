package network

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
)

// maxKnown is how many pairs of a name and an address are remembered of a sandbox.
// Of more the one that was answered first is forgotten, and its connections with it.
const maxKnown = 512

type pair struct {
	Name string     `json:"name"`
	Addr netip.Addr `json:"addr"`
}

// known is what a guest was told, and when last. A policy is put in force with the
// names of it that it still allows.
type known struct {
	hold time.Duration // new connections are allowed so long after the answer
	at   map[pair]time.Time
}

func (k known) clone() known { return known{k.hold, maps.Clone(k.at)} }

// add remembers answers and returns the pairs that it forgot for them.
func (k known) add(name string, addrs []netip.Addr, now time.Time) (forgotten []pair) {
	for _, a := range addrs {
		k.at[pair{name, a}] = now
	}
	for len(k.at) > maxKnown {
		var oldest pair
		var when time.Time
		for p, t := range k.at {
			if oldest.Name == "" || t.Before(when) || t.Equal(when) && oldest.Name+oldest.Addr.String() > p.Name+p.Addr.String() {
				oldest, when = p, t
			}
		}
		delete(k.at, oldest)
		forgotten = append(forgotten, oldest)
	}
	return forgotten
}

// remove forgets answers that were not put in force.
func (k known) remove(name string, addrs []netip.Addr) {
	for _, a := range addrs {
		delete(k.at, pair{name, a})
	}
}

// reach reports whether a port of an address is reached by a name that the policy has.
func (k known) reach(a netip.Addr, p port, pol *policy) bool {
	for pr := range k.at {
		if pr.Addr != a {
			continue
		}
		if ports := pol.portsOfName(pr.Name); slices.Contains(ports, p) || slices.Contains(ports, port{}) {
			return true
		}
	}
	return false
}

// recent reports whether an answer is so young that its elements need not be added
// again: at least three quarters of their time are left.
func (k known) recent(p pair, now time.Time) bool {
	t, ok := k.at[p]
	return ok && now.Sub(t) < k.hold/4
}

// elements are those of a set of a policy that come from names.
func (k known) elements(part string, p *policy, refuse []netip.Prefix) []nftables.SetElement {
	fresh := part == partFreshAny || part == partFreshPort
	any := part == partFreshAny || part == partKeptAny
	now := time.Now()
	left := map[string]time.Duration{} // by key
	for pr, t := range k.at {
		d := k.hold - now.Sub(t)
		if fresh && d <= 0 {
			continue
		}
		ports := p.portsOfName(pr.Name)
		if len(ports) == 0 || (ports[0] == port{}) != any || !p.tellable(pr.Addr, ports, refuse) {
			continue
		}
		for _, key := range nameKeys(pr.Addr, ports) {
			left[string(key)] = max(left[string(key)], d)
		}
	}
	var out []nftables.SetElement
	for key, d := range left {
		e := nftables.SetElement{Key: []byte(key)}
		if fresh {
			e.Timeout = d
		}
		out = append(out, e)
	}
	return out
}

// nameKeys are the keys of an address that is reached at some ports.
func nameKeys(a netip.Addr, ports []port) [][]byte {
	if len(ports) == 1 && ports[0] == (port{}) {
		return [][]byte{a.AsSlice()}
	}
	out := make([][]byte, len(ports))
	for i, p := range ports {
		out[i] = portKey(a, p)
	}
	return out
}

// admit changes the sets of the policy in force for answers of a name, and for pairs
// that were forgotten.
func (r *ruleset) admit(c *nftables.Conn, p *policy, k known, name string, addrs []netip.Addr, forgotten []pair) {
	for _, old := range forgotten {
		ports := p.portsOfName(old.Name)
		if len(ports) == 0 {
			continue
		}
		var keys [][]byte
		for _, key := range nameKeys(old.Addr, ports) {
			if !k.needs(old.Addr, key, p) {
				keys = append(keys, key)
			}
		}
		fresh, kept := r.nameSets(ports)
		for _, set := range []*nftables.Set{fresh, kept} {
			replace(c, set, keys, 0, false)
		}
	}
	ports := p.portsOfName(name)
	var keys [][]byte
	for _, a := range addrs {
		keys = append(keys, nameKeys(a, ports)...)
	}
	fresh, kept := r.nameSets(ports)
	replace(c, fresh, keys, k.hold, true)
	replace(c, kept, keys, 0, true)
}

func (r *ruleset) nameSets(ports []port) (fresh, kept *nftables.Set) {
	if ports[0] == (port{}) {
		return r.set(partFreshAny), r.set(partKeptAny)
	}
	return r.set(partFreshPort), r.set(partKeptPort)
}

// needs reports whether a pair that is still remembered has this key.
func (k known) needs(a netip.Addr, key []byte, p *policy) bool {
	for pr := range k.at {
		if pr.Addr == a && slices.ContainsFunc(nameKeys(a, p.portsOfName(pr.Name)), func(b []byte) bool { return slices.Equal(b, key) }) {
			return true
		}
	}
	return false
}

// replace removes keys from a set and, if add, puts them in with a new timeout. An
// element is added before it is removed, because removing one that is not there, or
// has just timed out, would undo the whole transaction, and adding one that is there
// changes nothing.
func replace(c *nftables.Conn, s *nftables.Set, keys [][]byte, timeout time.Duration, add bool) {
	if len(keys) == 0 {
		return
	}
	e := make([]nftables.SetElement, len(keys))
	for i, k := range keys {
		e[i] = nftables.SetElement{Key: k, Timeout: timeout}
	}
	addElements(c, s, e)
	if timeout == 0 && add {
		return
	}
	deleteElements(c, s, e)
	if add {
		addElements(c, s, e)
	}
}
