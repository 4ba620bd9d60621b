package worker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"quarry/internal/proc"
)

// Command is what to run in an image; zero fields mean what the image's config
// says.
type Command struct {
	Args       []string // replace the image's Cmd and follow its Entrypoint
	Entrypoint []string // replaces the image's Entrypoint; its Cmd is then dropped
	Env        []string // K=V, over the image's own
	WorkDir    string
	User       string // user[:group], names or numbers, looked up inside the image
	Terminal   bool   // give the command a pty; Stdin must be a terminal
	Stdin      io.Reader
	Stdout     io.Writer
	Stderr     io.Writer
	Signals    <-chan os.Signal // forwarded to the command
	Started    func()           // called when the command runs, if not nil
	Timeout    time.Duration    // kill the command after that long; 0 is never
}

// Ended says how a command ended.
type Ended struct {
	Status      int           // its exit status, 128+n when signal n ended it
	FirstOutput time.Duration // from Run's start; 0 when there was none
	Duration    time.Duration
	Stats       ImageStats // what the run cost, see ImageStats
}

var (
	// ErrTimeout says that the command was killed by its own Timeout.
	ErrTimeout = errors.New("timed out")
	// ErrNotExecutable says that the command exists and cannot be executed.
	ErrNotExecutable = errors.New("not executable")
	// ErrCommandNotFound says that the image has no such command.
	ErrCommandNotFound = errors.New("not found in the image")
	// ErrPlatform says that the image is for another machine.
	ErrPlatform = errors.New("image is for another platform")
)

// Run runs one command in a new sandbox of the image and waits for its end. A
// non-zero exit is not an error; errors mean that the command did not run to
// its end. Nothing of the sandbox is left in either case.
func (w *Worker) Run(ctx context.Context, im *Image, c Command) (end Ended, err error) {
	started := time.Now()
	if err := runsHere(im); err != nil {
		return end, err
	}
	mt, err := w.Acquire(ctx, im)
	if err != nil {
		return end, err
	}
	cleanup := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, mt.Release(cleanup)) }()
	before, err := w.Dir.Stats(ctx, im.ID)
	if err != nil {
		return end, err
	}
	spec, err := newSpec(im, mt.Root(), c)
	if err != nil {
		return end, err
	}
	dir, err := w.create(ctx)
	if err != nil {
		return end, err
	}
	defer func() { err = errors.Join(err, w.remove(cleanup, dir)) }()
	if err := writeSpec(dir, spec); err != nil {
		return end, err
	}
	first := newFirstWrite(started)
	c.Stdout, c.Stderr = first.wrap(c.Stdout), first.wrap(c.Stderr)
	b := &sandbox{w: w, dir: dir, id: filepath.Base(dir)}
	end.Status, err = b.run(ctx, c)
	end.Duration, end.FirstOutput = time.Since(started), first.after()
	after, statErr := w.Dir.Stats(cleanup, im.ID)
	if statErr == nil && after.Opening != before.Opening {
		statErr = errors.New("the reader was replaced during the run")
	}
	if statErr != nil {
		// The reads that failed with a reader are counted nowhere, so the
		// command's result must not pass as a clean run.
		return end, errors.Join(err, fmt.Errorf("reads of the image may have failed: %w", statErr))
	}
	end.Stats = after.since(before)
	return end, err
}

// since subtracts an earlier reading. With several sandboxes of one image at
// once the traffic of all of them is in it: they share the mount.
func (a ImageStats) since(b ImageStats) ImageStats {
	a.Requests -= b.Requests
	a.WireBytes -= b.WireBytes
	a.ChunkBytes -= b.ChunkBytes
	a.DeviceBytes -= b.DeviceBytes
	a.FailedReads -= b.FailedReads
	a.Errors = a.Errors[min(len(a.Errors), len(b.Errors)):]
	return a
}

// create makes a sandbox folder that names its owner.
func (w *Worker) create(ctx context.Context) (string, error) {
	l, err := proc.TakeLock(ctx, w.Dir.sandboxLock())
	if err != nil {
		return "", err
	}
	defer l.Unlock()
	owner, err := self()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(w.Dir.path, "sandboxes", strings.ToLower(rand.Text()))
	for _, sub := range []string{"", "runsc", "upper"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			return "", err
		}
	}
	if err := writeJSON(filepath.Join(dir, "owner.json"), owner); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// remove ends a sandbox, whatever is left of it, and deletes its folder.
func (w *Worker) remove(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	state, err := filepath.Glob(filepath.Join(dir, "runsc", "*.state"))
	if err != nil {
		return err
	}
	if len(state) > 0 {
		b := &sandbox{w: w, dir: dir, id: filepath.Base(dir)}
		if out, err := b.runsc(ctx, "delete", "--force", b.id).CombinedOutput(); err != nil {
			return fmt.Errorf("delete sandbox %s: %w: %s", b.id, err, out)
		}
	}
	return os.RemoveAll(dir)
}

type sandbox struct {
	w   *Worker
	dir string
	id  string
	pid int // of the Sentry, once started
}

// goferPID reads the number of the sandbox's gofer from runsc's state.
func (b *sandbox) goferPID() (int, error) {
	states, err := filepath.Glob(filepath.Join(b.dir, "runsc", "*.state"))
	if err != nil || len(states) != 1 {
		return 0, fmt.Errorf("%d runsc state files in %s, want 1: %w", len(states), b.dir, err)
	}
	var state struct {
		GoferPID int `json:"goferPid"`
	}
	if err := readJSON(states[0], &state); err != nil {
		return 0, err
	}
	return state.GoferPID, nil
}

func readPID(path string) (int, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(raw)))
}

// runsc returns a call of runsc with this sandbox's own state folder.
func (b *sandbox) runsc(ctx context.Context, args ...string) *exec.Cmd {
	global := []string{
		"--root", filepath.Join(b.dir, "runsc"), "--log", filepath.Join(b.dir, "runsc.log"),
		"--platform", "systrap", "--network", "none", "--ignore-cgroups",
		"--host-uds", "none", "--allow-suid",
		"--overlay2", "root:dir=" + filepath.Join(b.dir, "upper"),
	}
	return exec.CommandContext(ctx, b.w.Runsc, append(global, args...)...)
}

// run starts the command, copies its output and waits for it.
func (b *sandbox) run(ctx context.Context, c Command) (int, error) {
	streams, err := newStdio(b.dir, c)
	if err != nil {
		return 0, err
	}
	defer streams.close()
	if err := b.start(ctx, streams); err != nil {
		return 0, err
	}
	if c.Started != nil {
		c.Started()
	}
	var g errgroup.Group
	running, ended := context.WithCancel(context.WithoutCancel(ctx))
	status := 0
	g.Go(streams.copyOutput)
	g.Go(func() (err error) {
		defer ended()
		status, err = b.wait()
		return err
	})
	var killed error
	g.Go(func() error {
		killed = b.supervise(ctx, running, c)
		return nil
	})
	err = g.Wait()
	if killed != nil {
		return status, killed
	}
	return status, err
}

// start creates and starts the sandbox; what runsc itself prints on a failed
// start becomes the error.
func (b *sandbox) start(ctx context.Context, streams *stdio) error {
	// The Sentry outlives runsc run; it becomes a child of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	pidFile := filepath.Join(b.dir, "pid")
	args := []string{"run", "--detach", "--pid-file", pidFile, "--bundle", b.dir}
	args = append(args, streams.runArgs()...)
	cmd := b.runsc(ctx, append(args, b.id)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = streams.guestFiles()
	streams.connect()
	err := cmd.Run()
	streams.closeGuest()
	if err == nil {
		if b.pid, err = readPID(pidFile); err != nil {
			return err
		}
		return streams.attach(ctx)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("runsc did not start the sandbox: %w: %s", err, b.failure())
}

// failure returns runsc's last word from its log.
func (b *sandbox) failure() string {
	raw, err := readBounded(filepath.Join(b.dir, "runsc.log"), maxJSON)
	if err != nil {
		return err.Error()
	}
	last := ""
	for line := range strings.Lines(string(raw)) {
		if _, msg, ok := strings.Cut(line, "FATAL ERROR: "); ok {
			last = strings.TrimSpace(msg)
		} else if strings.TrimSpace(line) != "" && last == "" {
			last = strings.TrimSpace(line)
		}
	}
	return last
}

// wait returns the command's exit status. The Sentry exits with it, and as this
// process is its subreaper nobody else can collect it. The gofer ends with the
// Sentry; until it is collected too, runsc would take it for running.
func (b *sandbox) wait() (int, error) {
	ws, err := reap(b.pid)
	if err != nil {
		return 0, fmt.Errorf("wait for sandbox %s: %w", b.id, err)
	}
	gofer, err := b.goferPID()
	if err == nil {
		_, err = reap(gofer)
	}
	if err != nil && !errors.Is(err, syscall.ECHILD) {
		return 0, fmt.Errorf("wait for the gofer of sandbox %s: %w", b.id, err)
	}
	if ws.Signaled() {
		return 128 + int(ws.Signal()), fmt.Errorf("sandbox %s was ended from outside by signal %d (%s)", b.id, ws.Signal(), ws.Signal())
	}
	return ws.ExitStatus(), nil
}

func reap(pid int) (syscall.WaitStatus, error) {
	var ws syscall.WaitStatus
	for {
		_, err := syscall.Wait4(pid, &ws, 0, nil)
		if !errors.Is(err, syscall.EINTR) {
			return ws, err
		}
	}
}

// supervise forwards signals and ends the command when its time is up or ctx
// ends. It returns when the command has ended, with the reason it was killed.
func (b *sandbox) supervise(ctx, ended context.Context, c Command) error {
	var timeout <-chan time.Time
	if c.Timeout > 0 {
		t := time.NewTimer(c.Timeout)
		defer t.Stop()
		timeout = t.C
	}
	for {
		select {
		case <-ended.Done():
			return nil
		case sig := <-c.Signals:
			if n, ok := sig.(syscall.Signal); ok {
				b.kill(ended, n)
			}
		case <-timeout:
			b.kill(ended, syscall.SIGKILL)
			return fmt.Errorf("the command %w after %s and was killed", ErrTimeout, c.Timeout)
		case <-ctx.Done():
			b.kill(ended, syscall.SIGKILL)
			return ctx.Err()
		}
	}
}

// killTimeout bounds the delivery of one signal.
const killTimeout = 10 * time.Second

// kill delivers a signal to the command; when that cannot be done and the
// command must end, the Sentry is killed.
func (b *sandbox) kill(running context.Context, sig syscall.Signal) {
	ctx, cancel := context.WithTimeout(running, killTimeout)
	defer cancel()
	if out, err := b.runsc(ctx, "kill", b.id, strconv.Itoa(int(sig))).CombinedOutput(); err != nil && running.Err() == nil {
		if sig == syscall.SIGKILL {
			syscall.Kill(b.pid, sig)
		}
		b.w.log().WarnContext(ctx, "signal not delivered", "sandbox", b.id, "signal", sig, "err", err, "runsc", string(out))
	}
}

// firstWrite notes when the first byte was written to any of its writers.
type firstWrite struct {
	start time.Time
	ns    atomic.Int64
}

func newFirstWrite(start time.Time) *firstWrite { return &firstWrite{start: start} }

func (f *firstWrite) after() time.Duration { return time.Duration(f.ns.Load()) }

func (f *firstWrite) wrap(w io.Writer) io.Writer {
	if w == nil {
		w = io.Discard
	}
	return writerFunc(func(p []byte) (int, error) {
		f.ns.CompareAndSwap(0, int64(time.Since(f.start)))
		return w.Write(p)
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
