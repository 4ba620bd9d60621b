// Package proxy is a TCP proxy that makes loopback behave like a network: it
// delays, it has a bandwidth, it counts, and it fails on demand. Measurements and
// stories put it between a worker and a store.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Gigabit is the bandwidth that measurements use, in bits a second.
const Gigabit = 1e9

// Config describes a network. It has no losses and no slow start.
type Config struct {
	// Target is the server's host and port.
	Target string
	// RTT is the time of a round trip: each direction has half of it, and a new
	// connection costs a whole one, as TCP's handshake does.
	RTT time.Duration
	// BitsPerSecond is what all connections share, each direction by itself; 0
	// is no limit.
	BitsPerSecond int64
}

// Proxy forwards connections. Safe for concurrent use.
type Proxy struct {
	cfg      Config
	l        net.Listener
	up, down lane
	ctx      context.Context // ends with Close; only the goroutines of this proxy see it
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	conns    atomic.Int64

	mu     sync.Mutex // guards what follows
	target string
	open   map[net.Conn]struct{}
	cut    bool
	record bool
	tapes  []*tape
}

// New listens on a free port of loopback.
func New(cfg Config) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("proxy for %s: %w", cfg.Target, err)
	}
	p := newProxy(cfg)
	p.l = l
	p.wg.Go(p.accept) // ends with Close
	return p, nil
}

func newProxy(cfg Config) *Proxy {
	p := &Proxy{cfg: cfg, target: cfg.Target, open: map[net.Conn]struct{}{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for _, l := range []*lane{&p.up, &p.down} {
		l.delay, l.bits = cfg.RTT/2, cfg.BitsPerSecond
	}
	return p
}

// Addr is where the proxy listens.
func (p *Proxy) Addr() string { return p.l.Addr().String() }

// URL is the store's URL through the proxy.
func (p *Proxy) URL() string { return "http://" + p.Addr() }

// Bytes is what has come in so far, both ways.
func (p *Proxy) Bytes() int64 { return p.up.bytes.Load() + p.down.bytes.Load() }

// Conns is how many connections there have been.
func (p *Proxy) Conns() int64 { return p.conns.Load() }

// Close ends all connections and waits for them.
func (p *Proxy) Close() error {
	err := p.l.Close()
	p.cancel()
	p.Cut()
	p.wg.Wait()
	return err
}

// Retarget sends connections that are made from now on to another server.
func (p *Proxy) Retarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Cut closes every connection, and new ones as soon as they come, until Mend.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = true
	for c := range p.open {
		c.Close()
	}
}

// Mend ends Cut, Stall and Flip.
func (p *Proxy) Mend() {
	p.mu.Lock()
	p.cut = false
	p.mu.Unlock()
	p.up.fault(0, false)
	p.down.fault(0, false)
}

// Stall lets no byte pass in either direction until Mend; connections stay open.
func (p *Proxy) Stall() {
	p.up.fault(0, true)
	p.down.fault(0, true)
}

// Flip changes one bit of every piece of at least min bytes that comes from the
// server, until Mend. With min above the length of an HTTP header it hits bodies.
func (p *Proxy) Flip(min int) { p.down.fault(min, false) }

func (p *Proxy) accept() {
	for {
		conn, err := p.l.Accept()
		if err != nil {
			return
		}
		p.conns.Add(1)
		p.wg.Go(func() { p.dial(conn) })
	}
}

func (p *Proxy) dial(client net.Conn) {
	defer client.Close()
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	server, err := new(net.Dialer).DialContext(p.ctx, "tcp", target)
	if err != nil {
		return
	}
	defer server.Close()
	if p.keep(client, server) {
		p.serve(client, server)
	}
	p.forget(client, server)
}

// keep remembers connections for Cut; false says that they must not live.
func (p *Proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		p.open[c] = struct{}{}
	}
	return !p.cut
}

func (p *Proxy) forget(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.open, c)
	}
}

// serve forwards both ways until both ends have said all they have to say.
func (p *Proxy) serve(client, server net.Conn) {
	var wg sync.WaitGroup
	t := p.tape()
	// Nothing a client says is on its way before the handshake is over.
	opened := time.Now().Add(p.cfg.RTT)
	wg.Go(func() { p.forward(&p.up, server, client, opened, t.up()) })
	wg.Go(func() { p.forward(&p.down, client, server, time.Time{}, t.down()) })
	wg.Wait()
}

// forward moves one direction of a connection. When either end is gone, so is
// the connection; an end that only stops talking still hears.
func (p *Proxy) forward(l *lane, to, from net.Conn, opened time.Time, copy io.Writer) {
	err := l.move(p.ctx, to, io.TeeReader(from, copy), opened)
	if w, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
		w.CloseWrite()
		return
	}
	to.Close()
	if !errors.Is(err, io.EOF) {
		from.Close()
	}
}
