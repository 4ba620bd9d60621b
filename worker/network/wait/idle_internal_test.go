package wait

import (
	"errors"
	"testing"
	"time"
)

// idleFor runs a policy until it pauses or d has passed, and returns when.
func idleFor(i *Idle, now *time.Time, d time.Duration, cpu func(time.Time) time.Duration, err error, busy bool) (time.Duration, bool) {
	start := *now
	for end := now.Add(d); ; {
		at := i.Next()
		if at.IsZero() || at.After(end) {
			*now = end
			return d, false
		}
		if at.After(*now) {
			*now = at
		}
		if i.Sample(cpu(*now), err, busy, *now) {
			return now.Sub(start), true
		}
	}
}

func TestIdle(t *testing.T) {
	const after = time.Second
	none := func(time.Time) time.Duration { return 0 }
	start := time.Unix(1000, 0)
	setUp := func() (*Idle, *time.Time) {
		now := start
		return NewIdle(after, 0, now), &now
	}
	t.Run("after the time and not before", func(t *testing.T) {
		i, now := setUp()
		if took, ok := idleFor(i, now, time.Hour, none, nil, false); !ok || took != after {
			t.Errorf("paused %v after %s", ok, took)
		}
	})
	t.Run("not while a command runs", func(t *testing.T) {
		i, now := setUp()
		if i.Use() {
			t.Error("resumed though it runs")
		}
		if _, ok := idleFor(i, now, time.Hour, none, nil, false); ok {
			t.Error("paused")
		}
		i.Done(*now)
		if took, ok := idleFor(i, now, time.Hour, none, nil, false); !ok || took != after {
			t.Errorf("paused %v after %s", ok, took)
		}
	})
	t.Run("a command resumes it first", func(t *testing.T) {
		i, now := setUp()
		idleFor(i, now, time.Hour, none, nil, false)
		i.Paused(true, *now)
		if _, ok := idleFor(i, now, time.Hour, none, nil, false); ok {
			t.Error("paused twice")
		}
		if !i.Use() {
			t.Error("not resumed")
		}
		i.Paused(false, *now)
		i.Done(*now)
		if took, ok := idleFor(i, now, time.Hour, none, nil, false); !ok || took != after {
			t.Errorf("paused %v after %s", ok, took)
		}
	})
	t.Run("not while it works in the background", func(t *testing.T) {
		i, now := setUp()
		work := func(at time.Time) time.Duration { return min(at.Sub(start), time.Minute) / 10 }
		took, ok := idleFor(i, now, time.Hour, work, nil, false)
		if !ok || took < time.Minute+after || took > time.Minute+2*after {
			t.Errorf("paused %v after %s", ok, took)
		}
	})
	t.Run("timers of the runtime are no work", func(t *testing.T) {
		i, now := setUp()
		if took, ok := idleFor(i, now, time.Hour, func(at time.Time) time.Duration { return at.Sub(start) / 100 }, nil, false); !ok || took != after {
			t.Errorf("paused %v after %s", ok, took)
		}
	})
	t.Run("not when it is busy, or that is not known", func(t *testing.T) {
		i, now := setUp()
		if _, ok := idleFor(i, now, time.Hour, none, nil, true); ok {
			t.Error("paused while busy")
		}
		if _, ok := idleFor(i, now, time.Hour, none, errors.New("gone"), false); ok {
			t.Error("paused without a reading")
		}
		if took, ok := idleFor(i, now, time.Hour, none, nil, false); !ok || took > 2*after {
			t.Errorf("paused %v after %s", ok, took)
		}
	})
	t.Run("never without a time", func(t *testing.T) {
		i := NewIdle(0, 0, start)
		if !i.Next().IsZero() || i.Sample(0, nil, false, start.Add(time.Hour)) {
			t.Error("paused")
		}
	})
	t.Run("a counter that went back is not trusted", func(t *testing.T) {
		i, now := setUp()
		back := func(at time.Time) time.Duration { return -at.Sub(start) }
		if _, ok := idleFor(i, now, time.Minute, back, nil, false); ok {
			t.Error("paused")
		}
	})
}
