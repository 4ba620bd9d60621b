// Command quarry-shim owns the kernel side of one mounted image: it attaches an
// export of the reader and serves it until it is unmounted. It is a process of
// its own so that nothing else can take a mount down with it. As quarry-shim
// holder it keeps one sandbox in the same way.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
	"quarry/worker/holder"
)

const (
	// startTimeout is for the reader to answer and the image to be mounted.
	startTimeout = time.Minute
	// detachTimeout is how long a busy mount may hold up the end.
	detachTimeout = 15 * time.Second
	// gcPercent keeps the heap, a few hundred KiB of requests and one read buffer,
	// far below the 8 MiB a shim may hold. memoryLimit is for what nobody has thought
	// of. The runtime counts memory that it has mapped and not touched, which is
	// 6 MiB in a process that has done nothing: near that it would do nothing but
	// collect.
	gcPercent   = 25
	memoryLimit = 16 << 20
	// processors is for two threads that wait in the kernel, for requests and for
	// replies, and two more: Go takes a waiting thread's processor away after
	// 20 µs when no other is free, and the thread then waits for one after each wait.
	processors = 4
)

func main() {
	// A closed terminal or pipe is no reason to end; SIGTERM is.
	signal.Ignore(syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	if len(os.Args) >= 2 && os.Args[1] == holder.Role {
		hold()
		return
	}
	// Where the kernel gives huge pages to who does not ask for them, as Debian's does, a
	// shim would hold some MiB more than it uses. A holder keeps them: what it starts would
	// have none either.
	_ = unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "quarry-shim:", err)
		fmt.Fprintln(os.Stdout, "quarry-shim:", err) // the log may be on a disk that is full
		os.Exit(exitCode(err))
	}
}

// hold keeps a sandbox. Not even SIGTERM ends it, which whoever ends the worker may
// send to all that it started: the sandbox's end does.
func hold() {
	signal.Ignore(syscall.SIGTERM)
	runtime.GOMAXPROCS(holderProcessors)
	debug.SetGCPercent(gcPercent)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := holder.Main(os.Stdin, os.Stdout, log); err != nil {
		fmt.Fprintln(os.Stderr, "quarry-shim holder:", err)
		os.Exit(1)
	}
}

// holderProcessors is for the copy of output beside a call.
const holderProcessors = 2

func exitCode(err error) int {
	switch {
	case errors.Is(err, errUsage):
		return 2
	case errors.Is(err, errNoReader):
		return attach.ExitNoReader
	}
	return 1
}

// errUsage says that the command line was wrong.
var errUsage = errors.New("usage")

// options are the command line's.
type options struct {
	socket    string
	export    string
	size      int64
	dir       string
	mode      attach.Mode
	dataOff   int64
	split     bool
	noACL     bool
	readAhead int
	deadline  time.Duration
	logFile   string
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("quarry-shim", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.socket, "socket", "", "unix `socket` of the reader")
	f.StringVar(&o.export, "export", "", "`name` of the export")
	f.Int64Var(&o.size, "size", 0, "size of the export in `bytes`; another size is refused")
	f.StringVar(&o.dir, "dir", "", "`folder` of the mount, existing, mode 0700: the image is mounted at its root/")
	mode := f.String("attach", string(attach.ModeAuto), "`how` to attach: "+attach.Modes)
	f.Int64Var(&o.dataOff, "data-offset", 0, "where the data begins in the export, in `bytes`; 0 for none")
	f.BoolVar(&o.split, "split", false, "attach bootstrap and data as two devices, as kernels before Linux 6.4 need")
	f.BoolVar(&o.noACL, "no-acl", false, "mount without POSIX ACLs")
	f.IntVar(&o.readAhead, "read-ahead", attach.DefaultReadAhead, "read-ahead of the device in `KiB`, 0 for none")
	f.DurationVar(&o.deadline, "deadline", attach.DefaultDeadline, "answer a read with EIO after this `time`")
	f.StringVar(&o.logFile, "log", "", "append the log to `file` instead of stderr")
	if err := f.Parse(args); err != nil {
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	if o.socket == "" || o.export == "" || o.size <= 0 || o.dir == "" || f.NArg() > 0 {
		return o, fmt.Errorf("%w: --socket, --export, --size and --dir are needed, and nothing else", errUsage)
	}
	if o.readAhead < 0 || o.readAhead > attach.MaxReadAhead || o.deadline <= 0 {
		return o, fmt.Errorf("%w: --read-ahead and --deadline must not be negative, and read-ahead not beyond %d", errUsage, attach.MaxReadAhead)
	}
	var err error
	if o.mode, err = attach.ParseMode(*mode); err != nil {
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	return o, nil
}

// run serves until ctx ends or the image is unmounted.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	runtime.GOMAXPROCS(processors)
	debug.SetGCPercent(gcPercent)
	debug.SetMemoryLimit(memoryLimit)
	// First of all: who wants this process gone finds it by the lock. Whoever made
	// the folder may have removed it again; then there is nothing to do.
	lock, err := attach.TakeLock(ctx, o.dir)
	if err != nil {
		return err
	}
	defer lock.Release()
	log, closeLog, err := openLog(o.logFile, stderr)
	if err != nil {
		return err
	}
	defer closeLog()
	shield(ctx, log)
	counts, err := attach.NewCounts(lock)
	if err != nil {
		return err
	}
	defer counts.Close()
	startCtx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	dialled := attach.Step{Name: attach.StepLink, Began: time.Now()}
	link, err := connect(startCtx, o, counts, log)
	if err != nil {
		return err
	}
	defer link.close()
	dialled.Ended = time.Now()
	readAhead := o.readAhead
	if readAhead == 0 {
		readAhead = -1 // Config's word for none
	}
	a, err := attach.Attach(startCtx, attach.Config{
		Dir: o.dir, Lock: lock, Mode: o.mode, Source: link.reads, DataOff: o.dataOff, Split: o.split, NoACL: o.noACL, ReadAhead: readAhead, Deadline: o.deadline, Log: log,
	})
	if err != nil {
		return link.explain(err)
	}
	return serve(ctx, o, a, append([]attach.Step{dialled}, a.Steps()...), log, stdout)
}

// serve says that the image is mounted and detaches it in the end. The folder
// is this process's alone by now, so that the record in it can be its own.
func serve(ctx context.Context, o options, a *attach.Attachment, steps []attach.Step, log *slog.Logger, stdout io.Writer) (err error) {
	defer func() {
		detachCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachTimeout)
		defer cancel()
		err = errors.Join(err, a.Detach(detachCtx))
	}()
	start, err := attach.ProcessStart(os.Getpid())
	if err != nil {
		return err
	}
	state := attach.State{
		PID: os.Getpid(), Start: start, Phase: attach.PhaseMounted,
		Socket: o.socket, Export: o.export, Size: o.size, Attach: a.Mode(), Device: a.Device(), Root: a.Root(), Steps: steps,
	}
	if err := a.WriteState(state); err != nil {
		return err
	}
	log.InfoContext(ctx, "image mounted", "export", o.export, "attach", a.Mode(), "device", a.Device(), "root", a.Root())
	fmt.Fprintln(stdout, "ready") // who asked may be gone; the mount is not
	select {
	case <-ctx.Done():
		log.InfoContext(ctx, "stopping", "reason", "SIGTERM")
	case <-a.Gone():
		log.InfoContext(ctx, "stopping", "reason", "unmounted or removed")
	}
	state.Phase = attach.PhaseStopping
	return a.WriteState(state)
}

func openLog(path string, stderr io.Writer) (*slog.Logger, func(), error) {
	if path == "" {
		return slog.New(slog.NewTextHandler(stderr, nil)), func() {}, nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, err
	}
	return slog.New(slog.NewTextHandler(f, nil)), func() { f.Close() }, nil
}

// shield asks the kernel to kill any other process first when memory is short:
// this one holds little, and its death ends every reader of the mount.
func shield(ctx context.Context, log *slog.Logger) {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		log.WarnContext(ctx, "shim can be killed when memory is short", "err", err)
	}
}
