// Package timeline notes when the steps of a run began and ended. It travels in
// a context, so that a step is timed where it is done, by whoever does it.
package timeline

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"
)

// MaxSteps bounds what one timeline keeps: a run has some fifteen steps, and each
// may come several times when others are in the way.
const MaxSteps = 128

// The steps of a run. Those of a shim are parts of Shim; FirstOutput goes from
// Runsc's end to the first byte of output, beside Command.
const (
	Sweep       = "sweep"        // clean up after killed commands
	Store       = "store"        // make sure that a server of the data folder answers
	Local       = "local"        // verify the copy of the image that is here, if any
	Start       = "start"        // statements and content, one request to the store
	Save        = "save"         // keep the content
	Lock        = "lock"         // wait for others that mount or unmount the image
	Reader      = "reader"       // make sure that a reader answers
	Shim        = "shim"         // start a shim, which attaches and mounts the image
	ShimLink    = "shim_link"    // it connects to the reader, which opens the image
	ShimAttach  = "shim_attach"  // it binds the export to a block device and mounts it
	ShimMount   = "shim_mount"   // its mount(2), which reads the superblock
	Probe       = "probe"        // see that an image that is mounted already answers
	ReadAhead   = "read_ahead"   // have the kernel read the chunks that came, beside the others
	Figures     = "figures"      // ask the reader what the image cost
	Lookup      = "lookup"       // find the command and its user inside the image
	Sandbox     = "sandbox"      // make the sandbox's folder and configuration
	Runsc       = "runsc"        // create and start the sandbox
	FirstOutput = "first_output" // the command's first byte
	Command     = "command"      // the command, to its end
	Remove      = "remove"       // remove the sandbox
	Release     = "release"      // give the mount back; the last one unmounts it
)

// Step is one step of a run, or of a shim's start. Several may go on at once.
type Step struct {
	Name  string  `json:"step"`
	Start float64 `json:"start_ms"` // since the timeline's begin
	Took  float64 `json:"took_ms"`
}

// Timeline collects the steps of one run. Safe for concurrent use; a nil one
// collects nothing.
type Timeline struct {
	began time.Time

	mu    sync.Mutex // guards steps
	steps []Step
}

// New returns a timeline that begins at a moment.
func New(began time.Time) *Timeline { return &Timeline{began: began} }

// Began is the moment that Step.Start counts from.
func (t *Timeline) Began() time.Time { return t.began }

// Add notes a step that is over. Past MaxSteps it is dropped.
func (t *Timeline) Add(name string, began, ended time.Time) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.steps) < MaxSteps {
		t.steps = append(t.steps, Step{Name: name, Start: Millis(began.Sub(t.began)), Took: Millis(ended.Sub(began))})
	}
}

// Steps returns the steps that are over, by their begin; of those that began
// together the longer one, which the other is a part of, comes first.
func (t *Timeline) Steps() []Step {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	out := slices.Clone(t.steps)
	slices.SortStableFunc(out, func(a, b Step) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(b.Took, a.Took))
	})
	return out
}

// Covered returns how much of the time up to end, both in milliseconds since the
// begin, lies in at least one of the steps, which are as Steps returns them.
func Covered(steps []Step, end float64) float64 {
	var sum, upTo float64
	for _, s := range steps {
		from, to := max(s.Start, upTo), min(s.Start+s.Took, end)
		if to > from {
			sum += to - from
			upTo = to
		}
	}
	return sum
}

// Millis is a time as reports show it: to the microsecond.
func Millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

type key struct{}

// With returns a context in which Begin notes steps in t.
func With(ctx context.Context, t *Timeline) context.Context {
	return context.WithValue(ctx, key{}, t)
}

// Of returns the timeline of a context, nil when it has none.
func Of(ctx context.Context) *Timeline {
	t, _ := ctx.Value(key{}).(*Timeline)
	return t
}

// Begin begins a step in the context's timeline; the step ends when the returned
// function is called.
func Begin(ctx context.Context, name string) (end func()) {
	t := Of(ctx)
	if t == nil {
		return func() {}
	}
	began := time.Now()
	return func() { t.Add(name, began, time.Now()) }
}
