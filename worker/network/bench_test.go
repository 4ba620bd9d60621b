package network_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// BenchmarkTake prints what a sandbox pays: for a network that was prepared and for
// one that is made when it is asked for, with a veth and without; for another
// policy; for the end.
func BenchmarkTake(b *testing.B) {
	lab(b)
	usual := []sandbox.Rule{{Host: "pypi.org", Ports: tcp(443)}, {Host: "*.pythonhosted.org", Ports: tcp(443)}, {CIDR: "0.0.0.0/0", Ports: tcp(80)}}
	for _, c := range []struct {
		name  string
		ready int
		rules []sandbox.Rule
	}{{"prepared", 1, usual}, {"cold", -1, usual}, {"prepared bare", 1, nil}, {"cold bare", -1, nil}} {
		b.Run(c.name, func(b *testing.B) {
			n := open(b, network.Config{Ready: c.ready, Bare: c.ready})
			var release time.Duration
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				if c.ready > 0 {
					time.Sleep(40 * time.Millisecond) // the pool fills
				}
				b.StartTimer()
				l, err := n.Take(context.Background(), fmt.Sprint("s", i), sandbox.Policy{Allow: c.rules})
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				t := time.Now()
				if err := n.Release(context.Background(), l.ID); err != nil {
					b.Fatal(err)
				}
				release += time.Since(t)
				b.StartTimer()
			}
			b.ReportMetric(float64(release.Microseconds())/float64(b.N), "release-us/op")
		})
	}
}

// BenchmarkApply is another policy for a sandbox that has one.
func BenchmarkApply(b *testing.B) {
	lab(b)
	n := open(b, network.Config{})
	g := take(b, n, "a", sandbox.Rule{Host: "pypi.org"})
	for i := 0; b.Loop(); i++ {
		g.apply(b, sandbox.Rule{Host: "pypi.org", Ports: tcp(443)}, sandbox.Rule{CIDR: fmt.Sprintf("203.0.113.%d", i%200)})
	}
}

// BenchmarkBurst has 128 sandboxes ask for a network at the same time, and give them
// back.
func BenchmarkBurst(b *testing.B) {
	lab(b)
	for name, rules := range map[string][]sandbox.Rule{"rules": {{Host: "pypi.org", Ports: tcp(443)}}, "bare": nil} {
		b.Run(name, func(b *testing.B) {
			n := open(b, network.Config{})
			var release time.Duration
			all := func(fn func(id string) error) {
				var g errgroup.Group
				for i := range 128 {
					g.Go(func() error { return fn(fmt.Sprint("s", i)) })
				}
				if err := g.Wait(); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				all(func(id string) error {
					_, err := n.Take(context.Background(), id, sandbox.Policy{Allow: rules})
					return err
				})
				b.StopTimer()
				t := time.Now()
				all(func(id string) error { return n.Release(context.Background(), id) })
				release += time.Since(t)
				b.StartTimer()
			}
			b.ReportMetric(float64(release.Milliseconds())/float64(b.N), "release-ms/op")
		})
	}
}

// BenchmarkName is a question for a name: one that is known, and one whose address is
// let through for the first time.
func BenchmarkName(b *testing.B) {
	w := lab(b)
	n := open(b, network.Config{})
	g := take(b, n, "a", sandbox.Rule{Host: "*.example", Ports: tcp(443)})
	w.name("known.example", hostA)
	b.Run("known", func(b *testing.B) {
		for b.Loop() {
			g.resolved(b, "known.example", hostA)
			b.StopTimer()
			time.Sleep(11 * time.Millisecond) // within the rate
			b.StartTimer()
		}
	})
	b.Run("new", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			b.StopTimer()
			name := fmt.Sprintf("n%d-%d.example", b.N, i)
			w.name(name, hostB)
			time.Sleep(11 * time.Millisecond)
			b.StartTimer()
			g.resolved(b, name, hostB)
		}
	})
}
