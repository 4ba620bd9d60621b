package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/api/access"
	"quarry/internal/proc"
	"quarry/store/writer"
)

const (
	// backgroundIdle is how long a server that a command started stays without
	// a request, a job or a lease.
	backgroundIdle = 10 * time.Second
	// drainTime bounds the end of requests under way at SIGTERM.
	drainTime = 30 * time.Second
	// closeTime is for what comes after it.
	closeTime = 15 * time.Second
)

type serveOptions struct {
	data       string
	bucket     string
	unsafe     bool // --unsafe-single-writer
	cache      cacheSize
	doors      doors
	key        string
	noSign     bool
	workers    int
	uploads    uploadSpace
	jobs       jobOptions
	background bool
	readOnly   bool
	takeover   time.Duration
	limits     limits
	gcEvery    string
	retain     string
	grace      string

	maxConnections int
}

func newServe() *cobra.Command {
	o := serveOptions{doors: doors{listen: "127.0.0.1:7070"}}
	c := &cobra.Command{
		Use:   "serve --data DIR [--no-auth] [--listen HOST:PORT]",
		Short: "own a data folder and serve its images and chunks over HTTP",
		Long: `serve owns the data folder, which it makes when missing, and serves the HTTP API
on --listen and, with the convert and admin routes, on DIR/run/quarry.sock. It prints
"listening on http://HOST:PORT", or https, when it is ready. SIGTERM ends the requests under
way and exits 0. Clients on --listen show a token (quarry token create), which may be used over
plain HTTP on loopback only; --no-auth asks for none: everyone on loopback reads and pushes.

One node writes a bucket. Another one started on it stands by, and takes the store over
when the writer has ended or gives no sign of life; "listening on" comes then. Nodes with
--read-only serve what the writer has made, and need no keys.

` + limitHelp() + `
The limits of serve are the defaults of the conversions it makes.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runServe(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&o.data, "data", os.Getenv("QUARRY_DATA"), "data folder (env QUARRY_DATA)")
	f.StringVar(&o.bucket, "bucket", "", bucketHelp)
	f.BoolVar(&o.unsafe, "unsafe-single-writer", false, "take an S3 server without conditional writes: nothing but this data folder may ever write to the bucket")
	f.StringVar(&o.cache.text, "cache-size", "", rangeCacheHelp)
	o.doors.flags(c)
	f.StringVar(&o.key, "key", "", "sign with this private key instead of DIR/keys/signing.key")
	f.BoolVar(&o.noSign, "no-sign", false, "convert without signing: images stay unsigned until quarry sign; the folder remembers it")
	f.IntVar(&o.workers, "workers", 0, "compression workers; 0 is one per processor")
	f.StringVar(&o.uploads.text, "upload-space", "", "bytes on disk for unfinished pushes together, as 512M or 20G; default is 32G")
	o.jobs.flags(f)
	f.BoolVar(&o.readOnly, "read-only", false, "follow the writer of the bucket and change nothing; any number of nodes. DIR remembers it")
	f.DurationVar(&o.takeover, "takeover-after", writer.After, "take the store over when its writer has given no sign of life for so long")
	f.Func("limit", limitUsage, o.limits.set)
	f.StringVar(&o.gcEvery, "gc-every", "0s", "delete what nothing needs that often, as quarry gc does, for example 24h; 0s never")
	f.StringVar(&o.retain, "gc-retain", "", "keep the images of moved and deleted names for so long (default 168h)")
	f.StringVar(&o.grace, "gc-grace", "", "keep packs for nodes that read the bucket (default 1h; 0s for a bucket in DIR)")
	f.IntVar(&o.maxConnections, "max-connections", api.MaxConnections, "connections at once; more are answered 503 and closed")
	f.BoolVar(&o.background, "background", false, "serve the socket only and exit when idle")
	f.MarkHidden("background")
	return c
}

func runServe(ctx context.Context, o serveOptions, stdout, stderr io.Writer) error {
	if o.data == "" {
		return fmt.Errorf("%w: serve needs --data DIR", errUsage)
	}
	if !o.background {
		if err := o.doors.check(); err != nil {
			return err
		}
	}
	if o.maxConnections < 1 {
		return fmt.Errorf("%w: --max-connections %d: want 1 or more", errUsage, o.maxConnections)
	}
	if o.takeover < minTakeover {
		return fmt.Errorf("%w: --takeover-after %s: want %s at least", errUsage, o.takeover, minTakeover)
	}
	log := slog.New(slog.NewJSONHandler(stderr, nil))
	dir, err := openDataDir(o.data)
	if err != nil {
		return err
	}
	o.data = string(dir)
	if o.readOnly, err = dir.chooseReadOnly(o.readOnly, o.background); err != nil {
		return err
	}
	if _, made, err := dir.remembered(); o.readOnly && o.bucket == "" && err == nil && !made {
		return fmt.Errorf("%w: --read-only needs --bucket, with the URL that the writer of the store has", errUsage)
	}
	var guard *access.Guard
	if !o.background {
		if guard, err = o.doors.guard(dir, log); err != nil {
			return err
		}
		if err := o.doors.try(log); err != nil {
			return err
		}
	}
	own, err := takeOver(ctx, o, log)
	switch {
	case o.background && errors.Is(err, proc.ErrLocked):
		return nil // the command that started us finds the owner
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return nil // told to end before it was up, which is no failure
	case err != nil:
		return err
	}
	handler := newHandler(own, guard, o.doors.metricsOpen, log)
	stop := own.start(ctx)
	err = serveAll(ctx, o, own, handler, log, stdout)
	stop() // who takes the store over must find nobody at work on it
	own.release(ctx)
	return errors.Join(err, own.close())
}

// gcFlags reads the flags of gc. A server that a command started collects only when it
// is told.
func (o serveOptions) gcFlags() (every time.Duration, retain, grace *time.Duration, err error) {
	if o.background {
		return 0, nil, nil, nil
	}
	if every, err = parseAge(o.gcEvery); err != nil {
		return 0, nil, nil, fmt.Errorf("%w: --gc-every: %w", errUsage, err)
	}
	for _, f := range []struct {
		name, text string
		to         **time.Duration
	}{{"--gc-retain", o.retain, &retain}, {"--gc-grace", o.grace, &grace}} {
		if f.text == "" {
			continue
		}
		d, err := parseAge(f.text)
		if err != nil {
			return 0, nil, nil, fmt.Errorf("%w: %s: %w", errUsage, f.name, err)
		}
		*f.to = &d
	}
	return every, retain, grace, nil
}

// takeOver opens the data folder. A background server that has it is told to
// end; any other owner is an error. Then it waits until no other node writes the bucket.
func takeOver(ctx context.Context, o serveOptions, log *slog.Logger) (*owner, error) {
	at, err := parseBucketURL(o.bucket)
	if err != nil {
		return nil, err
	}
	space, err := o.uploads.bytes()
	if err != nil {
		return nil, err
	}
	every, retain, grace, err := o.gcFlags()
	if err != nil {
		return nil, err
	}
	if err := o.jobs.check(); err != nil {
		return nil, err
	}
	cfg := ownerConfig{
		uploadSpace: space, jobs: o.jobs, gcEvery: every, retain: retain, grace: grace,
		readOnly: o.readOnly, takeover: o.takeover,
		dir: dataDir(o.data), bucket: place{at, o.unsafe}, cache: o.cache, keyFile: o.key, noSign: o.noSign, workers: o.workers, background: o.background, limits: o.limits, log: log}
	boundHeap()
	own, err := lockFolder(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return own, own.open(ctx, cfg)
}

// lockFolder takes the lock of the data folder.
func lockFolder(ctx context.Context, cfg ownerConfig) (*owner, error) {
	// The other server may use all of its drain time, and closes its index then.
	ctx, cancel := context.WithTimeout(ctx, drainTime+closeTime)
	defer cancel()
	told := 0
	for {
		own, err := lockOwner(cfg)
		if !errors.Is(err, proc.ErrLocked) || cfg.background {
			return own, err
		}
		h, alive := readHolder(cfg.dir)
		if alive && !h.Background {
			return nil, fmt.Errorf("%w: pid %d serves it: stop that one, or use another --data", err, h.PID)
		}
		if alive && told != h.PID {
			told = h.PID
			if err := syscall.Kill(h.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
				return nil, fmt.Errorf("end background server %d: %w", h.PID, err)
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: background server %d does not end", err, h.PID)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// serveAll serves the socket and, in the foreground, TCP, until ctx ends, a
// background server is idle, or another writer has taken over; then it drains.
func serveAll(ctx context.Context, o serveOptions, own *owner, h *api.Handler, log *slog.Logger, stdout io.Writer) error {
	d, url := own.dir, ""
	if err := os.Remove(d.socket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	local, err := net.Listen("unix", d.socket())
	if err != nil {
		return fmt.Errorf("listen on the data folder's socket: %w", err)
	}
	listeners := map[net.Listener]*api.Handler{local: h}
	if !o.background {
		var tcp net.Listener
		if tcp, url, err = o.doors.open(log); err != nil {
			return errors.Join(err, local.Close())
		}
		listeners[tcp] = h.WithLocal(false)
		defer func() { fmt.Fprintln(stdout, "stopped") }()
		fmt.Fprintf(stdout, "listening on %s\n", url)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var g errgroup.Group
	for l, handler := range listeners {
		g.Go(func() error {
			defer cancel()
			return drainOn(ctx, api.NewServer(handler), handler.Listen(l, o.maxConnections))
		})
	}
	g.Go(func() error {
		defer cancel()
		return own.keepMark(ctx, url)
	})
	if o.background {
		g.Go(func() error {
			defer cancel()
			watchIdle(ctx, h)
			return nil
		})
	}
	return g.Wait()
}

// drainOn serves until ctx ends, and then until the requests under way have ended.
func drainOn(ctx context.Context, srv *http.Server, l net.Listener) error {
	drained := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
		drained <- srv.Shutdown(limit)
	})
	err := srv.Serve(l)
	if stop() {
		return err // it ended by itself
	}
	if err := <-drained; err != nil {
		return errors.Join(fmt.Errorf("requests still run after %s: %w", drainTime, err), srv.Close())
	}
	return nil
}

func watchIdle(ctx context.Context, h *api.Handler) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if since, idle := h.IdleSince(); idle && now.Sub(since) > backgroundIdle {
				return
			}
		}
	}
}
