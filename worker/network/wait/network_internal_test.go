package wait

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	guests "quarry/worker/network"
	"quarry/worker/sandbox"
)

// TestBehindTheRulesOfANetwork watches a guest as the worker has it: what its policy
// denies is not seen, answers are translated before they are, and another policy, or
// another sandbox, is no reason to resume.
func TestBehindTheRulesOfANetwork(t *testing.T) {
	l := newLab(t)
	s, denied := l.stub(t), l.stub(t)
	n, err := guests.New(t.Context(), guests.Config{Folder: filepath.Join(t.TempDir(), "network"), Ready: -1, Bare: -1, Forward: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() }) // after what was taken is released
	policy := func(of *stub) sandbox.Policy {
		return sandbox.Policy{Allow: []sandbox.Rule{{CIDR: of.addr.Addr().String() + "/32", Ports: []sandbox.Port{{Number: int(of.addr.Port())}}}}}
	}
	take := func(id string, p sandbox.Policy) *guests.Link {
		t.Helper()
		link, err := n.Take(t.Context(), id, p)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Release(context.Background(), id) })
		return link
	}
	link := take("one", policy(s))
	g := &guest{t: t, ns: link.NetnsPath, veth: link.Veth, addr: link.Addr, change: make(chan struct{})}
	w, _ := watch(t, Config{Endpoints: ends(s, denied)}, true, g)
	o := observe(t, ends(denied), g)

	client := g.client()
	if _, w := g.answered(client, s, 0, 1<<20, 1); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
	done := make(chan struct{})
	go func() { defer close(done); g.get(client, s.held(1)) }()
	g.until("paused", g.isPaused)
	if _, err := link.Apply(t.Context(), policy(s)); err != nil {
		t.Error(err)
	}
	take("another", policy(denied))
	s.answer(t)
	<-done
	if w := g.woken(2); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
	if n := counted(t, w.cfg.Metrics.lost.WithLabelValues(string(Rules))); n != 0 {
		t.Errorf("%v times rules were missed", n)
	}

	refused := make(chan struct{})
	go func() {
		defer close(refused)
		if c, err := g.dialFor(denied.addr, 300*time.Millisecond); err == nil {
			t.Error("what is denied was reached")
			c.Close()
		}
	}()
	<-refused
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, p := range o.all {
		if p.asks || !p.rst { // the answer of the rules, which a paused guest must get
			t.Errorf("a packet that was denied is seen: %+v", p)
		}
	}
}
