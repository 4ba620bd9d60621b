package wait

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
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
					g.get(client, s.url(delay, size))
					w := g.woken(i + 1)
					s.mu.Lock()
					answered := s.at[len(s.at)-1]
					s.mu.Unlock()
					if w.Why != Answer {
						t.Errorf("resumed for %s", w.Why)
					}
					t.Log("resumed", w.at.Sub(answered), "after the answer was sent")
				}
			})
		}
	}
}
