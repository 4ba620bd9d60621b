package network_test

import (
	"context"
	"fmt"
	"testing"
	"time"

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
