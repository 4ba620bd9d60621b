package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"quarry/api"
)

// askEvery is how often an image that is not ready is asked for again, as the
// store's Retry-After says.
const askEvery = time.Second

// whenReady calls fetch until the image is no longer pending or being converted,
// for so long at most. The error is then the store's, which errors.Is knows as one
// that may pass.
func whenReady(ctx context.Context, wait time.Duration, fetch func() error) error {
	deadline := time.Now().Add(wait)
	for {
		err := fetch()
		if !errors.Is(err, api.ErrPending) && !errors.Is(err, api.ErrConverting) {
			return err
		}
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("%w (waited %s; --wait DURATION waits longer)", err, wait)
		}
		timer := time.NewTimer(min(askEvery, left))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}
