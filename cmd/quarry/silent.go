package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"quarry/api/client"
	"quarry/nbd/blockdev"
)

// errSilentStore says that no store has sent anything for as long as a read waits.
var errSilentStore = errors.New("the store is silent")

// unlessSilent returns a context for a fetch from the stores, of the life of ctx, that
// ends when they have sent nothing for so long; 0 is the default of --read-timeout. A
// store that is slow and sends is waited for. heard ends the watch when the fetch has
// ended, and puts the reason in the place of what the end of the context caused.
func unlessSilent(ctx context.Context, stores *client.Stores, patience time.Duration) (_ context.Context, heard func(error) error) {
	if patience == 0 {
		patience = blockdev.DefaultTimeout
	}
	ctx, cancel := context.WithCancelCause(ctx) // not called when all is well: what is left of the answer needs it
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() { // ends with heard
		defer close(stopped)
		every := time.NewTicker(max(patience/20, 10*time.Millisecond))
		defer every.Stop()
		for last, since := uint64(0), time.Now(); ; {
			select {
			case <-stop:
				return
			case <-ctx.Done():
				return
			case <-every.C:
			}
			if n := stores.Stats().BytesIn; n != last {
				last, since = n, time.Now()
			}
			if time.Since(since) > patience {
				cancel(fmt.Errorf("%w: it has sent nothing for %s (--read-timeout)", errSilentStore, patience))
				return
			}
		}
	}()
	return ctx, func(err error) error {
		close(stop)
		<-stopped
		if cause := context.Cause(ctx); err != nil && errors.Is(cause, errSilentStore) {
			return cause
		}
		return err
	}
}
