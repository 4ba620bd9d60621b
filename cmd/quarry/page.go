package main

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/api"
	"quarry/api/page"
)

// servePage makes the page for people, which close ends, and returns what serves it.
func (o *owner) servePage(metrics prometheus.Gatherer) func(http.ResponseWriter, *http.Request, func(string) bool, bool) error {
	o.page = page.New(page.Config{
		Catalog: o.catalog, Bucket: o.bucket, Jobs: o.jobs, Stored: o.index.StoredSizes, Metrics: metrics, Log: o.log,
	})
	return func(w http.ResponseWriter, r *http.Request, sees func(string) bool, admin bool) error {
		err := o.page.Serve(w, r, page.Viewer{Sees: sees, Admin: admin})
		if errors.Is(err, page.ErrRequest) {
			err = fmt.Errorf("%w: %w", api.ErrBadRequest, err)
		}
		return err
	}
}
