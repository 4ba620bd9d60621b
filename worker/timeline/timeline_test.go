package timeline_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/worker/timeline"
)

func TestStepsStandByTheirBeginTheLongerFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tl := timeline.New(time.Now())
		ctx := timeline.With(t.Context(), tl)
		time.Sleep(5 * time.Millisecond)
		endShim := timeline.Begin(ctx, "shim")
		endDial := timeline.Begin(ctx, "shim: dial")
		time.Sleep(2 * time.Millisecond)
		endDial()
		time.Sleep(1500 * time.Microsecond)
		endShim()
		tl.Add("sweep", tl.Began(), tl.Began().Add(3*time.Millisecond))
		got := tl.Steps()
		want := []timeline.Step{{Name: "sweep", Took: 3}, {Name: "shim", Start: 5, Took: 3.5}, {Name: "shim: dial", Start: 5, Took: 2}}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
		// 3 of the first 5 ms, and all from 5 to 8.5; the end at 20 has no step.
		if got := timeline.Covered(got, 20); got != 6.5 {
			t.Errorf("covered %v ms, want 6.5", got)
		}
		if got := timeline.Covered(got, 6); got != 4 {
			t.Errorf("covered %v of the first 6 ms, want 4", got)
		}
	})
}

func TestATimelineIsBoundedAndSafeForMany(t *testing.T) {
	tl := timeline.New(time.Now())
	ctx := timeline.With(t.Context(), tl)
	var wg sync.WaitGroup
	for range 2 * timeline.MaxSteps {
		wg.Go(timeline.Begin(ctx, "step"))
	}
	wg.Wait()
	if got := len(tl.Steps()); got != timeline.MaxSteps {
		t.Errorf("%d steps kept, want %d", got, timeline.MaxSteps)
	}
}

func TestWithoutATimelineNothingIsNoted(t *testing.T) {
	timeline.Begin(context.Background(), "step")()
	timeline.Of(context.Background()).Add("step", time.Now(), time.Now())
	if got := timeline.Of(context.Background()).Steps(); got != nil {
		t.Errorf("steps %v of no timeline", got)
	}
}
