package node

import (
	"context"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/worker/memory"
)

// gauge is what a metric without labels says.
func gauge(t *testing.T, c prometheus.Collector, name string) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.Metric[0].GetGauge().GetValue()
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// A node that ends in the middle of a wake leaves a sandbox that runs soon: the next one
// takes no memory of it, and pauses it when it is idle.
func TestAWakeThatGoesOnUnderTheNextNode(t *testing.T) {
	r := newBoxRig(t)
	waking := false
	for range 20 {
		if err := r.locked(func() error { return r.b.hold(byCall) }); err != nil {
			t.Fatal(err)
		}
		if err := r.locked(r.b.hibernate); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- r.locked(func() error { return r.b.letGo(byCall) }) }() // ends with the node
		r.until("a wake", func() bool { st, err := r.b.h.State(t.Context()); return err == nil && !st.Hibernated })
		r.leave()
		<-done
		r.next()
		r.b.n.c.PausedMemory, r.b.n.waiting.Metrics = PausedReclaim, memory.NewMetrics()
		r.b.memory.group = &memory.Group{}
		r.b.j.Asked.IdlePause = MinIdlePause.Milliseconds()
		if err := r.b.connect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if waking = r.b.paused.now; waking {
			break
		}
		st, err := r.b.h.Settled(context.Background())
		if err != nil || st.Paused { // it was faster
			t.Fatalf("%+v, %v", st, err)
		}
		r.b.n.c.PausedMemory = PausedKeep
	}
	if !waking {
		t.Fatal("no node has ended in the middle of a wake")
	}
	if err := r.b.takePause(); err != nil {
		t.Fatal(err)
	}
	_ = r.locked(func() error { // so it is settled
		if r.b.held == 0 && gauge(t, r.b.n.waiting.Metrics, "quarry_paused_memory_sandboxes") != 0 {
			t.Error("memory of one that runs may be taken")
		}
		return nil
	})
	r.until("a pause for being idle", func() bool {
		r.b.pausing.Lock()
		defer r.b.pausing.Unlock()
		return r.b.held == byIdle
	})
}
