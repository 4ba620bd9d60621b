package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/api"
	"quarry/api/page"
	"quarry/store/chunk"
)

// servePage makes the page for people, which close ends, and returns what serves it.
func (o *owner) servePage(metrics prometheus.Gatherer) func(http.ResponseWriter, *http.Request, func(string) bool, bool) error {
	o.page = page.New(page.Config{
		Catalog: o.catalog, Bucket: o.bucket, Jobs: o.jobs, Stored: o.storedSizes, Metrics: metrics, Log: o.log,
	})
	return func(w http.ResponseWriter, r *http.Request, sees func(string) bool, admin bool) error {
		err := o.page.Serve(w, r, page.Viewer{Sees: sees, Admin: admin})
		if errors.Is(err, page.ErrRequest) {
			err = fmt.Errorf("%w: %w", api.ErrBadRequest, err)
		}
		return err
	}
}

// storedSizes returns what chunks take in packs, -1 for one that is in none.
func (o *owner) storedSizes(ctx context.Context, ds []chunk.Digest) ([]int64, error) {
	locs, found, err := o.index.LookupBatch(ctx, ds)
	if err != nil {
		return nil, err
	}
	sizes := make([]int64, len(ds))
	for i := range ds {
		sizes[i] = -1
		if found[i] {
			sizes[i] = int64(locs[i].Stored)
		}
	}
	return sizes, nil
}
