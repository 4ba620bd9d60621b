package gate

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A holder has its share, others the rest, and who has gone is forgotten.
func TestShares(t *testing.T) {
	s := NewShares(8, "bytes", time.Millisecond)
	enter := func(holder string, weight int64, want error) func() {
		t.Helper()
		leave, err := s.Enter(t.Context(), holder, weight)
		if !errors.Is(err, want) {
			t.Errorf("%s enters with %d: %v, want %v", holder, weight, err, want)
		}
		return leave
	}
	greedy := enter("greedy", 100, nil) // alone in its share
	enter("greedy", 1, ErrHolder)
	honest := enter("honest", 2, nil)
	enter("", 1, ErrFull)
	enter("third", 1, ErrFull)
	greedy()
	greedy = enter("greedy", 6, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Enter(ctx, "greedy", 1); !errors.Is(err, context.Canceled) {
		t.Errorf("who has gone while it waits: %v", err)
	}
	greedy()
	honest()
	if len(s.held) != 0 {
		t.Errorf("%d holders are remembered", len(s.held))
	}
	enter("", 8, nil)()
}
