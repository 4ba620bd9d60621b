package node

import (
	"testing"
	"time"

	"quarry/worker/memory"
)

func TestWhoIsPutToDisk(t *testing.T) {
	large := sleeper{"large", 2 * time.Minute, 800 << 20}
	for name, c := range map[string]struct {
		list  []sleeper
		after time.Duration
		want  string
	}{
		"nobody":               {nil, time.Minute, ""},
		"who has most":         {[]sleeper{{"small", time.Hour, 100 << 20}, large, {"larger, and new", time.Second, 1 << 30}}, time.Minute, "large"},
		"who waits longest":    {[]sleeper{large, {"longer", 3 * time.Minute, large.own}}, time.Minute, "longer"},
		"nobody has much":      {[]sleeper{{"bare", time.Hour, 20 << 20}}, time.Minute, ""},
		"nobody waits so long": {[]sleeper{large}, time.Hour, ""},
		"never":                {[]sleeper{large}, -1, ""},
	} {
		if got, ok := whoNaps(c.list, c.after); got != c.want || ok != (c.want != "") {
			t.Errorf("%s: %q, %v", name, got, ok)
		}
	}
}

func TestSwapIsFull(t *testing.T) {
	for r, want := range map[memory.Reading]bool{
		{}: true, {SwapTotal: 100, SwapFree: 50}: false, {SwapTotal: 100, SwapFree: 5}: true, {SwapTotal: 100, SwapFree: 6}: false,
	} {
		if got := r.SwapFull(); got != want {
			t.Errorf("%+v: %v", r, got)
		}
	}
}
