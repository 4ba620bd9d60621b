package dns

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// fake is a resolver on the loopback.
type fake struct {
	addr  netip.AddrPort
	asked atomic.Int64
	most  atomic.Int64 // questions that waited at once
	now   atomic.Int64
}

// resolver starts one whose answers reply makes of a question; none is no answer.
func resolver(t *testing.T, reply func(m dnsmessage.Message) [][]byte) *fake {
	t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	f := &fake{addr: c.LocalAddr().(*net.UDPAddr).AddrPort()}
	go func() { // ends with the socket
		buf := make([]byte, 2000)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if err := m.Unpack(buf[:n]); err != nil {
				t.Error(err)
				return
			}
			f.asked.Add(1)
			go func() {
				now := f.now.Add(1)
				for most := f.most.Load(); now > most && !f.most.CompareAndSwap(most, now); most = f.most.Load() {
				}
				for _, b := range reply(m) {
					c.WriteTo(b, from)
				}
				f.now.Add(-1)
			}()
		}
	}()
	return f
}

func reply(t *testing.T, m dnsmessage.Message, addr string) []byte {
	t.Helper()
	m.Response = true
	m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 300},
		Body: &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()}}}
	return pack(t, m)
}

func TestLookupTakesItsOwnAnswer(t *testing.T) {
	f := resolver(t, func(m dnsmessage.Message) [][]byte {
		other, wrong := m, m
		other.ID++
		wrong.Questions = []dnsmessage.Question{{Name: dnsmessage.MustNewName("evil.example."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}
		return [][]byte{{1, 2, 3}, reply(t, other, "203.0.113.66"), reply(t, wrong, "203.0.113.66"), reply(t, m, "203.0.113.1")}
	})
	u := NewUpstream([]netip.AddrPort{f.addr}, 4)
	defer u.Close()
	for range 3 {
		addrs, ttl, err := u.Lookup(context.Background(), "a.example")
		if err != nil || len(addrs) != 1 || addrs[0].String() != "203.0.113.1" || ttl < 290*time.Second {
			t.Fatalf("got %v %v %v", addrs, ttl, err)
		}
	}
	if got := f.asked.Load(); got != 1 {
		t.Errorf("asked %d times, want once", got)
	}
}

func TestLookupByStream(t *testing.T) {
	f := resolver(t, func(m dnsmessage.Message) [][]byte {
		m.Response, m.Truncated = true, true
		return [][]byte{pack(t, m)}
	})
	l, err := net.Listen("tcp4", f.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		head := make([]byte, 2)
		io.ReadFull(c, head)
		b := make([]byte, binary.BigEndian.Uint16(head))
		io.ReadFull(c, b)
		var m dnsmessage.Message
		m.Unpack(b)
		r := reply(t, m, "203.0.113.2")
		c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(r))), r...))
	}()
	addrs, _, err := NewUpstream([]netip.AddrPort{f.addr}, 4).Lookup(context.Background(), "a.example")
	if err != nil || len(addrs) != 1 || addrs[0].String() != "203.0.113.2" {
		t.Errorf("got %v %v", addrs, err)
	}
}

func TestLookupAsksTheNextServer(t *testing.T) {
	bad := resolver(t, func(m dnsmessage.Message) [][]byte {
		m.Response, m.RCode = true, dnsmessage.RCodeServerFailure
		return [][]byte{pack(t, m)}
	})
	good := resolver(t, func(m dnsmessage.Message) [][]byte { return [][]byte{reply(t, m, "203.0.113.3")} })
	addrs, _, err := NewUpstream([]netip.AddrPort{bad.addr, good.addr}, 4).Lookup(context.Background(), "a.example")
	if err != nil || len(addrs) != 1 {
		t.Errorf("got %v %v", addrs, err)
	}
}

func TestNodeServers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	os.WriteFile(path, []byte("# a comment\nsearch a.example\nnameserver 192.0.2.53\nnameserver fd00::1\nnameserver nonsense\nnameserver 192.0.2.54\nnameserver 192.0.2.55\n"), 0o600)
	got, err := nodeServers(path)
	if err != nil || len(got) != 3 || got[0].String() != "192.0.2.53:53" || got[1].String() != "[fd00::1]:53" {
		t.Errorf("got %v %v", got, err)
	}
}

// TestFlood has a guest ask as fast as it can, for names that are answered late.
func TestFlood(t *testing.T) {
	hold := make(chan struct{})
	f := resolver(t, func(m dnsmessage.Message) [][]byte { <-hold; return nil })
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	conn.(*net.UDPConn).SetReadBuffer(4 << 20)
	u := NewUpstream([]netip.AddrPort{f.addr}, 64)
	s := Serve(Config{Conn: conn, Upstream: u, Log: slog.New(slog.DiscardHandler),
		Allowed: func(name string) bool { return name != "no.example" },
		Admit:   func(_ context.Context, _ string, a []netip.Addr) ([]netip.Addr, error) { return a, nil }})
	guest, err := net.Dial("udp4", conn.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	const names = "abcdefghijklmnopqrstuvwxyz0123456789"
	next := 0
	until(t, func() bool {
		for range 100 { // the socket's buffer is not what drops, on a machine that has time
			i := next % (36 * 36 * 36)
			guest.Write(pack(t, asked(string(names[i%36])+string(names[i/36%36])+string(names[i/1296])+".example.", dnsmessage.TypeA)))
			next++
		}
		return s.Counters().Dropped > 1000
	})
	if got := f.most.Load(); got > atOnce {
		t.Errorf("%d questions of one guest waited at once, want at most %d", got, atOnce)
	}
	// Later, what needs nobody is answered while all places are taken.
	until(t, func() bool {
		guest.Write(pack(t, asked("no.example.", dnsmessage.TypeA)))
		guest.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		var m dnsmessage.Message
		b := make([]byte, 600)
		n, err := guest.Read(b)
		return err == nil && m.Unpack(b[:n]) == nil && m.RCode == dnsmessage.RCodeNameError
	})
	defer close(hold)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	u.Close() // while the resolver is silent
	if c := s.Counters(); c.Refused == 0 {
		t.Errorf("got %+v", c)
	}
}

func until(t *testing.T, ok func() bool) {
	t.Helper()
	for range 3000 {
		if ok() {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("it does not come about")
}

// TestUpstreamForgets asks for more names than are kept.
func TestUpstreamForgets(t *testing.T) {
	u := NewUpstream(nil, 1)
	done := make(chan struct{})
	close(done)
	for i := range maxKnown + 10 {
		until := time.Now().Add(time.Hour)
		if i%2 == 0 {
			until = time.Now().Add(-time.Hour)
		}
		u.makeRoom()
		u.known[string(rune(i))+"x"] = &entry{done: done, until: until}
	}
	if len(u.known) > maxKnown {
		t.Errorf("%d names are kept", len(u.known))
	}
}

// TestAliases follows some, and not a loop.
func TestAliases(t *testing.T) {
	m := asked("a.example.", dnsmessage.TypeA)
	m.Response = true
	alias := func(from, to string) dnsmessage.Resource {
		return dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName(from), Class: dnsmessage.ClassINET, TTL: 30},
			Body: &dnsmessage.CNAMEResource{CNAME: dnsmessage.MustNewName(to)}}
	}
	m.Answers = []dnsmessage.Resource{alias("a.example.", "b.example."), alias("b.example.", "a.example.")}
	if got, _, err := parseReply(pack(t, m), 9, "a.example"); err != ErrNoName {
		t.Errorf("a loop: got %v %v", got, err)
	}
	m.Answers[1] = dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: dnsmessage.MustNewName("B.example."), Class: dnsmessage.ClassINET, TTL: 60},
		Body: &dnsmessage.AResource{A: [4]byte{203, 0, 113, 9}}}
	got, ttl, err := parseReply(pack(t, m), 9, "a.example")
	if err != nil || len(got) != 1 || ttl != 30*time.Second {
		t.Errorf("got %v %v %v", got, ttl, err)
	}
	// An address of a name that nobody asked for is no answer.
	m.Answers = []dnsmessage.Resource{m.Answers[1]}
	if got, _, err := parseReply(pack(t, m), 9, "a.example"); err != ErrNoName {
		t.Errorf("another name's address: got %v %v", got, err)
	}
}
