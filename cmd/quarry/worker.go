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
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/api/access"
	"quarry/api/sandboxes"
	"quarry/api/sandboxes/page"
	"quarry/worker"
	"quarry/worker/memory"
	"quarry/worker/network/wait"
	"quarry/worker/node"
	"quarry/worker/sandbox"
)

// workerListen is the default address of a worker's API.
const workerListen = "127.0.0.1:7080"

type workerOptions struct {
	worker workerFlags
	doors  doors
	node   node.Config
	memory byteSize
	disk   byteSize
	keep   byteSize
	shares []string
	net    networkFlags
	paused pausedFlags

	anyRunsc       bool
	maxConnections int
}

func newWorker() *cobra.Command {
	o := workerOptions{doors: doors{listen: workerListen}}
	c := &cobra.Command{
		Use:   "worker (--store URL --trust FILE | --data DIR) [--listen HOST:PORT] [--no-auth]",
		Short: "keep sandboxes on this machine and serve them over HTTP",
		Long: `worker is the daemon of one machine. It makes sandboxes from signed images, under gVisor's
runsc, and runs commands in them, for clients on --listen (docs/OPERATIONS.md, api/sandboxes/openapi.yaml).
It prints "listening on http://HOST:PORT", or https, when it is ready, which is when what an earlier worker
left on this machine is adopted or ended. SIGTERM ends the worker and leaves the sandboxes, for the next one.

Clients show a token of scope run (quarry token create --tokens WORKER-DIR/tokens.json --scope run), or the
token of their sandbox; --no-auth asks for none, on loopback. WORKER-DIR/worker.sock asks for none: quarry ps,
exec, logs, cp and stats use it.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runWorker(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	o.worker.mountFlags(c)
	o.doors.flags(c)
	f := c.Flags()
	f.IntVar(&o.node.MaxSandboxes, "max-sandboxes", 0, "sandboxes at once; more are refused (default 256)")
	f.IntVar(&o.node.Creates, "creates", 0, "sandboxes that are made at once; more wait (default twice the processors)")
	f.IntVar(&o.node.QueuedCreates, "queue", 0, "creates that wait; more are refused (default 256)")
	f.Var(&o.memory, "memory", "memory that the requests of sandboxes may add up to, such as 20G (default nine tenths of the machine's)")
	f.Var(&o.disk, "disk", "disk that the limits of sandboxes may add up to (default nine tenths of what is free)")
	f.Var(&o.keep, "disk-reserve", "free disk below which no sandbox is made (default a fiftieth of the disk, at most 1G)")
	f.Float64Var(&o.node.DiskOvercommit, "disk-overcommit", 1, "how many times --disk the limits may add up to, 1 to 100: few sandboxes write all that they may")
	f.Int64Var(&o.node.PIDs, "pids", 0, "processes that the limits of sandboxes may add up to (default seven eighths of what the machine can have)")
	f.Int64Var(&o.node.Default.MemoryMB, "default-memory-mb", 0, "MiB of a sandbox that does not say (default 1024)")
	f.Int64Var(&o.node.Default.OutputMB, "default-output-mb", 0, "MiB that are kept of the output of a sandbox's execs together, when it does not say (default a quarter of its disk, 16 to 256); counted against --disk too")
	f.Int64Var(&o.node.Default.DiskMB, "default-disk-mb", 0, "MiB that a sandbox may write that does not say (default 4096)")
	f.StringVar(&o.node.CgroupParent, "cgroup", "", "control group, below /sys/fs/cgroup, that the sandboxes' are made in (default /quarry)")
	f.StringArrayVar(&o.shares, "share", nil, "NAME=DIR: a folder of this machine whose files may be given to sandboxes, read-only; may be repeated")
	f.BoolVar(&o.anyRunsc, "any-runsc", false, "take a runsc of another version than "+runscVersion()+", which quarry is tested with")
	f.StringArrayVar(&o.node.ModelEndpoints, "model-endpoint", nil, "HOST:PORT of a model, by plain TCP: a sandbox that waits for its answer is paused until it comes; may be repeated")
	o.paused.flags(f)
	o.net.flags(f)
	f.IntVar(&o.maxConnections, "max-connections", api.MaxConnections, "connections at once; one more has the place of one that has been idle for longest, or waits")
	return c
}

// sharesOf reads the folders that --share names.
func sharesOf(list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, text := range list {
		name, dir, ok := strings.Cut(text, "=")
		if !ok || name == "" || strings.ContainsAny(name, "/.") || !filepath.IsAbs(dir) || out[name] != "" {
			return nil, fmt.Errorf("%w: --share %q: want NAME=DIR with an absolute DIR, and each NAME once", errUsage, text)
		}
		if st, err := os.Stat(dir); err != nil || !st.IsDir() {
			return nil, fmt.Errorf("%w: --share %q: %s is no folder", errUsage, text, dir)
		}
		out[name] = dir
	}
	return out, nil
}

func runWorker(ctx context.Context, o workerOptions, stdout, stderr io.Writer) error {
	if err := o.doors.check(); err != nil {
		return err
	}
	if o.maxConnections < 1 {
		return fmt.Errorf("%w: --max-connections %d: want 1 or more", errUsage, o.maxConnections)
	}
	shares, err := sharesOf(o.shares)
	if err != nil {
		return err
	}
	if err := o.paused.fill(&o.node); err != nil {
		return err
	}
	log := slog.New(slog.NewJSONHandler(stderr, nil))
	wk, err := o.worker.worker(ctx, stderr)
	if err != nil {
		return err
	}
	wk.Log = log
	if wk.Runsc == "" {
		return errors.New("runsc is not on the PATH: run make setup, or go install gvisor.dev/gvisor/runsc (quarry doctor names the version)")
	}
	guard, err := o.guard(wk, log)
	if err != nil {
		return err
	}
	if err := o.doors.try(log); err != nil {
		return err
	}
	if err := o.worker.target.ready(ctx); err != nil {
		return err
	}
	images := newNodeImages(o.worker, wk)
	defer images.close()
	registry := prometheus.NewRegistry()
	cfg := o.node
	cfg.Waits = wait.NewMetrics()
	cfg.MemoryMetrics, cfg.Naps = memory.NewMetrics(), node.NewNapMetrics()
	registry.MustRegister(cfg.Waits, cfg.MemoryMetrics, cfg.Naps)
	cfg.Dir, cfg.Worker, cfg.Fetch, cfg.Shares, cfg.Log, cfg.Version = wk.Dir, wk, images.fetch, shares, log, version
	cfg.Memory, cfg.Disk, cfg.DiskReserve = o.memory.bytes, o.disk.bytes, o.keep.bytes
	if !o.anyRunsc {
		cfg.RunscVersion = runscVersion()
	}
	cfg.Guest = besides(wk.ShimPath, "quarry-guest")
	if cfg.Network, err = o.net.open(ctx, wk, log); err != nil {
		return err
	}
	n, err := node.New(ctx, cfg)
	if err != nil {
		return errors.Join(err, o.net.close(cfg.Network))
	}
	err = o.serve(ctx, n, wk, guard, registry, log, stdout)
	return errors.Join(err, n.Close(), o.net.close(cfg.Network))
}

// guard returns who looks at tokens, nil with --no-auth.
func (o *workerOptions) guard(wk *worker.Worker, log *slog.Logger) (*access.Guard, error) {
	path := filepath.Join(wk.Dir.Path(), "tokens.json")
	file, err := o.doors.tokensFile(path, "--tokens "+path, access.Run)
	if err != nil || file == nil {
		return nil, err
	}
	return access.New(access.Config{Tokens: file, TLS: o.doors.cert != "", Log: log}), nil
}

// serve serves TCP and the folder's socket until ctx ends.
func (o *workerOptions) serve(ctx context.Context, n *node.Node, wk *worker.Worker, guard *access.Guard, registry *prometheus.Registry, log *slog.Logger, stdout io.Writer) error {
	cfg := sandboxes.Config{Node: n, MetricsOpen: o.doors.metricsOpen, Registry: registry, Log: log, Page: page.New(n, nil)}
	local := sandboxes.NewHandler(cfg)
	public := local.With(func(c *sandboxes.Config) {
		c.HostAllowed = loopbackHost
		if guard != nil {
			c.Authorize, c.HostAllowed = guard.Authorize, nil
		}
	})
	registry.MustRegister(newNodeMetrics(n.Status))
	if guard != nil {
		registry.MustRegister(guard.Collectors()...)
	}
	socket := workerSocket(o.worker.dir)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	unix, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listen on the worker folder's socket: %w", err)
	}
	tcp, url, err := o.doors.open(log)
	if err != nil {
		return errors.Join(err, unix.Close())
	}
	fmt.Fprintf(stdout, "listening on %s\n", url)
	defer fmt.Fprintln(stdout, "stopped")
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var g errgroup.Group
	g.Go(func() error { keepReading(ctx, n, wk, log); return nil })
	serve := func(s *http.Server, l net.Listener) {
		g.Go(func() error {
			defer cancel()
			return drainOn(ctx, s, l)
		})
	}
	serve(sandboxes.NewServer(local), unix)
	server := sandboxes.NewServer(public)
	serve(server, sandboxes.Limit(tcp, server, o.maxConnections))
	return g.Wait()
}

// readerEvery is how often a worker with sandboxes looks after reader and keeper: the
// death of both is a stall of their images' reads, and of no more.
const readerEvery = 2 * time.Second

// keepReading makes sure that reader and keeper run while there are sandboxes, until
// ctx ends.
func keepReading(ctx context.Context, n *node.Node, wk *worker.Worker, log *slog.Logger) {
	tick := time.NewTicker(readerEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s, err := n.Status(ctx)
		live := s.Sandboxes[sandbox.StateRunning] + s.Sandboxes[sandbox.StatePaused] + s.Sandboxes[sandbox.StateHibernated]
		if err == nil && live > 0 {
			err = wk.EnsureReader(ctx)
		}
		if err != nil && ctx.Err() == nil {
			log.WarnContext(ctx, "the reader of images is not well", "err", err)
		}
	}
}

// workerSocket is where a worker serves the owner of its folder.
func workerSocket(dir string) string { return filepath.Join(dir, "worker.sock") }

// besides returns the program of that name in the folder of another one, "" when there
// is none.
func besides(program, name string) string {
	path := filepath.Join(filepath.Dir(program), name)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}
