package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"quarry/api"
	"quarry/api/access"
	front "quarry/api/registry"
	"quarry/converter"
	"quarry/converter/oci"
	"quarry/store/bucket/s3"
	"quarry/store/image"
	"quarry/store/packed"
)

// newHandler wires the data folder to the HTTP contract.
func newHandler(o *owner, guard *access.Guard, metricsOpen bool, log *slog.Logger) *api.Handler {
	reg := o.collected
	reg.MustRegister(o.metrics.Collectors()...)
	if b, ok := o.bucket.(*s3.Bucket); ok {
		reg.MustRegister(b.Collectors()...)
	}
	if o.ranges != nil {
		reg.MustRegister(o.ranges.Collectors()...)
	}
	if o.follower == nil {
		reg.MustRegister(o.jobMetrics.Collectors()...)
		reg.MustRegister(o.upkeep.gc.Metrics().Collectors()...)
	}
	cfg := api.Config{
		Chunks: o.store, Names: o.catalog, Bucket: o.bucket, Local: true,
		Convert: func(ctx context.Context, r api.ConvertRequest, step func(api.Progress)) (api.ConvertResult, error) {
			return o.convert(ctx, r, step, log)
		},
		Sign: o.sign, Check: o.check, Rebuild: o.rebuild, Stats: o.stats, Page: o.servePage(reg),
		GC: o.collect, Pin: o.pin, Unpin: o.unpin, Pins: o.catalog.Pins, Leases: o.upkeep.leases,
		Job: o.job, Jobs: o.jobs,
		Registry: reg, Log: log, MetricsOpen: metricsOpen,
	}
	v2 := front.Config{Store: o.registry, Log: log, Refusals: front.NewRefusals()}
	reg.MustRegister(v2.Refusals)
	o.nodes(&cfg, &v2)
	cfg.V2Local = front.New(v2)
	cfg.V2 = cfg.V2Local
	if guard == nil {
		cfg.HostAllowed = loopbackHost
	} else {
		v2.Authorize, v2.Covered, v2.Holder = guard.Authorize, guard.Covered, guard.Holder
		cfg.V2 = front.New(v2)
		reg.MustRegister(guard.Collectors()...)
		cfg.Authorize, cfg.Covered, cfg.Admin, cfg.Token = guard.Authorize, guard.Covered, guard.Admin, guard.ServeToken
		cfg.TokenName = guard.TokenName
	}
	return api.NewHandler(cfg)
}

func (o *owner) convert(ctx context.Context, r api.ConvertRequest, step func(api.Progress), log *slog.Logger) (api.ConvertResult, error) {
	name, err := image.ParseName(r.Name)
	if err != nil {
		return api.ConvertResult{}, fmt.Errorf("%w: %w", api.ErrBadRequest, err)
	}
	var platform image.Platform
	if r.Platform != "" {
		if platform, err = image.ParsePlatform(r.Platform); err != nil {
			return api.ConvertResult{}, fmt.Errorf("%w: %w", api.ErrBadRequest, err)
		}
	}
	var bounds converter.Limits
	if err := errors.Join(bounds.SetAll(o.limits), bounds.SetAll(r.Limits)); err != nil {
		return api.ConvertResult{}, fmt.Errorf("%w: %w", api.ErrBadRequest, err)
	}
	s, b := o.session()
	defer s.End()
	res, err := converter.Convert(ctx, converter.Config{
		Store: o.store, Bucket: b, Catalog: o.catalog, ChunkSize: uint32(o.meta.ChunkSize),
		MACKey: o.macKey, SigningKey: o.signing, Log: log,
		Limits:   bounds,
		Progress: func(e converter.Event) { step(progressOf(e)) },
		TmpDir:   o.dir.tmp(),
	}, converter.Request{Source: r.Source, Name: name, Platform: platform, Credentials: credentialsOf(r.Credentials)})
	if errors.Is(err, oci.ErrUnavailable) {
		return api.ConvertResult{}, fmt.Errorf("%w: %w", api.ErrSource, err)
	}
	if err != nil {
		var input *converter.InputError
		if errors.As(err, &input) {
			return api.ConvertResult{}, fmt.Errorf("%w: %w", api.ErrImageFailed, err)
		}
		return api.ConvertResult{}, err
	}
	for _, w := range res.Warnings {
		step(api.Progress{Step: "warning", Item: w})
	}
	return api.ConvertResult{
		Name: name.String(), Source: res.Source, ImageID: res.ImageID, Bootstrap: res.Statement.Bootstrap,
		Platform: res.Statement.Platform.String(), Signed: o.signing != nil,
		Layers: res.Layers, LayersSkipped: res.LayersReused,
		PlainBytes: res.FileBytes, NewChunks: res.NewChunks,
		NewPlainBytes: res.NewPlainBytes, NewStoredBytes: res.NewStoredBytes,
	}, nil
}

func credentialsOf(c *api.Credentials) oci.Credentials {
	if c == nil {
		return oci.Credentials{}
	}
	return oci.Credentials{
		Username: c.Username, Password: oci.Secret(c.Password),
		IdentityToken: oci.Secret(c.IdentityToken), RegistryToken: oci.Secret(c.RegistryToken),
	}
}

func progressOf(e converter.Event) api.Progress {
	if e.Spooled > 0 {
		return api.Progress{Step: "archive", Item: fmt.Sprintf("%d MiB decompressed", e.Spooled>>20), Done: e.Read, Total: e.Size, Unit: "bytes"}
	}
	item := fmt.Sprintf("%d of %d %s", e.Layer, e.Layers, e.Digest)
	if e.Cached {
		item += " (known)"
	}
	return api.Progress{Step: "layer", Item: item, Done: e.Read, Total: e.Size, Unit: "bytes"}
}

func (o *owner) rebuild(ctx context.Context) (api.RebuildResult, error) {
	st, err := o.store.Rebuild(ctx, func(p packed.Problem) {
		o.log.WarnContext(ctx, "index rebuild", "problem", p.String())
	})
	return api.RebuildResult{Packs: st.Packs, Chunks: st.Chunks}, err
}

func (o *owner) stats(context.Context) (api.StoreStats, error) {
	st := api.StoreStats{ChunkSize: o.meta.ChunkSize, Names: int64(len(o.catalog.Names()))}
	for _, p := range o.catalog.Packs() {
		st.Packs++
		st.PackBytes += p.Size
	}
	if e := o.catalog.Epoch(); e.N > 0 {
		st.Epoch, st.Writer = e.N, fmt.Sprintf("pid %d on %s", e.PID, e.Host)
	}
	return st, nil
}
