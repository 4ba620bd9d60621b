package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"quarry/api"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/gc"
	"quarry/store/image"
	"quarry/store/lease"
	"quarry/store/registry"
)

// upkeep is what keeps a store from growing for ever, and what keeps that from harming
// anybody.
type upkeep struct {
	gate   *gc.Gate
	gc     *gc.Collector
	leases *lease.Table
	limits gc.Limits
	every  time.Duration // between collections; 0: only when told
	stop   context.CancelFunc
	done   sync.WaitGroup
}

// openUpkeep needs the store open. Its goroutines end with close.
func (o *owner) openUpkeep(ctx context.Context, cfg ownerConfig) error {
	node, err := cfg.dir.id()
	if err != nil {
		return err
	}
	u := &upkeep{gate: gc.NewGate(), every: cfg.gcEvery, limits: gc.Limits{Retain: gc.DefaultRetain, Grace: gc.DefaultGrace, Push: gc.DefaultPush}}
	if cfg.retain != nil {
		u.limits.Retain = *cfg.retain
	}
	if at, _, err := cfg.dir.remembered(); err == nil && at.url == "" {
		u.limits.Grace = 0 // its own bucket, which nobody else reads
	}
	if cfg.grace != nil {
		u.limits.Grace = *cfg.grace
	}
	if u.leases, err = lease.Open(ctx, lease.Config{Bucket: o.bucket, Node: node, Log: cfg.log}); err != nil {
		return err
	}
	u.gc = gc.New(gc.Config{
		Bucket: o.bucket, Catalog: o.catalog, Store: o.store, Gate: u.gate, Log: cfg.log, Limits: u.limits, Metrics: gc.NewMetrics(),
		Leases: u.mounts, LayerChunks: o.layerChunks, Stored: o.manifests, Pushed: o.registry.Collect, Told: o.registry.Told,
		Roots: func(context.Context) ([]chunk.Digest, error) {
			if o.jobs == nil { // a node that only reads
				return nil, nil
			}
			return o.jobs.Sources(), nil
		},
	})
	ctx, u.stop = context.WithCancel(context.WithoutCancel(ctx))
	u.done.Go(func() { u.leases.Run(ctx) })
	o.upkeep = u
	return nil
}

func (u *upkeep) close() {
	u.stop()
	u.done.Wait()
}

// mounts are the leases as gc wants them.
func (u *upkeep) mounts(ctx context.Context, look bool) ([]gc.Lease, error) {
	all, err := u.leases.All(ctx, !look)
	out := make([]gc.Lease, len(all))
	for i, l := range all {
		out[i] = gc.Lease{Image: l.Image, Bootstrap: l.Bootstrap}
	}
	return out, err
}

// manifests are the sources of the manifests in the bucket that were pushed.
func (o *owner) manifests(ctx context.Context) ([]chunk.Digest, error) {
	var sources []chunk.Digest
	for obj, err := range o.bucket.List(ctx, registry.ReposPrefix) {
		if err != nil {
			return nil, err
		}
		if _, hex, ok := strings.Cut(obj.Key, "/_manifests/sha256/"); ok {
			if d, err := chunk.ParseHex(hex); err == nil {
				sources = append(sources, d)
			}
		}
	}
	return sources, nil
}

// layerChunks returns the chunks of a layer record of this store.
func (o *owner) layerChunks(raw []byte) ([]chunk.Digest, bool) {
	rec, err := image.DecodeLayer(raw, o.macKey)
	if err != nil {
		return nil, false
	}
	var ds []chunk.Digest
	for i := range rec.Entries {
		ds = append(ds, rec.Entries[i].Chunks...)
	}
	return ds, true
}

// collectEvery runs gc until ctx ends, where that was asked for.
func (o *owner) collectEvery(ctx context.Context) {
	if o.upkeep.every <= 0 {
		return
	}
	t := time.NewTicker(o.upkeep.every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if _, err := o.upkeep.gc.Run(ctx, gc.Options{}); err != nil && ctx.Err() == nil {
			o.log.ErrorContext(ctx, "gc ended early; it is tried again later", "error", err)
		}
	}
}

// session begins work that counts on what is stored, and returns the bucket for it.
func (o *owner) session() (*gc.Session, bucket.Bucket) {
	s := o.upkeep.gate.Begin()
	return s, s.Bucket(o.bucket, o.catalog.Confirm)
}

// pin keeps the images of a source. It asks for their statements in a session, so that
// a collection under way keeps them too.
func (o *owner) pin(ctx context.Context, source chunk.Digest) error {
	s, b := o.session()
	defer s.End()
	found := false
	for obj, err := range b.List(ctx, image.ImagesPrefix+source.Hex()+"/") {
		if err != nil {
			return err
		}
		if !strings.HasSuffix(obj.Key, "/statement") {
			continue
		}
		_, err := b.Stat(ctx, obj.Key)
		if err != nil && !errors.Is(err, bucket.ErrNotFound) {
			return err
		}
		found = found || err == nil
	}
	if !found {
		return fmt.Errorf("%w: the store has no image of source %s", api.ErrImageUnknown, source)
	}
	return o.catalog.Pin(ctx, source)
}

func (o *owner) unpin(ctx context.Context, source chunk.Digest) error {
	err := o.catalog.Unpin(ctx, source)
	if errors.Is(err, catalog.ErrNotFound) {
		return fmt.Errorf("%w: %w", api.ErrImageUnknown, err)
	}
	return err
}
