package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

type runOptions struct {
	worker   workerFlags
	image    string
	command  worker.Command
	timeout  time.Duration
	entry    string
	network  string
	stats    string
	terminal bool
}

func newRun() *cobra.Command {
	var o runOptions
	c := &cobra.Command{
		Use:   "run [flags] IMAGE [--] [ARG…]",
		Short: "run a command in a sandbox of an image",
		Long: `run mounts the image, of which only what is touched is read, and runs one command
in it under gVisor's runsc. Words after IMAGE replace the image's Cmd and follow its
Entrypoint. Flags go before IMAGE. The sandbox has no network.

Exit code: the command's own; 128+n when signal n ended it; 127 the image has no such
command; 126 it cannot be executed; 125 quarry itself failed: wrong usage and --timeout
included.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return runError{usage(c, errors.New("no IMAGE given"))}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			o.image, o.command.Args = args[0], args[1:]
			if len(args) > 1 && args[1] == "--" {
				o.command.Args = args[2:]
			}
			err := runRun(c.Context(), o, c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr())
			if err != nil && !errors.As(err, new(exitStatus)) {
				return runError{err}
			}
			return err
		},
	}
	f := c.Flags()
	f.SetInterspersed(false)
	o.worker.mountFlags(c)
	f.StringArrayVarP(&o.command.Env, "env", "e", nil, "set K=V, or K to pass on this process's value; may be repeated")
	f.StringVarP(&o.command.WorkDir, "workdir", "w", "", "working directory")
	f.StringVarP(&o.command.User, "user", "u", "", "USER[:GROUP], names or numbers, looked up in the image")
	f.StringVar(&o.entry, "entrypoint", "", "program to run instead of the image's entrypoint")
	f.DurationVar(&o.timeout, "timeout", 0, "end the run after this time, such as 30s")
	f.BoolVarP(&o.terminal, "tty", "t", false, "give the command a terminal")
	f.StringVar(&o.network, "network", "none", "network of the sandbox: none")
	f.StringVar(&o.stats, "stats", "", "write what the run cost to this file as JSON, for quarry explain and others")
	return c
}

func runRun(ctx context.Context, o runOptions, stdin io.Reader, stdout, stderr io.Writer) error {
	if o.network != "none" {
		return fmt.Errorf("%w: --network %s: only none is there", errUsage, o.network)
	}
	if err := prepareCommand(&o, stdin, stdout, stderr); err != nil {
		return err
	}
	lateHeap()
	times := timeline.New(time.Now())
	ctx = timeline.With(ctx, times)
	wk, err := o.worker.worker(ctx, stderr)
	if err != nil {
		return err
	}
	if wk.Runsc == "" {
		return errors.New("runsc is not on the PATH: run make setup, or go install gvisor.dev/gvisor/runsc (quarry doctor names the version)")
	}
	// A reader of our output that goes away is the command's business, as it would
	// be without us in between: it gets SIGPIPE, and we clean up.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(signals)
	runCtx, cancel := untilStarted(ctx, &o)
	defer cancel()
	im, err := startImage(runCtx, &o.worker, wk, o.image, true)
	defer im.end()
	var end worker.Ended
	if err == nil {
		o.command.Signals, o.command.Coming = signals, im.coming
		before := time.Since(times.Began())
		end, err = wk.Run(runCtx, im.Image, o.command)
		im.end()
		if end.FirstOutput > 0 {
			end.FirstOutput += before
		}
		if end.Started {
			end.Duration += before
		}
		reportReadErrors(stderr, end.Stats, end.Restarts)
	} else if runCtx.Err() != nil {
		err = context.Cause(runCtx)
	}
	if !end.Started {
		end.Duration = time.Since(times.Began())
	}
	rec := recordOf(o.image, im.Image, im.cost(), end, err)
	rec.Began, rec.Steps = times.Began(), times.Steps()
	if _, rerr := worker.SaveRecord(wk.Dir, rec); rerr != nil {
		wk.Log.WarnContext(ctx, "no record of the run for quarry explain", "err", rerr)
	}
	if o.stats != "" {
		err = errors.Join(err, writeStats(o.stats, rec))
	}
	if err != nil {
		return err
	}
	if end.Status != 0 {
		return exitStatus(end.Status)
	}
	return nil
}

// errTimeout says that --timeout ended the run.
var errTimeout = errors.New("timed out")

// untilStarted returns a context that ends at the run's timeout and, until the
// command runs, with ctx. From then on a signal is the command's: it decides how
// it ends.
func untilStarted(ctx context.Context, o *runOptions) (context.Context, context.CancelFunc) {
	running := make(chan struct{})
	o.command.Started = func() { close(running) }
	runCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() {
		select {
		case <-running:
		default:
			cancel(errors.New("ended by a signal before the command ran"))
		}
	})
	if o.timeout == 0 {
		return runCtx, func() { cancel(nil) }
	}
	runCtx, stop := context.WithTimeoutCause(runCtx, o.timeout, fmt.Errorf("the run %w after %s and was ended", errTimeout, o.timeout))
	return runCtx, func() { stop(); cancel(nil) }
}

// prepareCommand turns the flags into the command's final form.
func prepareCommand(o *runOptions, stdin io.Reader, stdout, stderr io.Writer) error {
	c := &o.command
	var err error
	if c.Env, err = givenEnv(c.Env); err != nil {
		return err
	}
	if o.timeout < 0 {
		return fmt.Errorf("%w: --timeout %s is negative", errUsage, o.timeout)
	}
	if o.entry != "" {
		c.Entrypoint = []string{o.entry}
	}
	for _, s := range slices.Concat(c.Args, c.Entrypoint, c.Env, []string{c.WorkDir, c.User}) {
		if !utf8.ValidString(s) {
			return fmt.Errorf("%w: %q is not UTF-8, and runsc is told of the command in JSON, which would change it: let a script in the image say it", errUsage, s)
		}
	}
	c.Stdin, c.Stdout, c.Stderr, c.Terminal = stdin, stdout, stderr, o.terminal
	if o.terminal {
		if f, ok := stdin.(*os.File); !ok || !term.IsTerminal(int(f.Fd())) {
			return fmt.Errorf("%w: -t needs a terminal on stdin", errUsage)
		}
	}
	if o.stats == "" {
		return nil
	}
	if o.stats, err = filepath.Abs(o.stats); err != nil {
		return err
	}
	// A file that cannot be written is said before the command has run.
	return os.WriteFile(o.stats, nil, 0o644)
}

// givenEnv resolves K to this process's value; what is not set here is not set
// there.
func givenEnv(list []string) ([]string, error) {
	var out []string
	for _, kv := range list {
		key, _, given := strings.Cut(kv, "=")
		if key == "" {
			return nil, fmt.Errorf("%w: --env %q has no name", errUsage, kv)
		}
		if !given {
			value, set := os.LookupEnv(key)
			if !set {
				continue
			}
			kv = key + "=" + value
		}
		out = append(out, kv)
	}
	return out, nil
}

// fetchImage resolves and verifies an image.
func fetchImage(ctx context.Context, w *workerFlags, wk *worker.Worker, name string) (*folder.Image, error) {
	ref, platform, err := w.wanted(name)
	if err != nil {
		return nil, err
	}
	images, c, err := w.target.images(ctx, wk)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	patience, err := w.reader.readTimeout.duration()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx, heard := unlessSilent(ctx, c, patience)
	var im *folder.Image
	err = whenReady(ctx, w.wait, func() (err error) {
		im, err = images.Fetch(ctx, ref, platform)
		return err
	})
	if err = heard(err); err != nil {
		return offline(images, ref, platform, err)
	}
	return im, nil
}

// recordOf is what a run cost: with its times, the --stats file, and what explain
// shows. im is nil when the image was not had.
func recordOf(name string, im *folder.Image, fetched reader.Stats, end worker.Ended, err error) worker.Record {
	r := worker.Record{
		Version: worker.RecordVersion, Image: name, Stats: end.Stats, Unknown: end.Unknown, ReaderRestarts: end.Restarts,
		FirstOutputMillis: timeline.Millis(end.FirstOutput), DurationMillis: timeline.Millis(end.Duration),
		Started: end.Started, ExitStatus: end.Status,
	}
	if im != nil {
		r.ImageID, r.ImageSizeBytes, r.BootstrapBytes = im.ID, im.RAFS.FileBytes(), im.Statement.BootstrapSize
	}
	r.Requests += fetched.Requests
	r.WireBytes += fetched.WireBytes
	r.BucketBytes += fetched.BucketBytes
	if err != nil {
		r.Error, r.ExitStatus = err.Error(), exitCode(runError{err})
	}
	return r.WithLists()
}

func writeStats(path string, r worker.Record) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// reportReadErrors says which reads of the image failed while the command ran:
// the command saw EIO and may have hidden it.
func reportReadErrors(stderr io.Writer, st reader.Stats, restarts int64) {
	for _, e := range st.Errors {
		// The path is the image's, the reason partly the store's: neither may write
		// on this terminal.
		fmt.Fprintf(stderr, "quarry: a read of \"%s\" failed with EIO: \"%s\"\n", oneLine(e.Path), oneLine(e.Err))
	}
	if more := st.FailedReads - int64(len(st.Errors)); more > 0 {
		known := ""
		if restarts > 0 {
			known = "; what was known of them may have gone with a reader that ended"
		}
		fmt.Fprintf(stderr, "quarry: %d more reads of the image failed with EIO%s\n", more, known)
	}
}
