package agentbench

import "context"

// wake has a sandbox run that may be hibernated, before it is answered: no packet reaches
// one that is. A machine that restores many at once is slow, not broken.
func (t *trial) wake(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, toWake*t.Patience)
	defer cancel()
	_, err := t.w.Wake(ctx, id)
	return err
}
