package agentbench

import (
	"context"
	"time"
)

// wakePatience bounds the restore of one sandbox: a machine that restores many at once is
// slow, not broken.
const wakePatience = time.Minute

// wake has a sandbox run that may be hibernated, before it is answered: no packet reaches
// one that is.
func (t *trial) wake(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, wakePatience)
	defer cancel()
	_, err := t.w.Wake(ctx, id)
	return err
}
