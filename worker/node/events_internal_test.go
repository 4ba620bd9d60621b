package node

import (
	"context"
	"errors"
	"testing"
	"time"

	"quarry/worker/sandbox"
)

// read reads the events after a number that are there.
func read(t *testing.T, n *Node, after uint64, id string) (out []sandbox.Event) {
	t.Helper()
	end := n.events.last()
	stop := errors.New("stop")
	n.events.add(sandbox.Event{Sandbox: id, Type: "mark"})
	err := n.Events(t.Context(), after, id, func(e sandbox.Event) error {
		if e.Type == "mark" && e.Sequence > end {
			return stop
		}
		out = append(out, e)
		return nil
	})
	if !errors.Is(err, stop) {
		t.Fatal(err)
	}
	return out
}

func TestEventsAreReadInOrderFromANumberOn(t *testing.T) {
	n := &Node{events: newEvents(3), c: Config{Now: time.Now}}
	for _, id := range []string{"a", "b", "a"} {
		n.events.add(sandbox.Event{Sandbox: id, Type: "running"})
	}
	all := read(t, n, 0, "a")
	if len(all) != 2 || all[0].Sequence != 3*eventEpoch+1 || all[1].Sequence != 3*eventEpoch+3 {
		t.Errorf("got %+v", all)
	}
	if got := read(t, n, all[0].Sequence, "b"); len(got) != 1 || got[0].Sequence != 3*eventEpoch+2 {
		t.Errorf("got %+v", got)
	}
}

func TestWhoAsksForForgottenEventsIsToldSo(t *testing.T) {
	n := &Node{events: newEvents(1), c: Config{Now: time.Now}}
	for range 2 * maxEvents {
		n.events.add(sandbox.Event{Sandbox: "a", Type: "running"})
	}
	for name, after := range map[string]uint64{"of this run": eventEpoch + 5, "of the run before": 17, "of another folder": 9 * eventEpoch} {
		got := read(t, n, after, "a")
		if len(got) == 0 || got[0].Type != EventLost {
			t.Errorf("%s: got %+v", name, got)
		}
		for i := 1; i < len(got); i++ {
			if got[i].Sequence != got[i-1].Sequence+1 {
				t.Errorf("%s: %d follows %d", name, got[i].Sequence, got[i-1].Sequence)
			}
		}
	}
	if got := read(t, n, 0, "a"); got[0].Type == EventLost || len(got) > maxEvents {
		t.Errorf("from the beginning: %d events, the first %+v", len(got), got[0])
	}
}

func TestEventsEndWithTheirContext(t *testing.T) {
	n := &Node{events: newEvents(1), c: Config{Now: time.Now}}
	ctx, cancel := context.WithCancel(t.Context())
	n.events.add(sandbox.Event{Type: "running"})
	err := n.Events(ctx, 0, "", func(sandbox.Event) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
