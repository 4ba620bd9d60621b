package agentbench

import (
	"context"
	"errors"
)

// wake has a hibernated sandbox restored before it is answered.
func (t *trial) wake(ctx context.Context, id string) error {
	return errors.New("the worker cannot hibernate yet")
}
