package wait

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"quarry/internal/need"
)

// flush removes every rule, as a firewall does that starts anew.
func flush(t *testing.T) {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	c.FlushRuleset()
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
}

func TestAFlushOfAllRulesLeavesOurs(t *testing.T) {
	l := newLab(t)
	g, w, _, m := waiting(t, l, true)
	flush(t)
	time.Sleep(100 * time.Millisecond)
	if !w.session.rules.held {
		need.Missing(t, "tables with an owner, of Linux 5.12")
	}
	m.Write([]byte("answer"))
	if w := g.woken(1); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
}

func TestRulesThatAreRemovedAreMissed(t *testing.T) {
	l := newLab(t)
	table := &nftables.Table{Name: "quarry-wait-test", Family: nftables.TableFamilyIPv4}
	for name, remove := range map[string]func(c *nftables.Conn){
		"every rule of the node": func(c *nftables.Conn) { c.FlushRuleset() },
		"the table":              func(c *nftables.Conn) { c.DelTable(table) },
		"the rules of a chain":   func(c *nftables.Conn) { c.FlushChain(&nftables.Chain{Table: table, Name: chainAnswers}) },
		"the guests":             func(c *nftables.Conn) { c.FlushSet(&nftables.Set{Table: table, Name: setGuests}) },
		"a rule is added": func(c *nftables.Conn) {
			c.AddRule(&nftables.Rule{Table: table, Chain: &nftables.Chain{Table: table, Name: chainAnswers}, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			g, w, conn, m := waiting(t, l, false)
			c, err := nftables.New()
			if err != nil {
				t.Fatal(err)
			}
			remove(c)
			if err := c.Flush(); err != nil {
				t.Fatal(err)
			}
			if w := g.woken(1); w.Why != Rules {
				t.Errorf("resumed for %s", w.Why)
			}
			// They are put back.
			eventually(t, "something is seen again", func() bool { return !w.isBlind() })
			conn.Write([]byte("another question"))
			g.until("paused again", g.isPaused)
			m.Write([]byte("answer"))
			if w := g.woken(2); w.Why != Answer {
				t.Errorf("resumed for %s", w.Why)
			}
		})
	}
}

func TestAChangeOfOtherTablesIsNoReason(t *testing.T) {
	l := newLab(t)
	g, _, _, m := waiting(t, l, true)
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	other := c.AddTable(&nftables.Table{Name: "another", Family: nftables.TableFamilyIPv4})
	c.AddChain(&nftables.Chain{Table: other, Name: "chain"})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	c.DelTable(other)
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	m.Write([]byte("answer"))
	if w := g.woken(1); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
}

// TestACopyThatWasNeverMadeIsMissed: the kernel had no memory for it, and says nothing.
func TestACopyThatWasNeverMadeIsMissed(t *testing.T) {
	l := newLab(t)
	_, w, _, _ := waiting(t, l, true)
	w.mu.Lock()
	s := w.session
	w.mu.Unlock()
	losses := 0
	check := func() {
		t.Helper()
		if err := s.check(func() { losses++ }); err != nil {
			t.Fatal(err)
		}
	}
	check()
	check()
	if losses != 0 {
		t.Fatal("a loss without one")
	}
	s.read.Add(-1)
	for range 3 {
		check()
	}
	if losses != 1 {
		t.Errorf("%d losses, want 1", losses)
	}
	s.told.Store(3)
	s.read.Add(-1)
	for range 3 {
		check()
	}
	if losses != 1 {
		t.Errorf("%d losses, want 1: the socket told of the other", losses)
	}
}

func TestResolve(t *testing.T) {
	got, err := Resolve(t.Context(), net.DefaultResolver, []string{"198.51.100.9:80", "198.51.100.2:8000", "198.51.100.9:80"})
	want := []netip.AddrPort{netip.MustParseAddrPort("198.51.100.2:8000"), netip.MustParseAddrPort("198.51.100.9:80")}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"198.51.100.9", "198.51.100.9:0", "198.51.100.9:http", "198.51.100.9:70000"} {
		if _, err := Resolve(t.Context(), net.DefaultResolver, []string{bad}); !errors.Is(err, ErrEndpoint) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	if _, err := Resolve(t.Context(), net.DefaultResolver, []string{"[2001:db8::1]:80"}); err == nil {
		t.Error("an IPv6 address is taken")
	}
}

func TestTwoWatchersAndTheirTables(t *testing.T) {
	l := newLab(t)
	s, g := l.stub(t), l.guest(t)
	w, _ := watch(t, Config{Endpoints: ends(s)}, true, g)
	if _, err := New(Config{Name: "quarry-wait-test", Endpoints: ends(s)}); !errors.Is(err, ErrTable) {
		t.Errorf("a second watcher of one name: %v", err)
	}
	other, err := New(Config{Name: "quarry-wait-other", Endpoints: ends(s)})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	if _, err := other.Watch(g.sandbox()); !errors.Is(err, ErrClosed) {
		t.Errorf("a closed watcher: %v", err)
	}
	if _, err := w.Watch(g.sandbox()); !errors.Is(err, ErrWatched) {
		t.Errorf("the same sandbox: %v", err)
	}
	g.answered(g.client(), s, 0, 1, 1)
	w.Close()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	tables, err := c.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range tables {
		t.Errorf("table %s is left", one.Name)
	}
}

func TestOtherEndpoints(t *testing.T) {
	l := newLab(t)
	g, w, _, _ := waiting(t, l, true)
	s := l.stub(t)
	if err := w.SetEndpoints(ends(s)); err != nil {
		t.Fatal(err)
	}
	if w := g.woken(1); w.Why != Endpoint {
		t.Errorf("resumed for %s", w.Why)
	}
	if _, w := g.answered(g.client(), s, 0, 1, 2); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
	for _, bad := range []string{"[2001:db8::1]:80", "192.0.2.1:0"} {
		if err := w.SetEndpoints([]netip.AddrPort{netip.MustParseAddrPort(bad)}); !errors.Is(err, ErrEndpoint) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
