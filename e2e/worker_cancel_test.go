package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/worker/sandbox"
)

// windowTries is how often a create is given up in each of its steps.
const windowTries = 20

// TestACreateThatIsGivenUpLeavesNothing gives a create up at times in each of its steps.
// What it began settles: it is found by its key, and goes when it is deleted.
func TestACreateThatIsGivenUpLeavesNothing(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	spec := sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64}
	sb, err := c.Create(t.Context(), spec, "")
	check(t, err)
	_, err = c.Delete(t.Context(), sb.ID)
	check(t, err)
	delete(sb.Timings, "total") // which is no step
	if len(sb.Timings) < 3 {
		t.Fatalf("a create tells of its steps %v", sb.Timings)
	}
	// A time in the middle of each step, if they follow one another; around it the
	// tries fall into the steps beside it as well.
	var middles []time.Duration
	at := time.Duration(0)
	for _, name := range slices.Sorted(maps.Keys(sb.Timings)) {
		took := time.Duration(sb.Timings[name]) * time.Microsecond
		middles = append(middles, at+took/2)
		at += took
	}
	var mu sync.Mutex
	answered, settled := 0, 0
	var g errgroup.Group
	g.SetLimit(4)
	for i, middle := range middles {
		for try := range windowTries {
			g.Go(func() error {
				key := fmt.Sprintf("step%d-%d", i, try)
				ctx, cancel := context.WithTimeout(t.Context(), middle*time.Duration(50+5*try)/100)
				defer cancel()
				_, err := c.Create(ctx, spec, key)
				sb, again := c.Create(t.Context(), spec, key)
				if again != nil {
					return fmt.Errorf("%s, given up at %s: %w", key, middle, again)
				}
				if code, out, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Shell: "echo here"}); err != nil || code != 0 || out != "here\n" {
					return fmt.Errorf("%s: %d %q %w", key, code, out, err)
				}
				mu.Lock()
				if err == nil {
					answered++
				} else {
					settled++
				}
				mu.Unlock()
				_, err = c.Delete(t.Context(), sb.ID)
				return err
			})
		}
	}
	check(t, g.Wait())
	t.Logf("%d steps: %d creates were given up and settled, %d were answered before", len(middles), settled, answered)
	if settled < windowTries {
		t.Errorf("only %d creates were given up", settled)
	}
	list, err := c.List(t.Context(), sandbox.Filter{})
	if err != nil || len(list) != 0 {
		t.Errorf("left: %+v, %v", list, err)
	}
	r.nothingLeftOf()
}
