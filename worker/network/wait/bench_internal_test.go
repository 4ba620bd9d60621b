package wait

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"quarry/internal/netns"
)

// BenchmarkHeader is what one header costs the reader after it was received.
func BenchmarkHeader(b *testing.B) {
	w := &Watcher{cfg: Config{}.withDefaults(), by: map[netip.Addr]*Watched{}}
	x := newWatched(w, Sandbox{})
	w.by[guestAddr] = x
	t := &tap{}
	n := uint32(0)
	datagram := message(hookPostrouting, 0, ipHeader(protoTCP, modelAddr, guestAddr, 1500, tcpHeader(80, 40000, 7, 9, 0x10)))
	b.ReportAllocs()
	for b.Loop() {
		n++
		if err := t.datagram(datagram, w.packet, w.event); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTraffic moves an answer of 64 MiB to a guest that is watched, and to one
// that is not.
func BenchmarkTraffic(b *testing.B) {
	const size = 64 << 20
	for _, watched := range []bool{false, true} {
		b.Run(fmt.Sprint("watched=", watched), func(b *testing.B) {
			l := newLab(b)
			g, s := l.guest(b), l.stub(b)
			var w *Watcher
			if watched {
				var err error
				if w, err = New(Config{Name: "quarry-wait-bench", Endpoints: []netip.AddrPort{s.addr}}); err != nil {
					b.Fatal(err)
				}
				defer w.Close()
				if _, err := w.Watch(g.sandbox()); err != nil {
					b.Fatal(err)
				}
			}
			client := g.client()
			g.get(client, s.url(0, 1))
			b.SetBytes(size)
			for b.Loop() {
				g.get(client, s.url(0, size))
			}
			if w != nil {
				time.Sleep(10 * time.Millisecond)
				n := counted(b, w.cfg.Metrics.packets.WithLabelValues(fromModel)) + counted(b, w.cfg.Metrics.packets.WithLabelValues(fromGuest))
				b.ReportMetric(n/float64(b.N), "headers/op")
				b.ReportMetric(counted(b, w.cfg.Metrics.lost.WithLabelValues(string(Overrun))), "overruns")
			}
		})
	}
}

// BenchmarkWake is from an answer of one byte until Resume is called.
func BenchmarkWake(b *testing.B) {
	l := newLab(b)
	g := l.guest(b)
	var listener net.Listener
	if err := netns.Do(l.model, func() (err error) {
		listener, err = net.Listen("tcp4", "198.51.100.2:0")
		return err
	}); err != nil {
		b.Fatal(err)
	}
	defer listener.Close()
	at := netip.MustParseAddrPort(listener.Addr().String())
	w, err := New(Config{Name: "quarry-wait-bench", Endpoints: []netip.AddrPort{at}, Quiet: 2 * time.Millisecond, Share: 1})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Watch(g.sandbox()); err != nil {
		b.Fatal(err)
	}
	c, err := g.dial(at)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	model, err := listener.Accept()
	if err != nil {
		b.Fatal(err)
	}
	defer model.Close()
	var sum, worst time.Duration
	n := 0
	for b.Loop() {
		if _, err := c.Write([]byte{1}); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(model, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
		g.until("paused", g.isPaused)
		start := time.Now()
		model.Write([]byte{1})
		n++
		took := g.woken(n).at.Sub(start)
		sum, worst = sum+took, max(worst, took)
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(sum.Microseconds())/float64(n), "µs/wake")
	b.ReportMetric(float64(worst.Microseconds()), "µs/worst")
}

// BenchmarkPacket sends answers of one byte each, a packet each, with the copying and
// reading of its header and without.
func BenchmarkPacket(b *testing.B) {
	for _, watched := range []bool{false, true} {
		b.Run(fmt.Sprint("watched=", watched), func(b *testing.B) {
			l := newLab(b)
			g := l.guest(b)
			var listener net.Listener
			if err := netns.Do(l.model, func() (err error) {
				listener, err = net.Listen("tcp4", "198.51.100.2:0")
				return err
			}); err != nil {
				b.Fatal(err)
			}
			defer listener.Close()
			at := netip.MustParseAddrPort(listener.Addr().String())
			if watched {
				w, err := New(Config{Name: "quarry-wait-bench", Endpoints: []netip.AddrPort{at}})
				if err != nil {
					b.Fatal(err)
				}
				defer w.Close()
				if _, err := w.Watch(g.sandbox()); err != nil {
					b.Fatal(err)
				}
			}
			c, err := g.dial(at)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			model, err := listener.Accept()
			if err != nil {
				b.Fatal(err)
			}
			defer model.Close()
			one := make([]byte, 1)
			for b.Loop() { // one on its way at a time, so that none is put together with others
				if _, err := model.Write(one); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(c, one); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
