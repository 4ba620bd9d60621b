package store_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"quarry/store"
)

func TestOutcomes(t *testing.T) {
	corrupt := &store.CorruptError{}
	for _, c := range []struct {
		err  error
		want store.Outcome
	}{
		{nil, ""},
		{context.Canceled, ""},
		{context.DeadlineExceeded, store.Unreachable},
		{errors.New("of no kind"), store.Unreachable},
		{fmt.Errorf("read: %w", store.ErrNotFound), store.Missing},
		{fmt.Errorf("read: %w", corrupt), store.Corrupt},
		{fmt.Errorf("read: %w", store.ErrUnauthorised), store.Unauthorised},
		{fmt.Errorf("read: %w", store.ErrLocalDisk), store.LocalDisk},
		{errors.Join(store.ErrNotFound, store.ErrUnreachable), store.Unreachable}, // it may be where no answer came from
		{errors.Join(store.ErrUnreachable, corrupt), store.Corrupt},
	} {
		if got := store.OutcomeOf(c.err); got != c.want {
			t.Errorf("%v: got %q, want %q", c.err, got, c.want)
		}
	}
}
