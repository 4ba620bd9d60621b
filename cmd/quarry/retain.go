package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/converter/oci"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
	"quarry/store/registry"
)

const (
	// retainEvery is how often layers are looked for that may go.
	retainEvery = 5 * time.Minute
	// retainGrace is how long a layer stays after a client was told that it is
	// there: the client's push, which may take long over other layers, may name it
	// and not send it.
	retainGrace = 2 * time.Hour
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
	tick := time.NewTicker(retainEvery)
	defer tick.Stop()
	dropped := map[string]time.Time{}
	for {
		if err := o.dropLayers(ctx, time.Now(), retainGrace, dropped); err != nil && ctx.Err() == nil {
			o.log.WarnContext(ctx, "layers not dropped", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// dropLayers drops the layers of the images that are converted, signed and old
// enough, but none that another image still needs. dropped has the jobs whose
// layers went, by when they ended.
func (o *owner) dropLayers(ctx context.Context, now time.Time, grace time.Duration, dropped map[string]time.Time) error {
	var due []jobs.Status
	list, _ := o.jobs.List(jobs.Filter{State: jobs.Done, Limit: jobs.DefaultKeep})
	for _, st := range list {
		if now.Sub(*st.Ended) >= o.retain.after && !dropped[st.ID()].Equal(*st.Ended) {
			due = append(due, st)
		}
	}
	if len(due) == 0 {
		return nil
	}
	accepted, err := o.accepted()
	if err != nil {
		return err
	}
	needed, err := o.neededLayers(ctx, accepted)
	if err != nil {
		return err
	}
	for _, st := range due {
		p, err := jobPlatform(st.Record)
		if err != nil {
			return err
		}
		layers, err := oci.LayersOf(ctx, pushedContent{store: o.registry}, st.Source, p)
		switch {
		case errors.Is(err, oci.ErrNoBlob):
			dropped[st.ID()] = *st.Ended // its manifest was deleted
			continue
		case err != nil:
			return err
		}
		all := true
		for _, d := range layers {
			key := digest.Digest(d.String())
			if needed[d] {
				all = false
				continue
			}
			gone, err := o.registry.Drop(ctx, key, registry.ContentKey(key), grace)
			if err != nil {
				return err
			}
			all = all && gone
		}
		if all {
			dropped[st.ID()] = *st.Ended
		}
	}
	return nil
}

// What a source is, by which it needs its layers.
const (
	isConverted = iota // and has a job that tells of it
	isNamed
	isQueued // or running
)

// neededLayers returns the layers that a conversion or signature is still to be
// made from: those of jobs that have not ended, and of images that no accepted key
// has signed, with a name or without.
func (o *owner) neededLayers(ctx context.Context, accepted signer.Trust) (map[chunk.Digest]bool, error) {
	sources := map[chunk.Digest]int{}
	done, _ := o.jobs.List(jobs.Filter{State: jobs.Done, Limit: jobs.DefaultKeep})
	for _, st := range done {
		sources[st.Source] = isConverted
	}
	for _, n := range o.catalog.Names() {
		sources[n.Source] = isNamed
	}
	for _, s := range o.jobs.Sources() {
		sources[s] = isQueued
	}
	needed := map[chunk.Digest]bool{}
	for source, is := range sources {
		platforms, err := oci.Platforms(ctx, pushedContent{store: o.registry}, source, o.platforms)
		if err != nil {
			return nil, err
		}
		for _, p := range platforms {
			made, signed, err := o.signedFor(ctx, source, p, accepted.KeyIDs())
			if err != nil {
				return nil, err
			}
			if is < isQueued && signed || is < isNamed && !made { // the image of one that is not made any more is gone
				continue
			}
			layers, err := oci.LayersOf(ctx, pushedContent{store: o.registry}, source, p)
			if errors.Is(err, oci.ErrContent) || ctx.Err() != nil {
				return nil, cmp.Or(err, ctx.Err())
			}
			for _, d := range layers { // none of what is no image, or is not here
				needed[d] = true
			}
		}
	}
	return needed, nil
}

// signedFor reports whether a source has an image for p, or for any platform when p is
// zero, and one with a signature by one of the keys.
func (o *owner) signedFor(ctx context.Context, source chunk.Digest, p image.Platform, keys []string) (made, signed bool, err error) {
	prefix := image.ImagesPrefix + source.Hex() + "/"
	if p != (image.Platform{}) {
		prefix += p.Key() + "/"
	}
	for obj, err := range o.bucket.List(ctx, prefix) {
		if err != nil {
			return false, false, err
		}
		made = made || path.Base(obj.Key) == "statement"
		signed = signed || strings.Contains(obj.Key, "/sigs/") && slices.Contains(keys, path.Base(obj.Key))
	}
	return made, signed, nil
}
