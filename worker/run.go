package worker

import (
	"context"
	"errors"
	"io"
	"os"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
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
	Coming     <-chan uint32    // chunks that the reader has got, by number, to be read ahead of the command; nil for none
	ended      func()           // called when it has ended
	given      bool             // the program is none of the image's: it comes by a descriptor
}

// Ended says how a command ended.
type Ended struct {
	Started     bool          // it ran; else Status says nothing
	Status      int           // its exit status, 128+n when signal n ended it
	FirstOutput time.Duration // from Run's start; 0 when there was none
	Duration    time.Duration // from Run's start to the command's end; 0 when it did not run
	Stats       reader.Stats  // what the run cost, see reader.Stats
	Unknown     string        // why Stats are not those of the whole run, "" when they are
	Restarts    int64         // how often the mount had to find another reader
}

var (
	// ErrNotExecutable says that the command exists and cannot be executed.
	ErrNotExecutable = errors.New("not executable")
	// ErrCommandNotFound says that the image has no such command.
	ErrCommandNotFound = errors.New("not found in the image")
	// ErrPlatform says that the image is for another machine.
	ErrPlatform = errors.New("image is for another platform")
)

// Run runs one command in a new sandbox of the image and waits for its end; the
// end of ctx kills it, and its cause is the error. A non-zero exit is not an error;
// errors mean that the command did not run to its end, or that what it read may
// have been wrong. Nothing of the sandbox is left in either case.
func (w *Worker) Run(ctx context.Context, im *folder.Image, c Command) (end Ended, err error) {
	started := time.Now()
	if err := runsHere(im); err != nil {
		return end, err
	}
	mt, err := w.acquireForSandbox(ctx, im)
	if err != nil {
		return end, orCause(ctx, err)
	}
	cleanup := context.WithoutCancel(ctx)
	defer w.supervised(cleanup)() // ends last: what follows waits for reads of the mount
	defer func() { err = errors.Join(err, mt.Release(cleanup)) }()
	from := started
	if t := timeline.Of(ctx); t != nil {
		from = t.Began() // the reader may have been at work before Run
	}
	watch, err := w.watchReads(ctx, im, mt, from)
	if err != nil {
		return end, orCause(ctx, err)
	}
	if mt.made { // else others have read it
		defer readAhead(ctx, im, mt.Root(), c.Coming)()
	}
	first := newFirstWrite(started)
	tell := c.Started
	c.ended = func() { end.Duration = time.Since(started) }
	c.Started = func() {
		end.Started = true
		first.running = time.Now()
		if tell != nil {
			tell()
		}
	}
	c.Stdout, c.Stderr = first.wrap(c.Stdout), first.wrap(c.Stderr)
	end.Status, err = w.runIn(ctx, im, mt, c)
	end.FirstOutput = first.after()
	first.addTo(timeline.Of(ctx))
	readErr := watch.end(cleanup, &end)
	return end, errors.Join(err, readErr)
}

// orCause puts the reason why ctx ended in the place of what that caused.
func orCause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// runIn makes the sandbox, runs the command and removes the sandbox.
func (w *Worker) runIn(ctx context.Context, im *folder.Image, mt *Mount, c Command) (status int, err error) {
	looked := timeline.Begin(ctx, timeline.Lookup)
	spec, err := specOf(ctx, im, mt.Root(), c)
	looked()
	if err != nil {
		return 0, err
	}
	made := timeline.Begin(ctx, timeline.Sandbox)
	b, err := w.create(ctx)
	if err != nil {
		return 0, orCause(ctx, err)
	}
	defer func() {
		defer timeline.Begin(ctx, timeline.Remove)()
		err = errors.Join(err, b.remove())
	}()
	if err := writeSpec(b.dir, spec); err != nil {
		return 0, err
	}
	made()
	return b.run(ctx, c)
}

// specOf is newSpec for a store that does not answer: it reads the image.
func specOf(ctx context.Context, im *folder.Image, root string, c Command) (*specs.Spec, error) {
	return leaveBehind(ctx, func() (*specs.Spec, error) { return newSpec(im, root, c) })
}

// firstWrite notes when the first byte was written to any of its writers.
type firstWrite struct {
	start   time.Time
	running time.Time // the command runs
	ns      atomic.Int64
}

func newFirstWrite(start time.Time) *firstWrite { return &firstWrite{start: start} }

func (f *firstWrite) after() time.Duration { return time.Duration(f.ns.Load()) }

// addTo notes the wait for the first output, which may have come before runsc
// said that the command runs.
func (f *firstWrite) addTo(t *timeline.Timeline) {
	if after := f.after(); after > 0 && !f.running.IsZero() {
		at := f.start.Add(after)
		from := f.running
		if at.Before(from) {
			from = at
		}
		t.Add(timeline.FirstOutput, from, at)
	}
}

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
