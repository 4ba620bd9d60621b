package network_test

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"quarry/worker/network"
	"quarry/worker/sandbox"
)

func TestByCIDRAndPort(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA + "/32", Ports: tcp(80, 443)}, sandbox.Rule{CIDR: "203.0.113.11"},
		sandbox.Rule{CIDR: lanHost + "/32", Ports: tcp(9000)})
	g.reaches(t, hostA+":80")
	g.reaches(t, hostA+":443")
	g.reaches(t, hostB+":9000")
	g.reaches(t, lanHost+":9000")
	if err := exchange(g.udp(t, hostB+":5000")); err != nil {
		t.Error(err)
	}
	g.denied(t, hostA+":9000")
	g.denied(t, hostC+":80")
	g.denied(t, lanHost+":80")
	if err := exchangeFor(g.udp(t, hostA+":5000"), brief); err == nil {
		t.Error("UDP to a host of which only TCP is allowed")
	}
	got := g.State()
	if got.Generation != 1 || got.Applied != 1 || got.Denied < 4 {
		t.Errorf("got %+v", got)
	}
}

func TestByName(t *testing.T) {
	w := lab(t)
	w.name("a.example", hostA)
	w.name("x.b.example", hostB)
	w.name("b.example", hostC)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{Host: "a.example", Ports: tcp(80)}, sandbox.Rule{Host: "*.b.example"})
	g.denied(t, hostA+":80") // nobody asked yet
	g.resolved(t, "a.example", hostA)
	g.reaches(t, hostA+":80")
	g.denied(t, hostA+":443")
	g.resolved(t, "X.b.Example", hostB)
	g.reaches(t, hostB+":9000")
	g.refused(t, "b.example")
	g.refused(t, "evil.example")
	g.refused(t, "a.example.evil.example")
	g.refused(t, "nothing.b.example")
	if code, got, err := g.ask(t, "a.example", dnsmessage.TypeAAAA); err != nil || code != dnsmessage.RCodeSuccess || len(got) > 0 {
		t.Errorf("AAAA: got %v %v %v, want an answer without addresses", code, got, err)
	}
	c, err := g.Counters()
	if err != nil || c.NamesRefused != 3 {
		t.Errorf("got %+v %v, want 3 refused names", c, err)
	}
}

// TestDenialIsTold has programs that may not connect fail at once, and those whose
// connection is cut.
func TestDenialIsTold(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA})
	if _, err := g.dial(hostB+":80", patience); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("TCP: got %v, want it refused", err)
	}
	if err := exchange(g.udp(t, hostB+":5000")); !errors.Is(err, syscall.EHOSTUNREACH) {
		t.Errorf("UDP: got %v, want it unreachable", err)
	}
	c := g.held(t, hostA+":80")
	g.apply(t, sandbox.Rule{CIDR: hostB})
	if err := exchange(c); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("a connection that is cut: got %v, want it reset", err)
	}
}

// TestRoutersAreHeard has a host say that nobody listens there: what is said about an
// allowed flow comes through, as what says that a packet is too long has to.
func TestRoutersAreHeard(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	for id, rule := range map[string]sandbox.Rule{"a": {CIDR: hostA}, "b": {CIDR: hostA, Ports: []sandbox.Port{{Protocol: "udp", Number: 6999}}}} {
		g := take(t, n, id, rule)
		if err := exchange(g.udp(t, hostA+":6999")); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("got %v, want it refused", err)
		}
	}
}

// What comes to a closed network is refused, and does not wait for ever for those who
// would have removed it: the next network does.
func TestAReleaseAfterTheEnd(t *testing.T) {
	lab(t)
	folder := t.TempDir()
	n, err := network.New(t.Context(), network.Config{Folder: folder})
	if err != nil {
		t.Fatal(err)
	}
	take(t, n, "a", sandbox.Rule{CIDR: hostA + "/32"})
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	released := make(chan error, 1)
	go func() { released <- n.Release(t.Context(), "a") }() // ends with its answer
	select {
	case err := <-released:
		if !errors.Is(err, network.ErrClosed) {
			t.Errorf("got %v, want ErrClosed", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it waits for a network that is closed")
	}
	next := open(t, network.Config{Folder: folder})
	if err := next.Release(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}
