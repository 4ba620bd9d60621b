package e2e_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"quarry/worker/sandbox"
)

// TestWhoWaitsOnAFullDisk puts sandboxes that wait for their model to disk, one by the
// worker and one by a call as well, and fills it: whatever needs them is refused and says
// why, under the next worker too, and with room they go on.
func TestWhoWaitsOnAFullDisk(t *testing.T) {
	l := newNetLab(t)
	answers := l.model("203.0.113.10:8000")
	flags := []string{"--model-endpoint", "203.0.113.10:8000", "--paused-memory", "hibernate", "--disk", "20G"}
	r := &napRig{workerRig: newWorkerRigIn(t, l.node, "cold", flags...), l: l, flags: flags}
	w := r.path("w")
	r.onSmallDisk(l.node, w, "600m", flags...)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	r.ctx, r.c = ctx, r.socketClient()

	spec := sandbox.Spec{
		Image: "t/task", MemoryMB: 256, Entrypoint: []string{"python3", "-c", asker},
		Network: sandbox.Policy{Allow: []sandbox.Rule{{CIDR: "203.0.113.10/32"}}},
	}
	var ids [2]string // by the worker, by a call
	for i := range ids {
		sb, err := r.c.Create(ctx, spec, "")
		check(t, err)
		ids[i] = sb.ID
	}
	for _, id := range ids {
		r.until("a hibernation", func() bool { return r.state(id) == sandbox.StateHibernated })
	}
	r.hibernate(ids[1])
	ballast := fillUp(t, w)
	for _, worker := range []string{"this worker", "the next worker"} {
		if worker == "the next worker" {
			r.again()
		}
		for i, id := range ids {
			for what, call := range map[string]func(context.Context) error{
				"a command": func(ctx context.Context) error {
					_, _, err := run(ctx, r.c, id, sandbox.ExecSpec{Shell: "true"})
					return err
				},
				"a file": func(ctx context.Context) error {
					_, err := r.c.WriteFile(ctx, id, "/tmp/file", sandbox.WriteOptions{}, strings.NewReader("text"))
					return err
				},
				"a wake":   func(ctx context.Context) error { _, err := r.c.Wake(ctx, id); return err },
				"a resume": func(ctx context.Context) error { _, err := r.c.Resume(ctx, id); return err },
			} {
				ctx, cancel := context.WithTimeout(ctx, time.Minute)
				err := call(ctx)
				cancel()
				if !errors.Is(err, sandbox.ErrCapacity) || !strings.Contains(err.Error(), "free some") {
					t.Errorf("%s, sandbox %d, %s: %v", worker, i, what, err)
				}
				if got := r.state(id); got != sandbox.StateHibernated {
					t.Fatalf("%s, sandbox %d, after %s: %s", worker, i, what, got)
				}
			}
		}
	}
	check(t, os.Remove(ballast))
	for _, id := range ids {
		_, err := r.c.Wake(ctx, id)
		check(t, err)
		if code, out, err := run(ctx, r.c, id, sandbox.ExecSpec{Shell: "echo here"}); code != 0 || out != "here\n" {
			t.Errorf("woken: %d %q %v", code, out, err)
		}
	}
	for range ids { // one each, as each has asked one question
		answers.give(ctx, "answer")
	}
	for _, id := range ids {
		r.until("its answer", func() bool {
			raw, err := os.ReadFile(r.path("w", "node", id, "init", "stdout"))
			return err == nil && strings.Contains(string(raw), "answer\n")
		})
		_, err := r.c.Delete(ctx, id)
		check(t, err)
	}
	r.nothingLeftOf()
}
