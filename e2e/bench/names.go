package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"quarry/api"
	"quarry/store/bucket/dir"
	"quarry/store/catalog"
)

const (
	// manyNames are the names of a store with 2 000 images.
	manyNames = 2000
	// nameRounds is how often each request is made.
	nameRounds = 300
	// The limits are of the medians, in milliseconds: of a page of api.MaxNames names,
	// and of one name, answered with its signed statements.
	maxListMillis = 10
	maxLookMillis = 2
)

// measureNames lists and looks up names in a store that has many, all of one image.
func measureNames(ctx context.Context, b *bench) (err error) {
	im := b.images[0]
	data := b.lab.Path("names")
	if _, err := b.lab.Convert(ctx, data, "oci:"+im.dir, imageName(im)); err != nil {
		return err
	}
	if err := b.lab.StopOwner(data); err != nil {
		return err
	}
	if err := addNames(ctx, data+"/bucket", manyNames); err != nil {
		return err
	}
	srv, err := b.lab.Serve(ctx, data)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, srv.Stop()) }()
	list, err := b.requestTimes(ctx, func(int) string { return srv.URL + "/v1/images?limit=1000" }, checkPage)
	if err != nil {
		return err
	}
	look, err := b.requestTimes(ctx, func(i int) string { return srv.URL + "/v1/images/" + manyName(i*7%manyNames) + ":latest" }, checkImage)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name  string
		times []time.Duration
		limit float64
	}{{"a page of 1000", list, maxListMillis}, {"one name", look, maxLookMillis}} {
		b.figure(fmt.Sprintf("names: %s of %d, p99", f.name, manyNames), quantile(f.times, 99).String())
		b.atMost(fmt.Sprintf("names: %s of %d, p50", f.name, manyNames), float64(quantile(f.times, 50).Microseconds())/1000, f.limit, "ms")
	}
	return nil
}

func manyName(i int) string { return fmt.Sprintf("team-%d/task-%04d", i%20, i) }

// addNames names the store's only image many times, through its catalog. The
// envelopes are those of the first name: only workers look what they are for.
func addNames(ctx context.Context, bucketDir string, n int) (err error) {
	bucket, err := dir.Open(bucketDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bucket.Close()) }()
	c, err := catalog.Open(ctx, catalog.Config{Journal: bucket})
	if err != nil {
		return err
	}
	names := c.Names()
	if len(names) != 1 {
		return fmt.Errorf("%d names, want 1", len(names))
	}
	for i := range n {
		name := names[0]
		name.Repo, name.Tag, name.Serial = manyName(i), "latest", uint64(i+1)
		if err := c.SetName(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// requestTimes makes requests over one connection and returns how long each took,
// its body read.
func (b *bench) requestTimes(ctx context.Context, url func(int) string, check func([]byte) error) (times []time.Duration, err error) {
	for i := range nameRounds {
		begun := time.Now()
		body, err := getBody(ctx, url(i))
		if err != nil {
			return nil, err
		}
		times = append(times, time.Since(begun))
		if err := check(body); err != nil {
			return nil, fmt.Errorf("GET %s: %w", url(i), err)
		}
	}
	return times, nil
}

func getBody(ctx context.Context, url string) ([]byte, error) {
	rq, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(rq)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %s", url, res.Status, body)
	}
	return body, err
}

func checkPage(body []byte) error {
	var page api.NamesPage
	if err := json.Unmarshal(body, &page); err != nil {
		return err
	}
	if len(page.Names) != api.MaxNames || page.Next == "" {
		return fmt.Errorf("%d names, next %q", len(page.Names), page.Next)
	}
	return nil
}

func checkImage(body []byte) error {
	var im api.Image
	if err := json.Unmarshal(body, &im); err != nil {
		return err
	}
	if im.Status != api.StatusReady {
		return fmt.Errorf("status %q", im.Status)
	}
	return nil
}
