package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Reducer is what a sandbox's Sentry does by itself for memory; *sentry.Client is one.
type Reducer interface {
	// Reduce gives back memory that the Sentry can do without; with wait it returns when
	// that is done.
	Reduce(ctx context.Context, wait bool) error
}

// Sandbox is one that waits.
type Sandbox struct {
	ID     string
	Group  *Group
	Memory *File   // of the guest
	Sentry Reducer // nil: it is not asked
	// Images opens the files of the image that it has used, as OpenImages does; nil: there
	// are none. It is called before the first byte is taken; the files are closed when
	// they are brought back.
	Images func(context.Context) []*File
	// Processes lists the sandbox's: what they have mapped of Memory is what is brought
	// back, and what they use always is mapped again. nil: all of it is brought back, and
	// nothing mapped.
	Processes func() ([]int, error)
	// Away says that memory may have been taken before Add, by a worker that has ended:
	// what is away is brought back also when nothing more is taken.
	Away bool
}

const (
	// reduceTime bounds what the Sentry may take to give back its caches: its garbage
	// collector takes some 10 ms, and it is not trusted to answer at all.
	reduceTime = 500 * time.Millisecond
	// lead is how long before a sandbox is expected to wake its memory is left alone:
	// taking it takes about as long as it would have been of use.
	lead = time.Second
	// dry is how long a sandbox is left alone that gave less than it was asked for: the
	// rest of its memory is in use, or swap is full.
	dry = 10 * time.Second
	// maxOpen bounds the files of images that are open for all sandboxes together. Pages
	// of the rest come back when they are read.
	maxOpen = 8192
)

// Waiting keeps the sandboxes of a worker that are paused, and takes memory from those
// that will wait longest. Its methods may be called at once. The zero value is empty.
type Waiting struct {
	Metrics *Metrics // nil counts for nobody; set before the first call

	open atomic.Int64 // files of images

	mu     sync.Mutex
	list   map[string]*waiter
	habits map[string]*habit
	rest   map[string]context.CancelFunc // ends what is still being brought back
}

// waiter is a sandbox that waits. What stands below mu belongs to who holds it.
type waiter struct {
	w      *Waiting
	s      Sandbox
	paused time.Time
	until  time.Time // zero is not known
	ctx    context.Context
	cancel context.CancelCauseFunc // ends a reclaim under way

	mu      sync.Mutex
	gone    bool // it wakes: nothing is taken any more
	reduced bool
	dry     time.Time // nothing is asked before
	data    []Range   // of the memory file, when something of it was taken
	habit   *habit
	spots   []spotAt // to be mapped when it wakes
	noted   bool
	most    int64   // bytes that it had together, in memory and in swap
	images  []Piece // what of the image was in memory before
}

var errWakes = errors.New("the sandbox wakes")

// Add says that a sandbox was paused, and until when it is expected to wait, if that is
// known. It must be paused: what is taken from one that runs comes back at once.
func (w *Waiting) Add(s Sandbox, paused, until time.Time) {
	n := &waiter{w: w, s: s, paused: paused, until: until}
	n.ctx, n.cancel = context.WithCancelCause(context.Background())
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.list == nil {
		w.list, w.rest, w.habits = map[string]*waiter{}, map[string]context.CancelFunc{}, map[string]*habit{}
	}
	if w.habits[s.ID] == nil {
		w.habits[s.ID] = &habit{}
	}
	n.habit = w.habits[s.ID]
	w.endRest(s.ID)
	w.Metrics.add(w.list[s.ID] == nil)
	w.list[s.ID] = n // one that was there has been paused twice, which nobody does
}

// endRest ends what is being brought back for a sandbox. Called with mu held.
func (w *Waiting) endRest(id string) {
	if end := w.rest[id]; end != nil {
		end()
		delete(w.rest, id)
	}
}

// take takes a sandbox out and waits until nobody reclaims from it.
func (w *Waiting) take(id string) *waiter {
	w.mu.Lock()
	n := w.list[id]
	delete(w.list, id)
	w.Metrics.remove(n != nil)
	w.endRest(id)
	w.mu.Unlock()
	if n == nil {
		return nil
	}
	n.cancel(errWakes)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gone = true
	return n
}

// Drop takes out a sandbox that is not to be brought back.
func (w *Waiting) Drop(id string) {
	if n := w.take(id); n != nil {
		n.forget()
	}
}

// Forget forgets a sandbox that has ended.
func (w *Waiting) Forget(id string) {
	w.Drop(id)
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.habits, id)
}

// Wake takes a sandbox out that is about to be resumed, ends a reclaim under way and
// brings back what was taken. When ctx ends first, the sandbox is to be resumed all the
// same, and the rest is brought back while it runs, until it is paused again or has
// ended. It is resumed whatever is returned: what is missing comes when the guest
// touches it. One that is not there needs nothing.
func (w *Waiting) Wake(ctx context.Context, id string) (Fetched, error) {
	n := w.take(id)
	if n == nil {
		return Fetched{}, nil
	}
	going, end := context.WithCancel(context.WithoutCancel(ctx))
	var m *mapper
	if len(n.spots) > 0 {
		m = newMapper(n.spots, n.s.Processes)
	}
	f := startFetch(going, n.taken(ctx), n.habit, m)
	got, err := f.wait(ctx)
	w.Metrics.woke(got, err)
	if !got.Rest {
		end()
		n.forget()
		return got, err
	}
	w.mu.Lock()
	w.endRest(id)
	w.rest[id] = end
	w.mu.Unlock()
	go func() { // ends with the fetch, which Add and Drop end
		<-f.done
		end()
		w.Metrics.rest(f.bytes.Load() - got.Bytes)
		n.forget()
	}()
	return got, err
}

// taken lists what a reclaim has taken, or was left without by others since.
func (n *waiter) taken(ctx context.Context) []Piece {
	var out []Piece
	if n.data == nil && n.s.Away && n.s.Memory != nil {
		n.data, _ = n.s.Memory.Data(ctx)
	}
	if n.data != nil {
		out = append(out, Piece{n.s.Memory, n.data})
	}
	out = append(out, n.images...)
	return out
}

// Took is what was taken from one sandbox.
type Took struct {
	ID string
	Freed
	Err error // why it was not more
}

// shares is how much of its memory each may be left without before the next takes more
// of all of them. The kernel takes first what was not used for long, so that half of
// every sandbox costs less when they wake than all of half of them.
var shares = []float64{0.5, 0.75, 1}

// Reclaim takes memory from sandboxes that wait until want bytes are free for others:
// from the most recently paused first, which will wait longest, and not from those that
// are expected to wake within a second; half of each, before it takes more of any. It
// returns what each gave. One that wakes meanwhile is left alone at once.
func (w *Waiting) Reclaim(ctx context.Context, want int64) []Took {
	var out []Took
	at := map[string]int{}
	for _, share := range shares {
		for _, n := range w.order(time.Now()) {
			if want <= 0 || ctx.Err() != nil {
				return out
			}
			f, err := n.reclaim(ctx, want, share)
			want -= f.Bytes()
			if errors.Is(err, errWakes) {
				err = nil
			}
			w.Metrics.took(f, err)
			if f.Bytes() == 0 && err == nil {
				continue
			}
			i, again := at[n.s.ID]
			if !again {
				i, at[n.s.ID] = len(out), len(out)
				out = append(out, Took{ID: n.s.ID})
			}
			out[i].Freed = out[i].plus(f)
			out[i].Err = errors.Join(out[i].Err, err)
		}
	}
	return out
}

// order lists who is asked, first to last.
func (w *Waiting) order(now time.Time) []*waiter {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []*waiter
	for _, n := range w.list {
		if n.until.IsZero() || n.until.Sub(now) > lead {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b *waiter) int {
		return cmp.Or(b.paused.Compare(a.paused), cmp.Compare(a.s.ID, b.s.ID))
	})
	return out
}

// reclaim takes want bytes, or what is left until the sandbox is without that share of
// its memory.
func (n *waiter) reclaim(ctx context.Context, want int64, share float64) (f Freed, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.gone {
		return Freed{}, errWakes
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(n.ctx, func() { cancel(errWakes) })()
	begun := time.Now()
	if begun.Before(n.dry) {
		return Freed{}, nil
	}
	held, err := n.s.Group.Held()
	if err != nil {
		return Freed{}, err
	}
	if want = min(want, n.left(held, share)); want <= 0 {
		return Freed{}, nil
	}
	defer func() {
		f.Took = time.Since(begun)
		if f.Bytes() < want && ctx.Err() == nil {
			n.dry = time.Now().Add(dry)
		}
	}()
	n.remember(ctx)
	f.Reduced, err = n.reduce(ctx)
	if f.Reduced >= want || ctx.Err() != nil {
		return f, err
	}
	swapped, more := n.s.Group.Reclaim(ctx, want-f.Reduced)
	f.Swapped = swapped
	if more != nil {
		err = errors.Join(err, fmt.Errorf("take memory of sandbox %s: %w", n.s.ID, more))
	}
	return f, err
}

// left is what may be taken until the sandbox is without that share of its memory.
func (n *waiter) left(h Held, share float64) int64 {
	if share >= 1 {
		return h.Own()
	}
	n.most = max(n.most, h.Own()+h.Swap) // where swap is not counted, it had that much
	return h.Own() - int64(float64(n.most)*(1-share))
}

// used is what of the guest's memory was touched since it was taken last; where that is
// not known, all of it. What is in swap already was not touched since it went there: it
// is left there.
func (n *waiter) used(ctx context.Context) []Range {
	if n.s.Processes != nil {
		pids, err := n.s.Processes()
		if err == nil {
			out, at, err := n.s.Memory.used(ctx, pids)
			if err == nil {
				n.spots = n.habit.look(at)
				return n.habit.first(out)
			}
		}
	}
	out, _ := n.s.Memory.Data(ctx) // without it the guest brings back what it touches
	return out
}

// remember notes what is to come back, before the first byte is taken.
func (n *waiter) remember(ctx context.Context) {
	if n.noted {
		return
	}
	n.noted = true
	if n.s.Memory != nil {
		n.data = n.used(ctx)
	}
	if n.s.Images == nil {
		return
	}
	for _, f := range n.s.Images(ctx) {
		if n.w.open.Add(1) > maxOpen || ctx.Err() != nil {
			n.w.open.Add(-1)
			f.Close()
			continue
		}
		var here []Range
		if st, err := f.f.Stat(); err == nil {
			here = f.Present(Range{0, st.Size()})
		}
		n.images = append(n.images, Piece{f, here})
	}
}

// forget closes the files of the image.
func (n *waiter) forget() {
	for _, p := range n.images {
		p.File.Close()
		n.w.open.Add(-1)
	}
	n.images = nil
}

// reduce has the Sentry drop its caches, once a pause.
func (n *waiter) reduce(ctx context.Context) (int64, error) {
	if n.reduced || n.s.Sentry == nil {
		return 0, nil
	}
	n.reduced = true
	before, err := n.s.Group.Held()
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, reduceTime)
	defer cancel()
	if err := n.s.Sentry.Reduce(ctx, true); err != nil {
		return 0, fmt.Errorf("have the Sentry of %s drop its caches: %w", n.s.ID, err)
	}
	after, err := n.s.Group.Held()
	return max(0, before.Own()-after.Own()), err
}
