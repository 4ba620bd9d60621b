package dns

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

func pack(t testing.TB, m dnsmessage.Message) []byte {
	t.Helper()
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func asked(name string, kind dnsmessage.Type) dnsmessage.Message {
	return dnsmessage.Message{Header: dnsmessage.Header{ID: 9, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}}}
}

func TestParseQuery(t *testing.T) {
	good := pack(t, asked("Www.Example.COM.", dnsmessage.TypeA))
	q, err := parseQuery(good)
	if err != nil || q.name != "www.example.com" || q.kind != dnsmessage.TypeA || q.id != 9 || !q.recursion {
		t.Fatalf("got %+v %v", q, err)
	}
	// An OPT record after the question, as the C library sends it, is not looked at.
	withOPT := asked("a.b.", dnsmessage.TypeAAAA)
	withOPT.Additionals = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName("."), Class: 1200}, Body: &dnsmessage.OPTResource{}}}
	if q, err := parseQuery(pack(t, withOPT)); err != nil || q.name != "a.b" || q.kind != dnsmessage.TypeAAAA {
		t.Errorf("with an OPT record: got %+v %v", q, err)
	}
	two := asked("a.", dnsmessage.TypeA)
	two.Questions = append(two.Questions, two.Questions[0])
	response := asked("a.", dnsmessage.TypeA)
	response.Response = true
	update := asked("a.", dnsmessage.TypeA)
	update.OpCode = 5
	pointer := append([]byte{}, good[:12]...)
	for name, b := range map[string][]byte{
		"nothing": nil, "two questions": pack(t, two), "an answer": pack(t, response), "an update": pack(t, update),
		"no end": good[:20], "no type": good[:len(good)-4], "too long": append(good, make([]byte, maxQuery)...),
		"a pointer":      append(pointer, 0xc0, 12, 0, 1, 0, 1),
		"another letter": pack(t, asked("a b.example.", dnsmessage.TypeA)),
		"a long name":    append(append(append([]byte{}, good[:12]...), strings.Repeat("\x3f"+strings.Repeat("a", 63), 4)...), 0, 0, 1, 0, 1),
	} {
		if q, err := parseQuery(b); err == nil {
			t.Errorf("%s: got %+v, want it refused", name, q)
		}
	}
}

// FuzzParseQuery holds the parser against package dnsmessage: what it takes is that
// question there too, and its answer is a message that has it.
func FuzzParseQuery(f *testing.F) {
	f.Add(pack(f, asked("www.example.com.", dnsmessage.TypeA)))
	f.Add(pack(f, asked("_x-y.", dnsmessage.TypeTXT)))
	f.Add([]byte{0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := parseQuery(b)
		if err != nil {
			return
		}
		var p dnsmessage.Parser
		h, err := p.Start(b)
		if err != nil {
			t.Fatalf("taken, and no message: %v", err)
		}
		want, err := p.Question()
		if err != nil || lower(want.Name) != q.name || want.Type != q.kind || want.Class != q.class || h.ID != q.id {
			t.Fatalf("got %+v, want %+v %v", q, want, err)
		}
		addrs := make([]netip.Addr, maxAddrs)
		for i := range addrs {
			addrs[i] = netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})
		}
		a := q.answer(dnsmessage.RCodeSuccess, addrs, 60)
		if len(a) > maxAnswer {
			t.Fatalf("an answer of %d bytes", len(a))
		}
		var m dnsmessage.Message
		if err := m.Unpack(a); err != nil {
			t.Fatalf("the answer is no message: %v", err)
		}
		if len(m.Questions) != 1 || m.Questions[0] != want || len(m.Answers) == 0 || m.ID != h.ID || !m.Response {
			t.Fatalf("got the answer %+v to %+v", m, want)
		}
	})
}

func TestPattern(t *testing.T) {
	for pattern, names := range map[string]map[string]bool{
		"Example.com.":  {"example.com": true, "a.example.com": false, "example.com.evil": false, "": false},
		"*.example.com": {"example.com": false, "a.example.com": true, "a.b.example.com": true, "aexample.com": false, ".example.com": false},
		"*":             {"example.com": true, "": false},
	} {
		p, err := ParsePattern(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range names {
			if got := p.Match(name); got != want {
				t.Errorf("%s of %q: got %v, want %v", pattern, name, got, want)
			}
		}
	}
	for _, bad := range []string{"", ".", "*.", "**", "*a.b", "a..b", "a b", "bücher.example", "10.0.0.1", "a.*.b", strings.Repeat("a.", 127) + "b.c", strings.Repeat("a", 64)} {
		if _, err := ParsePattern(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// FuzzParseReply gives the parser of resolvers' answers anything: it ends, with an
// error or with a bounded list.
func FuzzParseReply(f *testing.F) {
	m := asked("a.example.", dnsmessage.TypeA)
	m.Response = true
	m.Answers = []dnsmessage.Resource{
		{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName("a.example."), Class: dnsmessage.ClassINET, TTL: 5}, Body: &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName("b.example.")}},
		{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName("b.example."), Class: dnsmessage.ClassINET, TTL: 7}, Body: &dnsmessage.AResource{A: [4]byte{203, 0, 113, 1}}},
	}
	f.Add(pack(f, m))
	f.Fuzz(func(t *testing.T, b []byte) {
		addrs, ttl, err := parseReply(b, 9, "a.example")
		if err == nil && (len(addrs) == 0 || len(addrs) > maxAddrs || ttl < 0) {
			t.Fatalf("got %v for %v", addrs, ttl)
		}
	})
}
