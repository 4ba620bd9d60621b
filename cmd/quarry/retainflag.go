package main

import (
	"context"
	"fmt"
	"time"
)

const (
	// retainEvery is how often layers are looked for that may go, more often when they
	// are to go sooner.
	retainEvery = 5 * time.Minute
	// defaultRetainGrace is how long a layer stays after a client was told that it is
	// there: the client's push, which may take long over other layers, may name it
	// and not send it.
	defaultRetainGrace = 2 * time.Hour
)

// retention is what --retain-layers says: how long the layers of an image stay
// once it is converted and signed.
type retention struct {
	drop  bool // zero: they stay for good
	after time.Duration
}

// String implements pflag.Value.
func (r *retention) String() string {
	switch {
	case !r.drop:
		return ""
	case r.after == 0:
		return "none"
	}
	return r.after.String()
}

// Type implements pflag.Value.
func (r *retention) Type() string { return "DURATION|none" }

// Set implements pflag.Value.
func (r *retention) Set(s string) error {
	if s == "none" {
		*r = retention{drop: true}
		return nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return fmt.Errorf("want a time such as 72h, or none")
	}
	*r = retention{drop: true, after: d}
	return nil
}

// retainLayers drops layers now and then until ctx ends.
func (o *owner) retainLayers(ctx context.Context) {
	if !o.retain.drop {
		return
	}
	tick := time.NewTicker(min(retainEvery, max(time.Second, o.retain.after, o.retainGrace)))
	defer tick.Stop()
	r := &retainer{owner: o}
	for {
		if err := r.dropLayers(ctx, time.Now()); err != nil && ctx.Err() == nil {
			o.log.WarnContext(ctx, "layers not dropped", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
