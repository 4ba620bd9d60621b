package network_test

import (
	"context"
	"net"
	"testing"
	"time"

	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// held connects and keeps the connection.
func (g guest) held(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := g.dial(addr, patience)
	if err != nil {
		t.Fatalf("%s: %v", addr, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func alive(t *testing.T, what string, c net.Conn) {
	t.Helper()
	if err := exchange(c); err != nil {
		t.Errorf("%s is allowed and does not go on: %v", what, err)
	}
}

func cut(t *testing.T, what string, c net.Conn) {
	t.Helper()
	if err := exchangeFor(c, brief); err == nil {
		t.Errorf("%s goes on", what)
	}
}

// TestTightening takes destinations away from connections that stand.
func TestTightening(t *testing.T) {
	w := lab(t)
	w.name("kept.example", hostB)
	w.name("lost.example", hostC)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA}, sandbox.Rule{Host: "kept.example"}, sandbox.Rule{Host: "lost.example", Ports: tcp(80)})
	g.resolved(t, "kept.example", hostB)
	g.resolved(t, "lost.example", hostC)
	stays, named := g.held(t, hostA+":80"), g.held(t, hostB+":80")
	port, lost := g.held(t, hostA+":443"), g.held(t, hostC+":80")
	udp := g.udp(t, hostA+":5000")
	alive(t, "UDP", udp)

	// The host says something by itself at the moment when it must not be heard.
	speaker := w.listen(t, hostA+":7000")
	listener := g.udp(t, hostA+":7000")
	if _, err := listener.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	_, from, err := speaker.ReadFrom(make([]byte, 10))
	if err != nil {
		t.Fatal(err)
	}
	speaker.WriteTo([]byte("first"), from)
	listener.SetReadDeadline(time.Now().Add(patience))
	if _, err := listener.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}

	gen := g.apply(t, sandbox.Rule{CIDR: hostA, Ports: tcp(80)}, sandbox.Rule{Host: "kept.example"})
	if s := g.State(); gen != 2 || s.Generation != 2 || s.Applied != 2 {
		t.Errorf("got generation %d and %+v, want 2", gen, s)
	}
	speaker.WriteTo([]byte("second"), from)
	listener.SetReadDeadline(time.Now().Add(brief))
	if _, err := listener.Read(make([]byte, 10)); err == nil {
		t.Error("what a host says by itself on an old UDP flow is heard")
	}
	alive(t, "TCP to a port that is left", stays)
	alive(t, "TCP to a name that is left", named)
	cut(t, "TCP to a port that was taken away", port)
	cut(t, "TCP to a name that was taken away", lost)
	cut(t, "UDP", udp)
	g.denied(t, hostC+":80")
	g.refused(t, "lost.example")
	g.reaches(t, hostB+":443") // answered a short time ago

	// Back again: what is new is reached, by a name only once it was asked for.
	g.apply(t, sandbox.Rule{CIDR: hostA}, sandbox.Rule{Host: "*"})
	alive(t, "TCP to a port that is left", stays)
	alive(t, "TCP to a name that is left", named)
	g.reaches(t, hostA+":443")
	g.resolved(t, "lost.example", hostC)
	g.reaches(t, hostC+":80")

	g.apply(t)
	cut(t, "TCP under a policy without a rule", stays)
	cut(t, "TCP to a name under a policy without a rule", named)
	g.denied(t, hostA+":80")
	g.refused(t, "kept.example")
}

// TestAnswersHold has an answer that holds for a moment: connections that stand go
// on after it, new ones have to ask again.
func TestAnswersHold(t *testing.T) {
	w := lab(t)
	w.name("a.example", hostA)
	w.name("b.example", hostB)
	n := open(t, network.Config{Hold: time.Second})
	g := take(t, n, "a", sandbox.Rule{Host: "a.example"}, sandbox.Rule{Host: "b.example", Ports: tcp(80, 443)})
	// A busy machine may need longer than the answer holds: then it is asked again.
	meanwhile := func(name, addr, port string) (c net.Conn) {
		t.Helper()
		await(t, func() bool {
			g.resolved(t, name, addr)
			var err error
			c, err = g.dial(addr+port, time.Second)
			return err == nil
		})
		t.Cleanup(func() { c.Close() })
		return c
	}
	a, b := meanwhile("a.example", hostA, ":80"), meanwhile("b.example", hostB, ":80")
	time.Sleep(1500 * time.Millisecond)
	alive(t, "a connection to a name", a)
	alive(t, "a connection to a port of a name", b)
	g.denied(t, hostA+":80")
	g.denied(t, hostB+":443")
	g.apply(t, sandbox.Rule{Host: "a.example"}, sandbox.Rule{Host: "b.example", Ports: tcp(80)})
	alive(t, "a connection to a name under another policy", a)
	alive(t, "a connection to a port of a name under another policy", b)
	g.denied(t, hostA+":80") // another policy does not renew an answer
	for range 3 {
		meanwhile("a.example", hostA, ":80")
		time.Sleep(400 * time.Millisecond)
	}
}

// TestRebinding has names that are allowed answered with addresses that nobody meant.
func TestRebinding(t *testing.T) {
	w := lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{Host: "*.example"}, sandbox.Rule{CIDR: lanHost + "/32", Ports: tcp(80)})
	for name, addr := range map[string]string{"meta": metadata, "loop": "127.0.0.1", "lan": "10.50.0.6", "any": "0.0.0.0", "group": "224.0.0.1",
		"guest": g.Addr.String(), "gateway": g.Gateway.String(), "node": nodeAddr, "azure": "168.63.129.16", "cgn": "100.64.0.1"} {
		w.name(name+".example", addr)
		g.refused(t, name+".example")
	}
	g.denied(t, nodeAddr+":80")
	// One that is allowed among others that are not.
	w.name("mixed.example", metadata, hostA, "10.50.0.6")
	g.resolved(t, "mixed.example", hostA)
	g.reaches(t, hostA+":80")
	g.denied(t, metadata+":80")
	// A rule of its own opens the private address, at its ports and no others.
	w.name("lan-host.example", lanHost)
	g.refused(t, "lan-host.example")
	g.apply(t, sandbox.Rule{Host: "*.example", Ports: tcp(80)}, sandbox.Rule{CIDR: lanHost + "/32", Ports: tcp(80)})
	g.resolved(t, "lan-host.example", lanHost)
	g.reaches(t, lanHost+":80")
	g.denied(t, lanHost+":9000")
}

// TestFlowsAreBounded opens more connections than a sandbox may have.
func TestFlowsAreBounded(t *testing.T) {
	lab(t)
	n := open(t, network.Config{Flows: 20})
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA})
	answered := 0
	for range 40 {
		if exchange(g.udp(t, hostA+":5000")) == nil {
			answered++
		}
		if answered == 20 {
			break
		}
	}
	if answered != 20 {
		t.Fatalf("%d flows of 20 were let through", answered)
	}
	for range 3 {
		cut(t, "one flow too many", g.udp(t, hostA+":5000"))
	}
	g.apply(t, sandbox.Rule{CIDR: hostA}, sandbox.Rule{CIDR: hostB})
	cut(t, "one flow too many under another policy", g.udp(t, hostA+":5000"))
	other := take(t, n, "b", sandbox.Rule{CIDR: hostA})
	other.reaches(t, hostA+":80")
}

// TestApplyIsAllOrNothing gives up, and asks of one that is gone.
func TestApplyIsAllOrNothing(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := g.Apply(ctx, sandbox.Policy{}); err == nil {
		t.Error("applied for a caller that is gone")
	}
	g.reaches(t, hostA+":80")
	if err := n.Release(context.Background(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Apply(context.Background(), sandbox.Policy{}); err == nil {
		t.Error("applied to a network that was released")
	}
}
