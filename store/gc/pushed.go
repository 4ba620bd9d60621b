package gc

import (
	"context"
	"slices"

	"quarry/store/chunk"
	"quarry/store/registry"
)

// need says what is known of the source that a manifest is, after the last mark.
func (r *run) need(source chunk.Digest) registry.Need {
	switch {
	case r.firm[source]:
		return registry.Firm
	case r.loose[source]:
		return registry.Loose
	case r.marks.sources[source]: // a mount, or somebody who was told of it
		return registry.Firm
	}
	return registry.Aged
}

// collectPushed deletes what nobody needs of what was pushed.
func (r *run) collectPushed(ctx context.Context) error {
	if r.cfg.Pushed == nil {
		return nil
	}
	r.step("delete what was pushed")
	var sources, spared []chunk.Digest
	for source := range r.marks.sources {
		if !r.loose[source] || r.firm[source] {
			sources = append(sources, source)
		}
	}
	slices.SortFunc(sources, compareDigests)
	err := r.cfg.Pushed(ctx, registry.Collect{
		Need: r.need, Age: r.cfg.Since() - r.asked, Sources: sources, Grace: r.limits.Push, DryRun: r.report.DryRun,
		Deleted: func(size int64) { r.report.deleted("oci", size) },
		Spared:  func(source chunk.Digest) { spared = append(spared, source) },
		Problem: func(text string) { r.problem("%s", text) },
	})
	for _, source := range spared {
		if err == nil && !r.marks.sources[source] {
			err = r.markSource(ctx, r.marks, source)
		}
	}
	return err
}
