package wait

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/netns"
)

// watch opens a watcher of one guest.
func watch(t *testing.T, cfg Config, owned bool, gs ...*guest) (*Watcher, []*Watched) {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "quarry-wait-test"
	}
	w, err := open(cfg, owned)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	var all []*Watched
	for _, g := range gs {
		x, err := w.Watch(g.sandbox())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, x)
	}
	return w, all
}

func ends(s ...*stub) (out []netip.AddrPort) {
	for _, one := range s {
		out = append(out, one.addr)
	}
	return out
}

func TestPausedUntilTheAnswerComes(t *testing.T) {
	l := newLab(t)
	s := l.stub(t)
	for _, size := range []int{1, 1 << 20, 4 << 20} {
		for _, delay := range []time.Duration{200 * time.Millisecond, time.Second} {
			t.Run(fmt.Sprint(size, " bytes after ", delay), func(t *testing.T) {
				g := l.guest(t)
				watch(t, Config{Endpoints: ends(s)}, true, g)
				client := g.client()
				for i := range 3 {
					answered, w := g.answered(client, s, delay, size, i+1)
					if w.Why != Answer {
						t.Errorf("resumed for %s", w.Why)
					}
					t.Log("resumed", w.at.Sub(answered), "after the answer was sent")
				}
			})
		}
	}
}

// observe records every header that is seen of some guests.
type observer struct {
	mu  sync.Mutex
	all []packet
	s   *session
}

func observe(t *testing.T, at []netip.AddrPort, gs ...*guest) *observer {
	t.Helper()
	var sandboxes []Sandbox
	for _, g := range gs {
		sandboxes = append(sandboxes, g.sandbox())
	}
	s, err := openSession(Config{Name: "quarry-wait-observer"}.withDefaults(), at, sandboxes, true)
	if err != nil {
		t.Fatal(err)
	}
	o := &observer{s: s}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.tap.read(func(l logged) {
			_, p, err := parsePacket(l.payload, l.hook == hookPrerouting)
			if err != nil {
				t.Errorf("a header that cannot be read: %x", l.payload)
			}
			o.mu.Lock()
			o.all = append(o.all, p)
			o.mu.Unlock()
		}, func(e tapEvent) {
			if e == tapMissing {
				t.Error("headers are missing")
			}
		})
	}()
	t.Cleanup(func() { s.close(); <-done })
	return o
}

// saw waits until there is a packet that ok takes after all that were found before,
// and returns its place.
func (o *observer) saw(t *testing.T, what string, after int, ok func(packet) bool) int {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		o.mu.Lock()
		for i := after; i < len(o.all); i++ {
			if ok(o.all[i]) {
				o.mu.Unlock()
				return i + 1
			}
		}
		o.mu.Unlock()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	t.Fatalf("no %s after packet %d of %+v", what, after, o.all)
	return 0
}

func TestPacketsAreSeenInOrder(t *testing.T) {
	l := newLab(t)
	s, g := l.stub(t), l.guest(t)
	o := observe(t, ends(s), g)
	isAsk := func(p packet) bool { return p.asks && p.size > 0 && !p.syn && !p.fin }
	isAnswer := func(p packet) bool { return !p.asks && p.size > 0 && !p.syn && !p.fin }
	for _, size := range []int{1, 1 << 20} {
		c, err := g.dial(s.addr)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { io.Copy(io.Discard, c) })
		at := o.saw(t, "beginning", 0, func(p packet) bool { return p.asks && p.syn })
		at = o.saw(t, "answer to it", at, func(p packet) bool { return !p.asks && p.syn })
		for range 2 { // one connection
			fmt.Fprintf(c, "GET /?delay=100ms&size=%d HTTP/1.1\r\nHost: model\r\n\r\n", size)
			at = o.saw(t, "request", at, isAsk)
			at = o.saw(t, "answer", at, isAnswer)
		}
		s.mu.Lock()
		last := s.conn[len(s.conn)-1].(*net.TCPConn)
		s.mu.Unlock()
		if size == 1 {
			last.Close()
			o.saw(t, "end", at, func(p packet) bool { return !p.asks && p.fin })
		} else {
			last.SetLinger(0)
			last.Close()
			o.saw(t, "reset", at, func(p packet) bool { return !p.asks && p.rst })
		}
		wg.Wait()
		c.Close()
		o.mu.Lock()
		o.all = nil
		o.mu.Unlock()
	}
}

// acknowledgements of a long answer are not handed over. Those that say what is missing
// are, and on a busy machine something is, now and then.
func TestALongAnswerCostsNoAcknowledgements(t *testing.T) {
	l := newLab(t)
	s := l.stub(t)
	var asks []int
	for range 5 {
		g := l.guest(t)
		o := observe(t, ends(s), g)
		client := g.client()
		g.get(client, s.url(0, 8<<20))
		client.CloseIdleConnections()
		o.saw(t, "end", 0, func(p packet) bool { return p.asks && p.fin })
		n := 0
		o.mu.Lock()
		for _, p := range o.all {
			if p.asks && p.size == 0 {
				n++
			}
		}
		o.mu.Unlock()
		if n <= 5 {
			return
		}
		asks = append(asks, n)
	}
	t.Errorf("%d acknowledgements were copied", asks)
}

// TestAGuestThatSendsMuch: what is copied of it is bounded, and what it sends last is
// a request like any other.
func TestAGuestThatSendsMuch(t *testing.T) {
	l := newLab(t)
	g, w, c, m := waiting(t, l, true)
	go io.Copy(io.Discard, m) // until the test's end closes it
	const writes = 20 * copyBurst
	start := time.Now()
	for range writes {
		if _, err := c.Write([]byte{1}); err != nil { // each is a packet: Go turns off Nagle's delay
			t.Fatal(err)
		}
	}
	took := time.Since(start)
	n := counted(t, w.cfg.Metrics.packets.WithLabelValues(fromGuest))
	most := copyBurst + copyRate*(took.Seconds()+1) + 10
	t.Logf("%v of %d packets in %s were copied", n, writes, took)
	if n > most && took < 20*time.Second {
		t.Errorf("%v of %d packets in %s were copied, more than %v", n, writes, took, most)
	}
	// It was paused before, and may be in between: only after the last packet has been
	// seen does a pause last.
	resumed := 0
	for last := -1; last != resumed; time.Sleep(time.Second) {
		last = resumed
		g.mu.Lock()
		resumed = len(g.wakes)
		g.mu.Unlock()
	}
	g.until("paused", g.isPaused)
	m.Write([]byte("answer"))
	if w := g.woken(resumed + 1); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
}

// raw is a model of a test that does what it is told with each connection.
func (l *lab) raw(t *testing.T) (*net.TCPListener, netip.AddrPort) {
	t.Helper()
	var listener net.Listener
	if err := netns.Do(l.model, func() (err error) {
		listener, err = net.Listen("tcp4", "198.51.100.2:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	at := listener.Addr().(*net.TCPAddr).AddrPort()
	return listener.(*net.TCPListener), netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}

// waiting is a guest that is paused for an answer, and both ends of its connection.
func waiting(t *testing.T, l *lab, owned bool) (g *guest, w *Watcher, c, model *net.TCPConn) {
	t.Helper()
	listener, at := l.raw(t)
	g = l.guest(t)
	w, _ = watch(t, Config{Endpoints: []netip.AddrPort{at}}, owned, g)
	conn, err := g.dial(at)
	if err != nil {
		t.Fatal(err)
	}
	if model, err = listener.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); model.Close() })
	if _, err := conn.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	g.until("paused", g.isPaused)
	return g, w, conn.(*net.TCPConn), model
}

func TestWhatEndsAConnectionWakes(t *testing.T) {
	l := newLab(t)
	for name, tt := range map[string]struct {
		end func(g *guest, c, model *net.TCPConn)
		why Reason
	}{
		"the model closes":                 {func(_ *guest, _, m *net.TCPConn) { m.Close() }, Reset}, // it has not read the question
		"the model is done":                {func(_ *guest, _, m *net.TCPConn) { m.CloseWrite() }, Closed},
		"the model resets":                 {func(_ *guest, _, m *net.TCPConn) { m.SetLinger(0); m.Close() }, Reset},
		"one byte":                         {func(_ *guest, _, m *net.TCPConn) { m.Write([]byte{1}) }, Answer},
		"the guest's stack goes on asking": {func(_ *guest, c, _ *net.TCPConn) { c.Write([]byte("more")) }, Asks},
		"the guest's stack resets":         {func(_ *guest, c, _ *net.TCPConn) { c.SetLinger(0); c.Close() }, Reset},
	} {
		t.Run(name, func(t *testing.T) {
			g, _, c, m := waiting(t, l, true)
			tt.end(g, c, m)
			if w := g.woken(1); w.Why != tt.why {
				t.Errorf("resumed for %s, want %s", w.Why, tt.why)
			}
		})
	}
}

func TestAnICMPErrorWakes(t *testing.T) {
	l := newLab(t)
	g, _, c, _ := waiting(t, l, true)
	local := c.LocalAddr().(*net.TCPAddr).AddrPort()
	remote := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	// A router of the model's side says that the model is not reached.
	body := append([]byte{3, 1, 0, 0, 0, 0, 0, 0}, ipHeader(protoTCP, g.addr, remote.Addr().Unmap(), 48, tcpHeader(local.Port(), remote.Port(), 1, 1, 0x18)[:8])...)
	sum := uint32(0)
	for i := 0; i < len(body); i += 2 {
		sum += uint32(body[i])<<8 | uint32(body[i+1])
	}
	sum = sum>>16 + sum&0xffff
	sum = ^(sum + sum>>16)
	body[2], body[3] = byte(sum>>8), byte(sum)
	if err := netns.Do(l.model, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, protoICMP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, body, 0, &unix.SockaddrInet4{Addr: g.addr.As4()})
	}); err != nil {
		t.Fatal(err)
	}
	if w := g.woken(1); w.Why != ICMP {
		t.Errorf("resumed for %s", w.Why)
	}
}

func TestTheReaderIsReplacedWhenItFails(t *testing.T) {
	l := newLab(t)
	g, w, conn, m := waiting(t, l, true)
	w.mu.Lock()
	s := w.session
	w.mu.Unlock()
	s.tap.close()
	if w := g.woken(1); w.Why != Reader {
		t.Errorf("resumed for %s", w.Why)
	}
	eventually(t, "something is seen again", func() bool { return !w.isBlind() })
	conn.Write([]byte("another question"))
	g.until("paused again", g.isPaused)
	m.Write([]byte("answer"))
	if w := g.woken(2); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
}

func TestAnOverrunResumesEverything(t *testing.T) {
	l := newLab(t)
	s := l.stub(t)
	var all []*guest
	for range 3 {
		all = append(all, l.guest(t))
	}
	w, _ := watch(t, Config{Endpoints: ends(s), Buffer: 4096}, true, all...)
	client := all[0].client()
	var wg sync.WaitGroup
	for _, g := range all[1:] {
		c := g.client()
		wg.Go(func() { g.get(c, s.held(1)) })
	}
	for _, g := range all[1:] {
		g.until("paused", g.isPaused)
	}
	// More than the socket holds while it is not read.
	w.sight.Lock()
	all[0].get(client, s.url(0, 16<<20))
	w.sight.Unlock()
	for _, g := range all[1:] {
		if w := g.woken(1); w.Why != Overrun {
			t.Errorf("resumed for %s", w.Why)
		}
	}
	for range all[1:] {
		s.answer(t)
	}
	wg.Wait()
	if n := counted(t, w.cfg.Metrics.lost.WithLabelValues(string(Overrun))); n == 0 {
		t.Error("no loss is counted")
	}
	eventually(t, "something is seen again", func() bool { return !w.isBlind() })
	g := all[1]
	g.mu.Lock()
	n := len(g.wakes)
	g.mu.Unlock()
	if _, w := g.answered(g.client(), s, 0, 1, n+1); w.Why != Answer {
		t.Errorf("resumed for %s", w.Why)
	}
}
