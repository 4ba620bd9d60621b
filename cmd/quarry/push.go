package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"quarry/api"
	"quarry/api/client"
	"quarry/converter/oci"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
)

type pushOptions struct {
	target target
	source string
	name   string
	wait   bool
	json   bool
}

func newPush() *cobra.Command {
	o := pushOptions{target: target{create: true}}
	c := &cobra.Command{
		Use:   "push SRC REPO[:TAG] [--wait]",
		Short: "push an OCI image to a store, which converts it",
		Long: `push copies an OCI image, or an image index with all its images, to a store as any tool
does that pushes to a registry; layers that the store has already are not sent. SRC is as in
quarry convert. The store answers at once and converts the image when it is its turn, and
one that it has once more when it failed or something of it is missing or damaged;
--wait waits for that, and fails when it fails, with the layer and entry that are wrong.
The last line on stdout is NAME@sha256:<source digest>.

A --store that wants a token gets that of --token-file or the environment; without
one, the credentials of docker's config file (docker login HOST).`,
		Args: exactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			o.source, o.name = args[0], args[1]
			return runPush(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&o.target.data, "data", "", "data folder on this machine, made when missing (env QUARRY_DATA)")
	f.StringVar(&o.target.store, "store", "", "URL of a store node (env QUARRY_STORE)")
	o.target.accessFlags(f)
	f.BoolVar(&o.wait, "wait", false, "wait until the image is ready, or failed")
	f.BoolVar(&o.json, "json", false, "print the result as JSON before the last line")
	return c
}

// pushResult is what --json prints.
type pushResult struct {
	Name   string       `json:"name"`
	Source chunk.Digest `json:"source"`
	Jobs   []api.Job    `json:"jobs"` // its conversions, as they are when the command ends
}

func runPush(ctx context.Context, o pushOptions, stdout, stderr io.Writer) error {
	name, err := image.ParseName(o.name)
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if err := oci.CheckSource(o.source); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if err := o.target.ready(ctx); err != nil {
		return err
	}
	cl, err := o.target.dial()
	if err != nil {
		return err
	}
	defer cl.Close()
	bar := newProgress(stderr)
	res := pushResult{Name: name.String(), Jobs: []api.Job{}}
	if res.Source, err = pushImage(ctx, o, name, bar); err == nil {
		err = awaitJobs(ctx, o, cl, &res, bar)
	}
	bar.end()
	if o.json && !res.Source.IsZero() {
		if jerr := json.NewEncoder(stdout).Encode(map[string]any{"version": 1, "result": res}); jerr != nil {
			return errors.Join(err, jerr)
		}
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%s@%s\n", res.Name, res.Source)
	return err
}

// pushImage sends the image.
func pushImage(ctx context.Context, o pushOptions, name image.Ref, bar *progress) (chunk.Digest, error) {
	var none chunk.Digest
	creds, err := oci.UserCredentials(ctx, o.source)
	if err != nil {
		return none, err
	}
	to, err := o.target.registry(ctx, name.Repo)
	if err != nil {
		return none, err
	}
	defer to.transport.CloseIdleConnections()
	cfg := oci.PushConfig{
		Host: to.host, Plain: to.plain, Repo: name.Repo, Tag: name.Tag, Transport: to.transport, Credentials: to.credentials,
		Source: oci.Config{Credentials: creds},
	}
	cfg.Progress = func(done, total int64) {
		bar.step(api.Progress{Step: "push", Item: name.String(), Done: done, Total: total, Unit: "bytes"})
	}
	source, err := oci.Push(ctx, o.source, cfg)
	if err != nil {
		return none, fmt.Errorf("push %s to %s: %w", name, to.where, err)
	}
	return source, nil
}

// awaitJobs follows the conversions of what was pushed when it was asked to.
func awaitJobs(ctx context.Context, o pushOptions, cl *client.Client, res *pushResult, bar *progress) (err error) {
	if res.Jobs, err = cl.JobsOf(ctx, res.Source); err != nil {
		if errors.Is(err, api.ErrNotOffered) || !o.wait {
			return nil // it was pushed, which is all that was asked
		}
		return fmt.Errorf("%s was pushed, but not what became of it could be learned: %w", res.Name, err)
	}
	if !o.wait {
		return nil
	}
	if len(res.Jobs) == 0 {
		bar.step(api.Progress{Step: "nothing to convert", Item: res.Name})
	}
	for i, j := range res.Jobs {
		j, ferr := cl.FollowJob(ctx, j.ID, func(j api.Job) { bar.step(stepOf(j)) })
		if ferr != nil {
			return errors.Join(err, fmt.Errorf("%s was pushed; its conversion %s: %w", res.Name, j.ID, ferr))
		}
		res.Jobs[i] = j
		if j.State == jobs.Failed {
			err = errors.Join(err, fmt.Errorf("%s was pushed, but %w", res.Name, failedJob(j)))
		}
	}
	return err
}

// stepOf is what a job does, for the bar.
func stepOf(j api.Job) api.Progress {
	switch {
	case j.Progress != nil:
		return *j.Progress
	case j.State == jobs.Queued && j.Reason != nil:
		return api.Progress{Step: "waiting to try again", Item: j.Reason.Message}
	}
	return api.Progress{Step: string(j.State), Item: strings.TrimSpace("conversion " + j.Platform)}
}

// failedJob says why a job failed: layer, entry and reason.
func failedJob(j api.Job) error {
	var where []string
	if j.Platform != "" {
		where = append(where, "for "+j.Platform)
	}
	if j.Reason.Layer != "" {
		where = append(where, "layer "+j.Reason.Layer)
	}
	if j.Reason.Entry != "" {
		where = append(where, "entry "+image.Quote(j.Reason.Entry))
	}
	text := strings.Join(where, ", ")
	if text != "" {
		text = " (" + text + ")"
	}
	return fmt.Errorf("%w%s: %s", api.ErrImageFailed, text, j.Reason.Message)
}
