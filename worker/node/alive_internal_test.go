package node

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"quarry/worker/sandbox"
)

// A sandbox that does not answer is ended once it has not for some time; one that
// answers now and then is not.
func TestWhoDoesNotAnswerIsEnded(t *testing.T) {
	n := &Node{log: slog.New(slog.DiscardHandler), c: Config{}, boxes: map[string]*box{}, life: t.Context(), events: newEvents(1)}
	n.c.Now = time.Now
	boxes := map[string]*box{}
	for _, id := range []string{"silent", "slow", "well"} {
		b := n.newBox(journal{ID: id})
		b.state = sandbox.StateRunning
		n.boxes[id], boxes[id] = b, b
	}
	round, missed := 0, map[*box]int{}
	for range 3 * aliveMisses {
		round++
		missed = n.unanswered(missed, func(b *box, _ context.Context) error {
			if b.id == "silent" && b.cause == nil || b.id == "slow" && round%aliveMisses != 0 {
				return errors.New("no answer")
			}
			return nil
		})
		if ended := boxes["silent"].cause != nil; ended != (round >= aliveMisses) {
			t.Fatalf("ended %v after %d rounds", ended, round)
		}
	}
	if c := boxes["silent"].cause; c.Reason != sandbox.ReasonRuntime || c.Message == "" {
		t.Errorf("the cause is %+v", c)
	}
	for _, id := range []string{"slow", "well"} {
		if c := boxes[id].cause; c != nil {
			t.Errorf("%s was ended: %+v", id, c)
		}
	}
}
