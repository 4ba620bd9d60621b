package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/internal/proc"
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
	listen     string
	noAuth     bool
	key        string
	noSign     bool
	workers    int
	background bool
	limits     limits
}

func newServe() *cobra.Command {
	var o serveOptions
	c := &cobra.Command{
		Use:   "serve --data DIR --no-auth [--listen HOST:PORT]",
		Short: "own a data folder and serve its images and chunks over HTTP",
		Long: `serve owns the data folder, which it makes when missing, and serves the HTTP API
on --listen and, with the convert and admin routes, on DIR/run/quarry.sock. It prints
"listening on http://HOST:PORT" when it is ready. SIGTERM ends the requests under way
and exits 0. There are no tokens yet, so it needs --no-auth and listens on loopback only.

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
	f.StringVar(&o.listen, "listen", "127.0.0.1:7070", "address of the HTTP API; port 0 takes a free one")
	f.BoolVar(&o.noAuth, "no-auth", false, "serve everyone who can reach the address; loopback only")
	f.StringVar(&o.key, "key", "", "sign with this private key instead of DIR/keys/signing.key")
	f.BoolVar(&o.noSign, "no-sign", false, "convert without signing; images stay unsigned")
	f.IntVar(&o.workers, "workers", 0, "compression workers; 0 is one per processor")
	f.Func("limit", limitUsage, o.limits.set)
	f.BoolVar(&o.background, "background", false, "serve the socket only and exit when idle")
	f.MarkHidden("background")
	return c
}

func runServe(ctx context.Context, o serveOptions, stdout, stderr io.Writer) error {
	if o.data == "" {
		return fmt.Errorf("%w: serve needs --data DIR", errUsage)
	}
	if !o.background {
		if err := checkListen(o); err != nil {
			return err
		}
	}
	log := slog.New(slog.NewJSONHandler(stderr, nil))
	dir, err := openDataDir(o.data)
	if err != nil {
		return err
	}
	o.data = string(dir)
	own, err := takeOver(ctx, o, log)
	switch {
	case o.background && errors.Is(err, proc.ErrLocked):
		return nil // the command that started us finds the owner
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return nil // told to end before it was up, which is no failure
	case err != nil:
		return err
	}
	handler := newHandler(own, log)
	err = serveAll(ctx, o, dir, handler, stdout)
	return errors.Join(err, own.close())
}

// checkListen refuses to serve without authentication on anything but loopback.
func checkListen(o serveOptions) error {
	if !o.noAuth {
		return fmt.Errorf("%w: serve has no tokens to check: pass --no-auth to serve everyone on loopback", errUsage)
	}
	host, port, err := net.SplitHostPort(o.listen)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%w: --listen %s: %w", errUsage, o.listen, err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("%w: --no-auth listens on loopback only, not on %q", errUsage, o.listen)
	}
	return nil
}

// takeOver opens the data folder. A background server that has it is told to
// end; any other owner is an error.
func takeOver(ctx context.Context, o serveOptions, log *slog.Logger) (*owner, error) {
	place, err := parseBucketURL(o.bucket)
	if err != nil {
		return nil, err
	}
	cfg := ownerConfig{dir: dataDir(o.data), bucket: place, keyFile: o.key, noSign: o.noSign, workers: o.workers, background: o.background, limits: o.limits, log: log}
	// The other server may use all of its drain time, and closes its index then.
	ctx, cancel := context.WithTimeout(ctx, drainTime+closeTime)
	defer cancel()
	boundHeap()
	told := 0
	for {
		own, err := openOwner(ctx, cfg)
		if !errors.Is(err, proc.ErrLocked) || o.background {
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

// serveAll serves the socket and, in the foreground, TCP, until ctx ends or a
// background server is idle; then it drains.
func serveAll(ctx context.Context, o serveOptions, d dataDir, h *api.Handler, stdout io.Writer) error {
	if err := os.Remove(d.socket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	local, err := net.Listen("unix", d.socket())
	if err != nil {
		return fmt.Errorf("listen on the data folder's socket: %w", err)
	}
	listeners := map[net.Listener]*api.Handler{local: h}
	if !o.background {
		tcp, err := net.Listen("tcp", o.listen)
		if err != nil {
			return errors.Join(err, local.Close())
		}
		listeners[tcp] = h.WithLocal(false)
		defer func() { fmt.Fprintln(stdout, "stopped") }()
		fmt.Fprintf(stdout, "listening on http://%s\n", tcp.Addr())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var g errgroup.Group
	for l, handler := range listeners {
		g.Go(func() error {
			defer cancel()
			return serveOne(ctx, l, handler)
		})
	}
	if o.background {
		g.Go(func() error {
			defer cancel()
			watchIdle(ctx, h)
			return nil
		})
	}
	return g.Wait()
}

func serveOne(ctx context.Context, l net.Listener, handler *api.Handler) error {
	srv := api.NewServer(handler)
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
