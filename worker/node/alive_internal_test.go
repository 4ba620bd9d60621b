package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
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
	// Those that are late do not take the time of others, however many they are.
	for i := range aliveAtOnce {
		b := n.newBox(journal{ID: fmt.Sprint("late", i)})
		b.state = sandbox.StateRunning
		n.boxes[b.id] = b
	}
	synctest.Test(t, func(t *testing.T) {
		n.life = t.Context()
		for b, times := range n.unanswered(nil, func(b *box, ctx context.Context) error {
			if strings.HasPrefix(b.id, "late") {
				<-ctx.Done()
			}
			return ctx.Err()
		}) {
			if !strings.HasPrefix(b.id, "late") || times != 1 {
				t.Errorf("%s has missed %d", b.id, times)
			}
		}
	})
	if c := boxes["silent"].cause; c.Reason != sandbox.ReasonRuntime || c.Message == "" {
		t.Errorf("the cause is %+v", c)
	}
	for _, id := range []string{"slow", "well"} {
		if c := boxes[id].cause; c != nil {
			t.Errorf("%s was ended: %+v", id, c)
		}
	}
}
