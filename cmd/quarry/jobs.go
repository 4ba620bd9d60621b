package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/spf13/pflag"

	"quarry/api"
	"quarry/converter"
	"quarry/converter/oci"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
	"quarry/store/registry"
)

// jobOptions are the flags of serve about conversions of what is pushed.
type jobOptions struct {
	conversions  int
	platformList []string
	platforms    []image.Platform // of platformList
	retain       retention
	retainGrace  time.Duration
	jobMetrics   *jobs.Metrics
}

func (o *jobOptions) flags(f *pflag.FlagSet) {
	f.IntVar(&o.conversions, "conversions", 1, "pushed images that are converted at once")
	f.Var(&o.retain, "retain-layers", "how long the layers of a pushed image stay when it is converted and signed: a time, or none; default is for good")
	f.DurationVar(&o.retainGrace, "retain-grace", defaultRetainGrace, "and for so long after a client was told that they are there")
	f.StringSliceVar(&o.platformList, "platforms", []string{"linux/amd64", "linux/arm64"}, "what is converted of an image index that is pushed")
}

// check reads the flags.
func (o *jobOptions) check() error {
	o.platforms = nil
	for _, s := range o.platformList {
		p, err := platformFlag(s)
		if err != nil {
			return err
		}
		o.platforms = append(o.platforms, p)
	}
	if o.retainGrace < 0 {
		return usageError("--retain-grace wants a time such as 2h")
	}
	if len(o.platforms) == 0 || o.conversions < 1 || o.conversions > maxConversions {
		return usageError(fmt.Sprintf("--platforms wants one at least, and --conversions 1 to %d", maxConversions))
	}
	return nil
}

// maxConversions bounds --conversions: each may take a gigabyte or more.
const maxConversions = 64

// openJobs opens the queue of conversions.
func (o *owner) openJobs(ctx context.Context, cfg ownerConfig) (err error) {
	o.jobOptions = cfg.jobs
	o.jobMetrics = jobs.NewMetrics()
	o.jobs, err = jobs.Open(ctx, jobs.Config{
		Bucket: o.bucket, Convert: o.convertPushed, Confirm: o.catalog.Confirm, Final: finalReason, Workers: o.conversions, Log: o.log, Metrics: o.jobMetrics,
	})
	return err
}

// pushedContent is what was pushed, as the converter reads it.
type pushedContent struct {
	store *registry.Store
	// repos are the repositories that it is to be found in; nil: whichever. A
	// manifest may name what its pusher does not have and could not read.
	repos []string
}

var _ oci.Content = pushedContent{}

// Open implements oci.Content.
func (c pushedContent) Open(ctx context.Context, d chunk.Digest) (io.ReadCloser, int64, error) {
	if err := c.look(ctx, digest.Digest(d.String())); err != nil {
		return nil, 0, err
	}
	r, size, err := c.store.Open(ctx, digest.Digest(d.String()))
	if errors.Is(err, registry.ErrBlobUnknown) {
		err = fmt.Errorf("%w: %w", oci.ErrNoBlob, err)
	}
	return r, size, err
}

// look finds a blob or manifest in one of the repositories.
func (c pushedContent) look(ctx context.Context, d digest.Digest) error {
	for _, repo := range c.repos {
		_, err := c.store.Blob(ctx, repo, d)
		if errors.Is(err, registry.ErrBlobUnknown) && !errors.Is(err, registry.ErrDamaged) {
			_, err = c.store.StatManifest(ctx, repo, d)
		}
		if !errors.Is(err, registry.ErrManifestUnknown) {
			return err
		}
	}
	if c.repos != nil {
		return fmt.Errorf("%w: %s is not in %s", oci.ErrNoBlob, d, strings.Join(c.repos, " or "))
	}
	return nil
}

// pushed queues the conversion of what a push has made durable. What is pushed by
// digest alone waits until it gets a tag or somebody asks for it: the manifests of
// an image index come before it, and would be converted twice.
func (o *owner) pushed(ctx context.Context, p registry.Pushed) error {
	if p.Tag == "" {
		return nil
	}
	_, err := o.enqueue(ctx, p.Source, jobs.Name{Repo: p.Repo, Tag: p.Tag})
	return err
}

// enqueue queues the conversions of a pushed source: none of an artifact.
func (o *owner) enqueue(ctx context.Context, source chunk.Digest, name jobs.Name) ([]jobs.Status, error) {
	platforms, err := oci.Platforms(ctx, pushedContent{store: o.registry}, source, o.platforms)
	if err != nil {
		return nil, err
	}
	var list []jobs.Status
	for _, p := range platforms {
		st, err := o.jobs.Push(ctx, source, platformText(p), name)
		if err != nil {
			return nil, err
		}
		list = append(list, st)
	}
	return list, nil
}

func platformText(p image.Platform) string {
	if p == (image.Platform{}) {
		return ""
	}
	return p.String()
}

// job tells of a source that ref names and that has no image for p. One that was
// pushed and has no job gets one: a push may have been cut off before it made one,
// or was by digest, or its job is long forgotten.
func (o *owner) job(ctx context.Context, ref image.Ref, source chunk.Digest, p image.Platform) error {
	// Whoever may read one repository is not to learn of others'.
	_, err := o.registry.StatManifest(ctx, ref.Repo, digest.Digest(source.String()))
	if errors.Is(err, registry.ErrManifestUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	if st, ok := choose(o.jobs.Of(source), p); ok {
		return api.JobError(ref, st)
	}
	name := jobs.Name{Repo: ref.Repo, Tag: ref.Tag}
	if ref.Digest != nil {
		name.Tag = ""
	}
	list, err := o.enqueue(ctx, source, name)
	if err != nil {
		return err
	}
	if st, ok := choose(list, p); ok {
		return api.JobError(ref, st)
	}
	if len(list) > 0 {
		var others []string
		for _, st := range list {
			others = append(others, st.Platform)
		}
		return fmt.Errorf("%w: %s is converted for %s, not for %s", api.ErrPlatformUnknown, ref, strings.Join(others, ", "), p)
	}
	return fmt.Errorf("%w: %s is an artifact, or an index without an image that can be run: there is nothing to convert", api.ErrImageUnknown, ref)
}

// choose returns the job that makes the image for p, if there is one that has not
// ended well: that of p, or of the one platform there is. A zero p is any.
func choose(list []jobs.Status, p image.Platform) (jobs.Status, bool) {
	i := slices.IndexFunc(list, func(st jobs.Status) bool {
		return (st.Platform == "" || p == (image.Platform{}) || st.Platform == p.String()) && st.State != jobs.Done
	})
	if i < 0 {
		return jobs.Status{}, false
	}
	return list[i], true
}

// jobPlatform is the platform that a job's image is chosen by; zero when its source
// offers no choice.
func jobPlatform(r jobs.Record) (image.Platform, error) {
	if r.Platform == "" {
		return image.Platform{}, nil
	}
	return image.ParsePlatform(r.Platform)
}

// convertPushed does a job.
func (o *owner) convertPushed(ctx context.Context, r jobs.Record, step func(jobs.Progress)) (jobs.Result, error) {
	platform, err := jobPlatform(r)
	if err != nil {
		return jobs.Result{}, err
	}
	var bounds converter.Limits
	if err := bounds.SetAll(o.limits); err != nil {
		return jobs.Result{}, err
	}
	s, b := o.session()
	defer s.End()
	res, err := converter.Convert(ctx, converter.Config{
		Store: o.store, Bucket: b, Catalog: o.catalog, ChunkSize: uint32(o.meta.ChunkSize),
		MACKey: o.macKey, SigningKey: o.signing, Log: o.log, Limits: bounds, TmpDir: o.dir.tmp(),
		Progress: func(e converter.Event) {
			p := progressOf(e)
			step(jobs.Progress{Step: p.Step, Item: p.Item, Done: p.Done, Total: p.Total, Unit: p.Unit})
		},
	}, converter.Request{
		Source: r.Names[len(r.Names)-1].String(), Platform: platform,
		Content: pushedContent{o.registry, reposOf(r.Names)}, Digest: r.Source, Doubted: r.Doubted,
	})
	if err != nil {
		return jobs.Result{}, err
	}
	if len(res.Warnings) > 0 {
		o.log.WarnContext(ctx, "conversion with warnings", "source", r.Source, "warnings", strings.Join(res.Warnings, "; "))
	}
	if res.Unchanged {
		o.jobMetrics.Unchanged.Inc()
	}
	o.forgetFailures(ctx, r.Names)
	return jobs.Result{
		Image: res.ImageID, Platform: res.Statement.Platform.String(), Signed: o.signing != nil, Layers: res.Layers,
		LayersKnown: res.LayersReused, NewPlainBytes: res.NewPlainBytes, NewStoredBytes: res.NewStoredBytes,
	}, nil
}

func reposOf(names []jobs.Name) []string {
	repos := make([]string, len(names))
	for i, n := range names {
		repos[i] = n.Repo
	}
	slices.Sort(repos)
	return slices.Compact(repos)
}

// forgetFailures removes what earlier commands that converted the names have left
// as their reason: the names have an image now.
func (o *owner) forgetFailures(ctx context.Context, names []jobs.Name) {
	for _, n := range names {
		key := image.FailureKey(n.Repo, n.Tag)
		_, err := o.bucket.Stat(ctx, key)
		if err == nil {
			err = o.bucket.Delete(ctx, key)
		}
		if err != nil && !errors.Is(err, bucket.ErrNotFound) {
			o.log.WarnContext(ctx, "failure record not removed", "name", n.String(), "error", err)
		}
	}
}

// finalReason says why a conversion cannot end better; nil when it may: what is
// wrong is the store's bucket or disk, and no damage.
func finalReason(err error) *jobs.Reason {
	why := &jobs.Reason{Message: err.Error(), Blame: jobs.BlameInput}
	switch {
	case errors.As(err, new(*converter.InputError)):
	case errors.Is(err, registry.ErrDamaged):
		why.Blame = jobs.BlameStore
	default:
		return nil
	}
	if l, ok := errors.AsType[*converter.LayerError](err); ok {
		why.Layer = l.Layer.String()
	}
	if e, ok := errors.AsType[*image.EntryError](err); ok {
		why.Entry = e.Entry
	}
	return why
}
