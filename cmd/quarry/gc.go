package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"quarry/api"
	"quarry/store/gc"
)

func newGC() *cobra.Command {
	var t target
	var req api.GCRequest
	var asJSON bool
	c := &cobra.Command{
		Use:   "gc --data DIR",
		Short: "delete what no name, pin, job or mount needs",
		Long: `gc deletes the images that nothing needs and the chunks that only they had, beside
everything else that goes on. What a name had that was moved or deleted stays for --retain.
Packs of which less than --ratio is needed are copied and go too. It waits for conversions
under way, at most --wait, before it deletes anything. The objects of packs are deleted
--grace after nothing needs them any more: other nodes may read them until they have heard
of it. A data folder with its own bucket has no such nodes, and its grace is 0.

Of what was pushed a manifest goes like its image, and with it what only it names; blobs that
no manifest of their repository names go too. Nothing goes that a client asked for or was told
of less than --push-grace ago, or since the server started.

Exit codes: 0 ok, also when packs were left alone because of damage, which it says; 1 nothing
or not all was done, run it again; 2 usage.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runGC(c.Context(), &t, req, asJSON, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	t.flags(c)
	f := c.Flags()
	f.BoolVar(&req.DryRun, "dry-run", false, "say what would be deleted, delete nothing")
	f.StringVar(&req.Retain, "retain", "", "keep the images of moved and deleted names for so long (default 168h)")
	f.StringVar(&req.Grace, "grace", "", "keep packs for nodes that read the bucket (default 1h; 0s for a bucket in DIR)")
	f.StringVar(&req.PushGrace, "push-grace", "", "keep blobs and manifests that a client was told of so recently: it may name them yet (default 2h)")
	f.StringVar(&req.Wait, "wait", "", "wait so long for conversions under way (default 1h)")
	f.Float64Var(&req.Ratio, "ratio", 0, "part of a pack that must be needed for it to stay, 0 to 1 (default 0.5)")
	f.BoolVar(&asJSON, "json", false, "print the report as JSON")
	return c
}

func runGC(ctx context.Context, t *target, req api.GCRequest, asJSON bool, stdout, stderr io.Writer) error {
	if _, err := gcLimits(req, gc.Limits{}); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	cl, err := t.client(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	var report gc.Report
	err = cl.GC(ctx, req, &report, func(p api.Progress) { fmt.Fprintf(stderr, "%s\n", oneLine(p.Step)) })
	if err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(stdout).Encode(map[string]any{"version": 1, "report": report})
	}
	printReport(stdout, report)
	return nil
}

func printReport(w io.Writer, r gc.Report) {
	verb := "deleted"
	if r.DryRun {
		verb = "would delete"
	}
	fmt.Fprintf(w, "needed: %d images, %d chunks\n", r.Images, r.Chunks)
	for _, kind := range slices.Sorted(maps.Keys(r.Deleted)) {
		fmt.Fprintf(w, "%s %s: %d objects, %d bytes\n", verb, kind, r.Deleted[kind].Objects, r.Deleted[kind].Bytes)
	}
	if len(r.Deleted) == 0 {
		fmt.Fprintf(w, "%s: nothing\n", verb)
	}
	for _, line := range []struct {
		what string
		a    gc.Amount
	}{
		{"chunks copied out of condemned packs", r.Repacked},
		{"packs retired, deleted after the grace", r.Waiting},
	} {
		if line.a.Objects > 0 {
			fmt.Fprintf(w, "%s: %d, %d bytes\n", line.what, line.a.Objects, line.a.Bytes)
		}
	}
	if r.Spared > 0 {
		fmt.Fprintf(w, "images asked for meanwhile, which stay: %d\n", r.Spared)
	}
	for _, p := range r.Problems {
		fmt.Fprintf(w, "left alone: %s\n", oneLine(p))
	}
}

// gcLimits reads the limits of a request over those of the server.
func gcLimits(req api.GCRequest, l gc.Limits) (gc.Limits, error) {
	for _, d := range []struct {
		name, text string
		to         *time.Duration
	}{{"retain", req.Retain, &l.Retain}, {"grace", req.Grace, &l.Grace}, {"wait", req.Wait, &l.Wait}, {"push-grace", req.PushGrace, &l.Push}} {
		if d.text == "" {
			continue
		}
		v, err := parseAge(d.text)
		if err != nil {
			return l, fmt.Errorf("%s: %w", d.name, err)
		}
		*d.to = v
	}
	if req.Ratio < 0 || req.Ratio > 1 {
		return l, fmt.Errorf("ratio %v is not 0 to 1", req.Ratio)
	}
	if req.Ratio > 0 {
		l.Ratio = req.Ratio
	}
	return l, nil
}

// parseAge is time.ParseDuration, and knows days: 30d.
func parseAge(s string) (time.Duration, error) {
	text := s
	if days, ok := strings.CutSuffix(s, "d"); ok {
		text = days + "h"
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q: want a duration such as 30d, 12h or 90m", s)
	}
	if text != s {
		if d > maxAge/24 {
			return 0, fmt.Errorf("%q is more than %d days", s, int(maxAge.Hours()/24))
		}
		d *= 24
	}
	return d, nil
}

// maxAge bounds durations: a hundred years.
const maxAge = 100 * 365 * 24 * time.Hour

// collect is the server's side.
func (o *owner) collect(ctx context.Context, req api.GCRequest, step func(api.Progress)) (any, error) {
	l, err := gcLimits(req, o.upkeep.limits)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", api.ErrBadRequest, err)
	}
	report, err := o.upkeep.gc.Run(ctx, gc.Options{
		DryRun: req.DryRun, Limits: &l, Step: func(s string) { step(api.Progress{Step: s}) },
	})
	if errors.Is(err, gc.ErrRunning) {
		err = fmt.Errorf("%w: %w", api.ErrBusy, err)
	}
	return report, err
}
