package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"quarry/api"
	"quarry/converter/oci"
	"quarry/e2e/lab"
	"quarry/store/jobs"
)

const (
	// maxPush is how long a push of a known image may take, compared with the same push
	// to distribution's registry.
	maxPush = 1.2
	// pushRounds alternate between the registries, each with a new tag; the ratio is that
	// of the medians.
	pushRounds = 41
)

// measurePush pushes one image to quarry and to distribution's registry by the same
// client, which is crane's: first with all layers, then again and again when both know them.
func measurePush(ctx context.Context, b *bench) (err error) {
	im := b.images[0]
	srv, err := b.lab.Serve(ctx, b.lab.Path("pushed"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, srv.Stop()) }()
	peer, err := b.lab.Distribution(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peer.Stop()) }()

	var ours, theirs, work []float64
	for i := range pushRounds + 1 {
		tag := fmt.Sprintf("t%d", i)
		q, err := push(ctx, srv.Addr(), tag, im)
		if err != nil {
			return fmt.Errorf("quarry: %w", err)
		}
		// The conversion must not slow the other one.
		took, err := jobTime(ctx, srv, tag)
		if err != nil {
			return err
		}
		d, err := push(ctx, peer.Addr, tag, im)
		if err != nil {
			return fmt.Errorf("distribution: %w", err)
		}
		if i == 0 {
			b.figure("push: all layers, quarry and distribution", fmt.Sprintf("%.0f and %.0f ms", q, d))
			b.figure("push: its conversion, after the push", fmt.Sprintf("%.0f ms", took))
			continue
		}
		ours, theirs, work = append(ours, q), append(theirs, d), append(work, took)
	}
	b.figure("push: known layers, quarry and distribution", fmt.Sprintf("%.1f and %.1f ms", median(ours), median(theirs)))
	b.atMost("push: known layers, time ÷ distribution", median(ours)/median(theirs), maxPush, "×")
	return b.unchanged(ctx, srv, pushRounds, median(work))
}

// unchanged shows that pushes of a known image are no work for the converter.
func (b *bench) unchanged(ctx context.Context, srv *lab.Server, pushes int, millis float64) error {
	done, err := srv.Metric(ctx, `quarry_jobs_ended_total{state="done"}`)
	if err != nil {
		return err
	}
	unchanged, err := srv.Metric(ctx, "quarry_jobs_unchanged_total")
	if err != nil {
		return err
	}
	b.figure("push: the job of a known image, after the push", fmt.Sprintf("%.1f ms", millis))
	b.atMost(fmt.Sprintf("push: conversions of %d pushes", pushes+1), done-unchanged, 1, "")
	return nil
}

// push returns how long a push took, in milliseconds.
func push(ctx context.Context, host, tag string, im layout) (float64, error) {
	begun := time.Now()
	_, err := oci.Push(ctx, "oci:"+im.dir, oci.PushConfig{Host: host, Plain: true, Repo: "bench/image", Tag: tag, Transport: http.DefaultTransport})
	return float64(time.Since(begun).Microseconds()) / 1000, err
}

// jobTime waits for the end of the job that a push has begun, and returns how long
// that was after it was queued, in milliseconds.
func jobTime(ctx context.Context, srv *lab.Server, tag string) (float64, error) {
	for {
		body, err := getBody(ctx, srv.URL+"/v1/jobs?repo=bench/image")
		if err != nil {
			return 0, err
		}
		var page api.JobsPage
		if err := json.Unmarshal(body, &page); err != nil {
			return 0, err
		}
		if len(page.Jobs) != 1 {
			return 0, fmt.Errorf("%d jobs, want 1: %s", len(page.Jobs), body)
		}
		switch j := page.Jobs[0]; j.State {
		case jobs.Done:
			return float64(j.Ended.Sub(j.Created).Microseconds()) / 1000, nil
		case jobs.Failed:
			return 0, fmt.Errorf("conversion of %s: %s", tag, body)
		}
		time.Sleep(time.Millisecond)
	}
}
