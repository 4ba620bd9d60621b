package node

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// A sandbox whose kernel or holder does not answer is told to have ended only when it
// ends: until then its caller may try again.
func TestAnEndIsToldOnlyWhenThereIsOne(t *testing.T) {
	for _, c := range []struct {
		name  string
		err   error
		cause *cause
		want  error
	}{
		{"nothing is known", fmt.Errorf("%w: its kernel does not answer", sandbox.ErrEnded), nil, sandbox.ErrNotReady},
		{"its holder does not answer", holder.ErrLost, nil, sandbox.ErrNotReady},
		{"it is being ended", holder.ErrLost, &cause{Reason: sandbox.ReasonDeleted}, sandbox.ErrEnded},
		{"it is hibernated", holder.ErrHibernated, nil, sandbox.ErrNotReady},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := &box{over: make(chan struct{}), cause: c.cause}
			err := b.explain(t.Context(), c.err)
			if !errors.Is(err, c.want) || errors.Is(err, sandbox.ErrEnded) != (c.want == sandbox.ErrEnded) {
				t.Errorf("%s: %v", c.name, err)
			}
		})
	}
}
