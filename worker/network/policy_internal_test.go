package network

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"quarry/worker/sandbox"
)

func noneOwn(netip.Addr) bool { return false }

// TestSpansAgainstAModel compares what rules of CIDRs allow with the sentence that
// says it, address by address.
func TestSpansAgainstAModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	refuse := prefixes("203.0.113.0/28", "10.1.2.3/32")
	interesting := func() netip.Addr {
		lists := slices.Concat(never, private, refuse, prefixes("8.8.8.0/24", "203.0.113.0/24"))
		s := spanOf(lists[r.IntN(len(lists))])
		for _, a := range []netip.Addr{s.first.Prev(), s.first, s.last, s.last.Next()} {
			if a.IsValid() && r.IntN(3) == 0 {
				return a
			}
		}
		return netip.AddrFrom4([4]byte{byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())})
	}
	within := func(list []netip.Prefix, p netip.Prefix) bool {
		return slices.ContainsFunc(list, func(q netip.Prefix) bool { return covers(q, p) })
	}
	for range 300 {
		var rules []netip.Prefix
		var allow []sandbox.Rule
		for range 1 + r.IntN(4) {
			p := netip.PrefixFrom(interesting(), r.IntN(33)).Masked()
			if _, err := spansOf(p.String(), refuse); err != nil {
				continue
			}
			rules = append(rules, p)
			allow = append(allow, sandbox.Rule{CIDR: p.String()})
		}
		c, err := compile(sandbox.Policy{Allow: allow}, refuse, noneOwn)
		if err != nil {
			t.Fatal(err)
		}
		for range 200 {
			a := interesting()
			one := netip.PrefixFrom(a, 32)
			want := !within(never, one) && !within(refuse, one) && slices.ContainsFunc(rules, func(p netip.Prefix) bool {
				return p.Contains(a) && (!within(private, one) || within(private, p))
			})
			if got := c.reaches(a, port{protoTCP, 80}); got != want {
				t.Fatalf("%v of %v: got %v, want %v", a, rules, got, want)
			}
		}
		for _, s := range c.spans {
			for i := 1; i < len(s); i++ {
				if !s[i-1].last.Next().Less(s[i].first) {
					t.Fatalf("spans meet: %v", s)
				}
			}
		}
	}
}

func TestCheck(t *testing.T) {
	many := make([]sandbox.Rule, maxRules+1)
	for i := range many {
		many[i].Host = fmt.Sprintf("h%d.example", i)
	}
	ports := make([]sandbox.Port, maxPorts+1)
	for i := range ports {
		ports[i].Number = i + 1
	}
	for name, allow := range map[string][]sandbox.Rule{
		"neither":                 {{}},
		"both":                    {{Host: "a.example", CIDR: "203.0.113.0/24"}},
		"too many rules":          many,
		"too many ports":          {{Host: "a.example", Ports: ports}},
		"too many ports of names": {{Host: "a.example", Ports: ports[:40]}, {Host: "b.example", Ports: ports[30:]}},
		"port 0":                  {{Host: "a.example", Ports: []sandbox.Port{{}}}},
		"port 65536":              {{Host: "a.example", Ports: []sandbox.Port{{Number: 65536}}}},
		"sctp":                    {{Host: "a.example", Ports: []sandbox.Port{{Protocol: "sctp", Number: 1}}}},
		"no host":                 {{Host: "a b"}},
		"a star in between":       {{Host: "a.*.b"}},
		"an address":              {{Host: "203.0.113.1"}},
		"no cidr":                 {{CIDR: "203.0.113"}},
		"bits beyond":             {{CIDR: "203.0.113.1/24"}},
		"IPv6":                    {{CIDR: "2001:db8::/32"}},
		"IPv6 as IPv4":            {{CIDR: "::ffff:203.0.113.1"}},
		"a zone":                  {{CIDR: "fe80::1%eth0"}},
		"metadata":                {{CIDR: "169.254.169.254/32"}},
		"second is bad":           {{Host: "a.example"}, {CIDR: "127.0.0.1"}},
	} {
		err := Check(sandbox.Policy{Allow: allow})
		if !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: got %v, want it refused", name, err)
		} else if name == "second is bad" && !strings.Contains(err.Error(), "rule 2") {
			t.Errorf("%v does not name the rule", err)
		}
	}
	good := []sandbox.Rule{{Host: "*"}, {Host: "*.Example.com."}, {CIDR: "0.0.0.0/0", Ports: []sandbox.Port{{Number: 443}, {Protocol: "udp", Number: 443}}}, {CIDR: "203.0.113.7"}}
	if err := Check(sandbox.Policy{Allow: good}); err != nil {
		t.Error(err)
	}
}

func TestPortsOfName(t *testing.T) {
	c, err := compile(sandbox.Policy{Allow: []sandbox.Rule{{Host: "a.example", Ports: []sandbox.Port{{Number: 80}}}, {Host: "*.example", Ports: []sandbox.Port{{Number: 443}, {Number: 80}}},
		{Host: "all.example"}}}, nil, noneOwn)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]port{
		"a.example": {{protoTCP, 80}, {protoTCP, 443}}, "b.example": {{protoTCP, 443}, {protoTCP, 80}}, "all.example": {{}}, "example": nil, "other": nil} {
		if got := c.portsOfName(name); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
}

// TestKnownIsBounded has more answers than are remembered.
func TestKnownIsBounded(t *testing.T) {
	k := known{hold: time.Minute, at: map[pair]time.Time{}}
	now := time.Now()
	for i := range maxKnown + 50 {
		a := netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)})
		forgotten := k.add("a.example", []netip.Addr{a}, now.Add(time.Duration(i)*time.Second))
		if want := max(0, i+1-maxKnown); min(want, 1) != len(forgotten) || len(k.at) > maxKnown {
			t.Fatalf("answer %d: forgot %v, knows %d", i, forgotten, len(k.at))
		}
		if i >= maxKnown && forgotten[0].Addr.As4()[3] != byte(i-maxKnown) {
			t.Fatalf("answer %d: forgot %v, want the oldest", i, forgotten)
		}
	}
}
