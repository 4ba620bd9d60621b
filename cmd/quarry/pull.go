package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"quarry/api"
	"quarry/store/chunk"
	"quarry/worker"
	"quarry/worker/reader"
)

type pullOptions struct {
	worker           workerFlags
	pin, unpin, list bool
	json             bool
}

func newPull() *cobra.Command {
	var o pullOptions
	c := &cobra.Command{
		Use:   "pull [--pin|--unpin] IMAGE, or pull --list",
		Short: "bring all of an image into this worker's disk cache, and keep it there",
		Long: `pull verifies the image and fetches every chunk of it that the disk cache does not have;
what is cached is read and verified, and fetched again when it is bad. A pull that was ended
goes on where it was when it is run again. With --pin nothing of the image is evicted, until
--unpin, also over restarts; somewhat less than half of the cache can be pinned, as --list
says, and a pin beyond that is refused before anything is fetched. A pin outlives a lower
--cache-size: what of it that evicts is fetched again when it is read. --unpin asks no store: IMAGE is a name that was used
here, or an image id. --list shows what the cache holds and which images are pinned.

When the store is away, a mounted image goes on to be read from the cache, and one that was
fetched before is mounted and run by REPO@sha256:… from it. What a tag is, the store is asked.

Exit code 1 when some chunk could not be had: the last 64 are named with their files and why.`,
		Args: rangeArgs(0, 1),
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case o.list && (len(args) > 0 || o.pin || o.unpin):
				return usage(c, errors.New("--list takes no IMAGE and no other of these flags"))
			case o.pin && o.unpin:
				return usage(c, errors.New("--pin and --unpin are opposites"))
			case !o.list && len(args) == 0:
				return usage(c, errors.New("no IMAGE given"))
			case o.list:
				return runPullList(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
			case o.unpin:
				return runUnpin(c.Context(), o, args[0], c.ErrOrStderr())
			}
			return runPull(c.Context(), o, args[0], c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	o.worker.flags(c)
	f := c.Flags()
	f.BoolVar(&o.pin, "pin", false, "keep the image in the cache")
	f.BoolVar(&o.unpin, "unpin", false, "let the image go when there is need of room; fetches nothing")
	f.BoolVar(&o.list, "list", false, "show the cache and the pinned images")
	f.BoolVar(&o.json, "json", false, "print the result as JSON")
	return c
}

// pulled is what pull --json prints.
type pulled struct {
	Version int          `json:"version"` // 1
	Image   string       `json:"image"`
	ID      chunk.Digest `json:"image_id"`
	reader.PullResult
}

func runPull(ctx context.Context, o pullOptions, name string, stdout, stderr io.Writer) error {
	wk, err := o.worker.worker(ctx, stderr)
	if err != nil {
		return err
	}
	im, err := fetchImage(ctx, &o.worker, wk, name)
	if err != nil {
		return err
	}
	if err := wk.EnsureReader(ctx); err != nil {
		return err
	}
	bar := newProgress(stderr)
	res, err := reader.Pull(ctx, wk.Dir, im.ID, o.pin, func(p reader.PullProgress) { bar.step(pullStep(name, p)) })
	bar.end()
	if ctx.Err() != nil {
		return fmt.Errorf("pull of %s was ended; what is cached stays", name)
	}
	if err != nil {
		return fmt.Errorf("pull of %s: %w", name, err)
	}
	if more := res.FailedChunks() - int64(len(res.Errors)); more > 0 {
		fmt.Fprintf(stderr, "quarry: %d chunks could not be had; the last %d:\n", res.FailedChunks(), len(res.Errors))
	}
	for _, e := range res.Errors {
		fmt.Fprintf(stderr, "quarry: %s: %s: chunk %s: %s\n", e.Outcome, oneLine(e.Path), e.Chunk, oneLine(e.Err))
	}
	if o.json {
		err = json.NewEncoder(stdout).Encode(pulled{1, name, im.ID, res})
	} else {
		_, err = fmt.Fprintf(stdout, "%s: %d chunks of %s: %d were cached, %d fetched, %d failed%s\n", name,
			res.All.Chunks, sizeText(res.All.Bytes), res.Cached.Chunks, res.Fetched.Chunks, res.FailedChunks(), pinnedText(res.Pinned))
	}
	return errors.Join(err, pullError(res))
}

func pinnedText(pinned bool) string {
	if pinned {
		return "; pinned"
	}
	return ""
}

// pullError says what of the image is not in the cache.
func pullError(res reader.PullResult) error {
	switch {
	case res.Stopped != "":
		return fmt.Errorf("the pull was given up: %s", res.Stopped)
	case res.FailedChunks() > 0:
		return fmt.Errorf("%d of %d chunks could not be had", res.FailedChunks(), res.All.Chunks)
	case res.Kept != res.All:
		beside := ""
		if res.OthersPinned > 0 {
			beside = fmt.Sprintf(" beside what is pinned of %d others", res.OthersPinned)
		}
		return fmt.Errorf("%d of %d chunks did not stay: the disk cache of %s is too small for the image%s; choose a larger --cache-size", res.All.Chunks-res.Kept.Chunks, res.All.Chunks, sizeText(res.Limit), beside)
	}
	return nil
}

// pullStep is the progress of a pull: where there is no terminal, a line for
// every tenth.
func pullStep(name string, p reader.PullProgress) api.Progress {
	tenths := int64(0)
	if p.All.Chunks > 0 {
		tenths = p.Done.Chunks * 10 / p.All.Chunks
	}
	failures := ""
	if p.Failed > 0 {
		failures = ", with failures"
	}
	return api.Progress{
		Step: "pull", Item: fmt.Sprintf("%s %d%% of %s%s", name, tenths*10, sizeText(p.All.Bytes), failures),
		Done: p.Done.Bytes, Total: p.All.Bytes, Unit: "bytes",
	}
}

func runUnpin(ctx context.Context, o pullOptions, name string, stderr io.Writer) error {
	wk, err := o.worker.worker(ctx, stderr)
	if err != nil {
		return err
	}
	id, err := imageOnWorker(wk.Dir, o.worker, name)
	if err != nil {
		return err
	}
	if err := wk.EnsureReader(ctx); err != nil {
		return err
	}
	return reader.Unpin(ctx, wk.Dir, id)
}

// pinnedImage is a pinned image with the names it had here.
type pinnedImage struct {
	reader.PinnedNow
	Names []string `json:"names"`
}

func runPullList(ctx context.Context, o pullOptions, stdout, stderr io.Writer) error {
	wk, err := o.worker.worker(ctx, stderr)
	if err != nil {
		return err
	}
	if err := wk.EnsureReader(ctx); err != nil {
		return err
	}
	c, err := reader.DiskCache(ctx, wk.Dir)
	if err != nil {
		return err
	}
	images, err := namedPins(wk, c.Images)
	if err != nil {
		return err
	}
	if o.json {
		return json.NewEncoder(stdout).Encode(struct {
			Version int `json:"version"`
			reader.Cached
			Images []pinnedImage `json:"pinned_images"`
		}{1, c, images})
	}
	if c.Missing != "" {
		_, err := fmt.Fprintf(stdout, "there is no disk cache: %s\n", oneLine(c.Missing))
		return err
	}
	fmt.Fprintf(stdout, "%d chunks of %s, on %s of %s; pinned %s of at most %s\n",
		c.Chunks, sizeText(c.Bytes), sizeText(c.Disk), sizeText(c.Limit), sizeText(c.Pinned), sizeText(c.MaxPinned))
	if c.Pinned > c.MaxPinned {
		fmt.Fprintf(stdout, "more is pinned than is kept for sure, and fetched again when it is read: --unpin IMAGE, or a larger --cache-size, mends that\n")
	}
	if c.Paused {
		fmt.Fprintln(stdout, "nothing is written now: the disk failed a short while ago")
	}
	w := tabwriter.NewWriter(stdout, 0, 8, 2, ' ', 0)
	for _, im := range images {
		fmt.Fprintf(w, "pinned\t%s\t%s of %s cached\t%s\n", im.ID, sizeText(im.Cached.Bytes), sizeText(im.All.Bytes), oneLine(fmt.Sprint(im.Names)))
	}
	return w.Flush()
}

func namedPins(wk *worker.Worker, pins []reader.PinnedNow) ([]pinnedImage, error) {
	names, err := wk.Dir.Names()
	if err != nil {
		return nil, err
	}
	list := []pinnedImage{}
	for _, p := range pins {
		list = append(list, pinnedImage{p, append([]string{}, names[p.ID]...)})
	}
	return list, nil
}
