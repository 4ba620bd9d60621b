package memory

import (
	"slices"
	"testing"
)

// What is touched in two waits one after the other, each time after it was away, is
// mapped from then on; what stays mapped without having been away, or is touched once, is
// not; and what is not used any more is found out within eight waits.
func TestAHabitIsLearntAndForgotten(t *testing.T) {
	const always, once, never = 3, 4, 5
	h := &habit{}
	look := func(parts ...int64) (given []int64) {
		now := map[spot]place{}
		for _, i := range parts {
			now[spot{1, 100 + i}] = place{(100 + i) * grain, i * grain}
		}
		for _, s := range h.look(now) {
			if s.pid != 1 || s.addr != (100+s.off/grain)*grain {
				t.Errorf("given %+v", s)
			}
			given = append(given, s.off/grain)
		}
		return given
	}
	back := func(parts ...int64) {
		for _, i := range parts {
			h.bringsBack([]Range{{i * grain, grain}})
		}
	}
	if got := look(always, once, never); len(got) != 0 {
		t.Errorf("mapped %v at the first wake", got)
	}
	back(always, once) // the other stays in memory
	if got := look(always, once, never); len(got) != 0 {
		t.Errorf("mapped %v at the second wake", got)
	}
	back(always)
	given := 0
	for range lookAgain {
		got := look(always, never)
		if slices.Contains(got, never) || slices.Contains(got, once) || len(got) > 1 {
			t.Errorf("mapped %v", got)
		}
		given += len(got)
		back(always)
	}
	if given != lookAgain-1 {
		t.Errorf("what is always used was mapped at %d of %d wakes: want all but one", given, lookAgain)
	}
	ranges := h.first([]Range{{grain, (always + 2) * grain}, {9 * grain, 100}})
	if want := []Range{{always * grain, grain}, {grain, (always - 1) * grain}, {(always + 1) * grain, 2 * grain}, {9 * grain, 100}}; !slices.Equal(ranges, want) {
		t.Errorf("brought back in the order %v, want %v", ranges, want)
	}
	// It is mapped for it, and never touched: not mapped when it was left out.
	waits := 0
	for got := look(always); len(got) > 0; got = look(got...) {
		back(got...)
		if waits++; waits > lookAgain {
			t.Fatal("it is mapped for ever")
		}
	}
	if got := look(); len(got) != 0 || h.hot.has(always) {
		t.Errorf("mapped %v, hot %v", got, h.hot)
	}
}

// What a habit keeps is bounded, whatever a guest does.
func TestAHabitIsBounded(t *testing.T) {
	h := &habit{}
	now := map[spot]place{}
	for i := range int64(3 * maxSpots) {
		now[spot{1, i}] = place{i * grain, i * grain}
	}
	for range 2 {
		h.look(now)
		h.bringsBack([]Range{{0, 1 << 62}})
	}
	if got := h.look(now); len(got) != maxSpots {
		t.Errorf("%d spots", len(got))
	}
}
