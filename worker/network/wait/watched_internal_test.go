package wait

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// counted is the value of a counter.
func counted(t testing.TB, c prometheus.Metric) float64 {
	t.Helper()
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue() + m.GetGauge().GetValue()
}

// fake is a sandbox without packets of a kernel.
type fake struct {
	t    *testing.T
	x    *Watched
	took time.Duration // of each call of Pause and Resume

	mu     sync.Mutex
	calls  []string
	paused bool
	fail   int // so many more Resumes fail
	late   []time.Duration
}

var errStays = errors.New("it cannot be resumed")

func newFake(t *testing.T) *fake {
	t.Helper()
	w := &Watcher{cfg: Config{}.withDefaults(), by: map[netip.Addr]*Watched{}}
	f := &fake{t: t}
	f.x = newWatched(w, Sandbox{ID: "s", CPU: func() (time.Duration, error) { return 0, nil }, Pause: f.pause, Resume: f.resume})
	go f.x.loop()
	t.Cleanup(f.x.Close)
	return f
}

func (f *fake) pause(ctx context.Context) error {
	time.Sleep(f.took)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.paused {
		f.t.Error("paused twice")
	}
	if ctx.Err() != nil {
		f.calls = append(f.calls, "overtaken")
		return ctx.Err()
	}
	f.paused = true
	f.calls = append(f.calls, "pause")
	return nil
}

func (f *fake) resume(_ context.Context, w Wake) error {
	time.Sleep(f.took)
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.paused {
		f.t.Error("resumed though it runs")
	}
	if f.fail > 0 {
		f.fail--
		return errStays
	}
	f.paused = false
	f.calls = append(f.calls, string(w.Why))
	f.late = append(f.late, time.Since(w.Seen))
	return nil
}

func (f *fake) is(paused bool) {
	f.t.Helper()
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.paused != paused {
		f.t.Fatalf("paused: %v, want %v; calls %v", f.paused, paused, f.calls)
	}
}

// asks sends a request and lets time pass.
func (f *fake) asks(d time.Duration) {
	now := time.Now()
	f.x.mu.Lock()
	next := uint32(1000)
	if c := f.x.m.conns[flowA]; c != nil {
		next = c.asked
	}
	f.x.mu.Unlock()
	f.x.packet(ask(flowA, next, 10, 900), now)
	f.x.packet(answer(flowA, 900, 0, next+10), now)
	time.Sleep(d)
}

func (f *fake) answers() {
	f.x.mu.Lock()
	c := f.x.m.conns[flowA]
	p := answer(flowA, c.answered, 10, c.asked)
	f.x.mu.Unlock()
	f.x.packet(p, time.Now())
}

func TestPausedFiftyMillisecondsAfterTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		for range 3 {
			f.asks(49 * time.Millisecond)
			f.is(false)
			time.Sleep(time.Millisecond)
			f.is(true)
			time.Sleep(20 * time.Second)
			f.is(true)
			f.answers()
			f.is(false)
		}
		if n := counted(t, f.x.w.cfg.Metrics.late); n != 0 {
			t.Errorf("%v late", n)
		}
	})
}

func TestTenMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.asks(50 * time.Millisecond)
		f.is(true)
		time.Sleep(10*time.Minute - 1)
		f.is(true)
		time.Sleep(time.Nanosecond)
		f.is(false)
		time.Sleep(time.Hour)
		f.is(false)
	})
}

func TestAnAnswerWhileItIsBeingPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.took = 5 * time.Millisecond
		f.asks(52 * time.Millisecond)
		f.answers() // Pause has begun
		time.Sleep(time.Second)
		f.is(false)
		if f.x.Asks() || len(f.calls) != 1 || f.calls[0] != "overtaken" {
			t.Errorf("calls %v", f.calls)
		}
	})
}

func TestUsedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.took = 2 * time.Millisecond
		f.asks(time.Second)
		f.is(true)
		start := time.Now()
		release, err := f.x.Use(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != f.took {
			t.Errorf("Use took %s", took)
		}
		f.is(false)
		time.Sleep(5 * time.Minute)
		f.is(false) // it is in use
		release()
		release()
		time.Sleep(time.Second)
		f.is(true) // and waits for its model still
		// Who cannot have it is told why, every time, and it is resumed when that works.
		f.fail = 1 << 30
		for range 2 {
			if _, err := f.x.Use(t.Context()); !errors.Is(err, errStays) {
				t.Errorf("got %v", err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), f.took/2)
		defer cancel()
		if _, err := f.x.Use(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		f.mu.Lock()
		f.fail = 0
		f.mu.Unlock()
		time.Sleep(2 * time.Second)
		f.mu.Lock()
		defer f.mu.Unlock()
		if last := f.calls[len(f.calls)-1]; last != "pause" || f.calls[len(f.calls)-2] != string(Used) {
			t.Errorf("calls %v", f.calls)
		}
	})
}

func TestLateIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.asks(time.Second)
		f.is(true)
		f.fail = 3
		f.answers()
		time.Sleep(time.Minute)
		f.is(false)
		if n := counted(t, f.x.w.cfg.Metrics.late); n != 1 || f.late[0] != 140*time.Millisecond {
			t.Errorf("%v late, %v", n, f.late)
		}
	})
}

func TestEverythingIsResumedInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &Watcher{cfg: Config{}.withDefaults(), by: map[netip.Addr]*Watched{}}
		var all []*fake
		for i := range 20 {
			f := newFake(t)
			f.x.w = w
			w.by[netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})] = f.x
			f.asks(0)
			all = append(all, f)
		}
		time.Sleep(time.Second)
		for _, f := range all {
			f.is(true)
		}
		w.event(tapMissing)
		for _, f := range all {
			f.is(false)
		}
		// Until the socket was empty nothing counts.
		all[0].asks(time.Second)
		all[0].is(false)
		w.event(tapDrained)
		w.event(tapDrained)
		time.Sleep(time.Second)
		all[0].is(false)
		all[0].asks(time.Second)
		all[0].is(true)
		all[1].is(false)
		w.missing()
		all[0].is(false)
		if n := counted(t, w.cfg.Metrics.lost.WithLabelValues(string(Overrun))); n != 2 {
			t.Errorf("%v losses", n)
		}
	})
}

func TestCloseResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t)
		f.asks(time.Second)
		f.is(true)
		f.x.Close()
		f.is(false)
		f.x.Close()
		if f.calls[len(f.calls)-1] != string(Stopped) {
			t.Errorf("calls %v", f.calls)
		}
	})
}
