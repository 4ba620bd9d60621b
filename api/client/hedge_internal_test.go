package client

import (
	"errors"
	"slices"
	"testing"
	"time"
)

// storesOf returns Stores of n stores that are never asked.
func storesOf(t *testing.T, n int) *Stores {
	t.Helper()
	var cfg StoresConfig
	for range n {
		c, err := New(Config{URL: "http://127.0.0.1:1"})
		if err != nil {
			t.Fatal(err)
		}
		cfg.Clients = append(cfg.Clients, c)
	}
	return NewStores(cfg)
}

func TestTheDelayOfAHedgeFollowsTheStore(t *testing.T) {
	for name, tt := range map[string]struct {
		waits []time.Duration
		want  time.Duration
	}{
		"nothing known":               {nil, hedgeUnknown},
		"near":                        {slices.Repeat([]time.Duration{time.Millisecond}, 100), hedgeFloor},
		"far":                         {slices.Repeat([]time.Duration{150 * time.Millisecond}, 100), 300 * time.Millisecond},
		"slow":                        {slices.Repeat([]time.Duration{3 * time.Second}, 100), hedgeCeiling},
		"a stall in 32":               {append(slices.Repeat([]time.Duration{150 * time.Millisecond}, 62), time.Minute, time.Minute), 300 * time.Millisecond},
		"what was long ago is gone":   {append(slices.Repeat([]time.Duration{time.Minute}, 100), slices.Repeat([]time.Duration{time.Millisecond}, waitsKept)...), hedgeFloor},
		"slow now, though not before": {append(slices.Repeat([]time.Duration{time.Millisecond}, 100), slices.Repeat([]time.Duration{250 * time.Millisecond}, 10)...), 500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			s := storesOf(t, 1)
			for _, w := range tt.waits {
				s.members[0].wait(w)
			}
			if got := s.hedgeAfter(s.members[0]); got != tt.want {
				t.Errorf("a hedge after %v, want %v", got, tt.want)
			}
		})
	}
}

func TestTheBudgetOfHedges(t *testing.T) {
	b := newBudget()
	spend := func() (n int) {
		for b.spend() {
			n++
		}
		return n
	}
	if n := spend(); n != hedgeBurst {
		t.Errorf("%d hedges at first, want %d", n, hedgeBurst)
	}
	for range 3*hedgeEvery - 1 {
		b.earn()
	}
	if n := spend(); n != 2 {
		t.Errorf("%d hedges after %d requests, want 2", n, 3*hedgeEvery-1)
	}
	for range 1000 * hedgeEvery {
		b.earn()
	}
	if n := spend(); n != hedgeBurst {
		t.Errorf("%d hedges saved up, want %d", n, hedgeBurst)
	}
}

func TestStoresThatFailAreAskedAfterTheOthers(t *testing.T) {
	s := storesOf(t, 3)
	a, b := s.members[0], s.members[1]
	now := time.Now()
	order := func(now time.Time) (is []int) {
		for _, m := range s.order(now) {
			is = append(is, m.i)
		}
		return is
	}
	want := func(now time.Time, is ...int) {
		t.Helper()
		if got := order(now); !slices.Equal(got, is) {
			t.Errorf("order %v, want %v", got, is)
		}
	}
	bad := errors.New("bad")
	want(now, 0, 1, 2)
	a.failed(now, bad)
	want(now, 1, 2, 0)
	b.failed(now.Add(time.Millisecond), bad)
	want(now, 2, 0, 1)
	for range 100 { // they failed together: that is one failure
		a.failed(now, bad)
	}
	later := now.Add(firstAvoid + time.Second/2)
	want(later, 0, 1, 2) // both to be probed
	a.asked()
	want(later, 1, 2, 0) // a is being probed
	a.failed(later, bad)
	b.asked()
	b.answered()
	want(later, 1, 2, 0)
	want(later.Add(2*firstAvoid-1), 1, 2, 0) // twice as long as at first
	want(later.Add(2*firstAvoid), 0, 1, 2)
	for range 20 {
		later = later.Add(maxAvoid)
		a.failed(later, bad)
	}
	want(later.Add(maxAvoid), 0, 1, 2) // never longer
	a.answered()
	for range overtakes - 1 {
		a.left(later, true)
	}
	a.left(later, false)
	want(later, 0, 1, 2)
	a.left(later, true)
	want(later, 1, 2, 0)
}
