package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"quarry/store"
	"quarry/store/chunk"
)

// perStore bounds the requests of one fetch at one store: one, and beside it a
// hedge or a second try of what the first brought badly.
const perStore = 2

// outageAttempts times Attempts bound what is asked of a store that gives no
// answer to this request and yet to others: with the default of 4, and 2 s
// between the later ones, 16 outlast the 10 s of an outage.
const outageAttempts = 4

// fetch is one batch on its way through the stores.
type fetch struct {
	s        *Stores
	fn       func(chunk.Digest, []byte, error) error
	attempts sync.WaitGroup
	calls    sync.Mutex    // held while fn runs
	wake     chan struct{} // has room for one: the loop must look again

	mu      sync.Mutex              // guards what follows
	asked   []chunk.Digest          // the open ones and some that are not, in the order asked
	open    map[chunk.Digest]*quest // without an answer
	running map[*attempt]bool
	calling bool      // fn runs: nothing can come, and it is no store's fault
	moved   time.Time // the last sign of life
	began   time.Time // not changed
	err     error     // ends it: fn's, or the context's
}

// quest is one chunk that is looked for.
type quest struct {
	digest  chunk.Digest
	at      *member // the store that is asked for it now, nil when none is
	flights int     // attempts that are asked for it: two with a hedge
	asked   bool    // by any attempt so far
	tries   []try   // by store
}

// try is what was done about a chunk at one store.
type try struct {
	asked int
	said  error     // the last failure
	final bool      // it is of no use to ask again
	after time.Time // not before

	answered bool // what it said was about this chunk
	exact    bool // ask in version 1, see brokenOff
}

// attempt is one request of a fetch.
type attempt struct {
	m      *member
	ds     []chunk.Digest
	hedge  bool
	n      int // how often the store was asked for one of ds, with this time
	cancel context.CancelFunc
	began  time.Time

	pending map[chunk.Digest]bool // of ds: open, and not answered by this attempt
	framed  bool                  // something came
	again   time.Time             // when what it failed to bring may be asked for at the same store
	won     bool                  // it brought a chunk
}

func (s *Stores) newFetch(ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) *fetch {
	f := &fetch{
		s: s, fn: fn, wake: make(chan struct{}, 1),
		asked: slices.Clone(ds), open: make(map[chunk.Digest]*quest, len(ds)),
		running: make(map[*attempt]bool), moved: time.Now(), began: time.Now(),
	}
	for _, d := range ds {
		f.open[d] = &quest{digest: d, tries: make([]try, len(s.members))}
	}
	return f
}

// run fetches until every chunk is answered, fn has failed, or ctx ends.
func (f *fetch) run(ctx context.Context) error {
	within, cancel := context.WithCancel(ctx)
	defer f.attempts.Wait()
	defer cancel()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return f.late(ctx)
		case <-f.wake:
		case <-timer.C:
		}
		next, done, err := f.step(within)
		if done {
			return err
		}
		timer.Reset(next)
	}
}

// step starts what can be started and gives up what cannot be had. It returns
// when to look again at the latest.
func (f *fetch) step(ctx context.Context) (next time.Duration, done bool, err error) {
	if ctx.Err() != nil {
		return 0, false, nil // run sees it
	}
	now := time.Now()
	f.mu.Lock()
	if f.err != nil {
		defer f.mu.Unlock()
		return 0, true, f.err
	}
	order := f.s.order(now)
	lost, next := f.plan(ctx, now, order)
	later := f.hedge(ctx, now, order)
	done = len(f.open) == 0 && len(lost) == 0 && (len(f.running) == 0 || later == 0)
	f.mu.Unlock()
	for _, q := range lost {
		if err := f.answer(q.digest, q.reasons()); err != nil {
			return 0, true, err
		}
	}
	if len(lost) > 0 {
		return 0, false, nil
	}
	return max(min(next, later), time.Millisecond), done, nil
}

// never is later than any request takes.
const never = time.Hour

// plan asks the stores for the chunks that are on their way from none. lost are
// those that no store has; they are no longer open.
func (f *fetch) plan(ctx context.Context, now time.Time, order []*member) (lost []*quest, next time.Duration) {
	next = never
	wanted := make([][]*quest, len(f.s.members))
	f.asked = slices.DeleteFunc(f.asked, func(d chunk.Digest) bool { return f.open[d] == nil })
	for _, d := range f.asked {
		q := f.open[d]
		if q.flights > 0 {
			continue
		}
		m := f.pick(q, now, order, nil)
		if m == nil {
			delete(f.open, d)
			lost = append(lost, q)
		} else if wait := q.tries[m.i].after.Sub(now); wait > 0 {
			next = min(next, wait)
		} else {
			wanted[m.i] = append(wanted[m.i], q)
		}
	}
	for _, m := range order {
		if qs := wanted[m.i]; len(qs) > 0 && f.runningAt(m) < perStore { // else the end of one of them wakes the loop
			f.begin(ctx, now, m, qs, false)
		}
	}
	return lost, next
}

// hedge asks a second store for chunks that are on their way and of which there
// has been no sign of life, or the same one when there is no other. It returns
// when there may be need of one, 0 for now.
func (f *fetch) hedge(ctx context.Context, now time.Time, order []*member) time.Duration {
	if len(f.running) == 0 {
		return never
	}
	after := time.Duration(0)
	for a := range f.running {
		after = max(after, f.s.hedgeAfter(a.m))
	}
	if f.calling {
		return after
	}
	if wait := f.moved.Add(after).Sub(now); wait > 0 {
		return wait
	}
	if len(f.open) == 0 {
		return 0 // nothing is wanted but the end of an answer
	}
	if f.s.cfg.HedgeAfter < 0 {
		return never
	}
	var to *member
	var qs []*quest
	for _, d := range f.asked {
		q := f.open[d]
		if q == nil || q.flights != 1 {
			continue
		}
		m := f.pick(q, now, order, q.at)
		if m == nil || (to != nil && m != to) || now.Before(q.tries[m.i].after) {
			continue
		}
		to = m
		qs = append(qs, q)
	}
	if to == nil || f.runningAt(to) >= perStore || !f.s.budget.spend() {
		return after
	}
	f.begin(ctx, now, to, qs, true)
	return after
}

// pick returns the store to ask next: one that was asked least, and of these the
// first in order. But is taken only when there is no other. nil: there is none.
func (f *fetch) pick(q *quest, now time.Time, order []*member, but *member) *member {
	var best *member
	for _, m := range order {
		t := q.tries[m.i]
		switch {
		case t.final:
		case t.asked >= f.s.cfg.Attempts && (t.answered || t.asked >= outageAttempts*f.s.cfg.Attempts || !m.wellSince(now.Add(-f.s.cfg.Outage))):
		case best == nil, best == but, m != but && t.asked < q.tries[best.i].asked:
			best = m
		}
	}
	return best
}

// reasons are what the stores said about a chunk that none has given.
func (q *quest) reasons() error {
	errs := make([]error, len(q.tries))
	for i, t := range q.tries {
		errs[i] = t.said
	}
	return joined(errs)
}

func (f *fetch) runningAt(m *member) int {
	n := 0
	for a := range f.running {
		if a.m == m {
			n++
		}
	}
	return n
}

// begin starts an attempt. Called with mu held.
func (f *fetch) begin(ctx context.Context, now time.Time, m *member, qs []*quest, hedge bool) {
	exact := false
	a := &attempt{m: m, hedge: hedge, began: now, pending: make(map[chunk.Digest]bool, len(qs))}
	for _, q := range qs {
		t := &q.tries[m.i]
		t.asked++
		a.n = max(a.n, t.asked)
		exact = exact || t.exact
		q.flights++
		if q.asked {
			f.s.again.Add(1)
		}
		q.asked = true
		if !hedge {
			q.at = m
		}
		a.ds = append(a.ds, q.digest)
		a.pending[q.digest] = true
	}
	f.running[a] = true
	f.moved = now
	m.asked()
	switch {
	case hedge:
		f.s.hedges.Add(1)
	default:
		f.s.budget.earn()
		if a.n > 1 {
			m.n.retries.Add(1)
		}
	}
	ctx, a.cancel = context.WithCancel(ctx)
	f.attempts.Go(func() { // ends with its request, which ends with ctx
		defer a.cancel()
		c := m.with(1, f.s.patience(m, a.n))
		err := c.ask(ctx, a.ds, exact, f.sign, func(d chunk.Digest, p []byte, err error) error {
			if err != nil {
				f.refuse(a, d, err)
				return nil
			}
			return f.take(a, d, p)
		})
		f.ended(ctx, a, err)
	})
}

// sign notes that bytes come.
func (f *fetch) sign() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.moved = time.Now()
}

// take gives a chunk to fn unless another attempt has brought it.
func (f *fetch) take(a *attempt, d chunk.Digest, p []byte) error {
	f.calls.Lock()
	defer f.calls.Unlock()
	if ok, err := f.claim(a, d); !ok {
		return err
	}
	return f.call(d, p, nil)
}

// claim closes the quest for a chunk that a has brought, and ends the attempts
// that owe nothing else.
func (f *fetch) claim(a *attempt, d chunk.Digest) (ok bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.frame(a)
	if f.err != nil {
		return false, f.err
	}
	if f.open[d] == nil {
		return false, nil
	}
	delete(f.open, d)
	for b := range f.running {
		if !b.pending[d] {
			continue
		}
		if delete(b.pending, d); len(b.pending) == 0 && b != a {
			b.cancel()
		}
	}
	if a.hedge && !a.won {
		f.s.hedgesWon.Add(1)
	}
	a.won = true
	if len(f.open) == 0 {
		f.signal()
	}
	return true, nil
}

// frame notes that an attempt was answered something. Called with mu held.
func (f *fetch) frame(a *attempt) {
	f.moved = time.Now()
	if !a.framed {
		a.framed = true
		a.m.wait(f.moved.Sub(a.began))
	}
}

// answer gives the error of a chunk to fn.
func (f *fetch) answer(d chunk.Digest, err error) error {
	f.calls.Lock()
	defer f.calls.Unlock()
	return f.call(d, nil, err)
}

// call calls fn. Called with calls held.
func (f *fetch) call(d chunk.Digest, p []byte, err error) error {
	f.mu.Lock()
	f.calling = true
	f.mu.Unlock()
	err = f.fn(d, p, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calling, f.moved = false, time.Now()
	if err != nil && f.err == nil {
		f.err = err
		f.signal()
	}
	return err
}

// refuse notes that a store has no good copy of a chunk, or not now.
func (f *fetch) refuse(a *attempt, d chunk.Digest, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.frame(a)
	delete(a.pending, d)
	a.m.count(func(s *StoreStats) {
		switch store.OutcomeOf(err) {
		case store.Corrupt:
			s.Corrupt++
		case store.Missing:
			s.Missing++
		}
	})
	if q := f.open[d]; q != nil {
		f.fail(q, a, time.Now(), err)
		q.tries[a.m.i].answered = true
	}
}

// fail notes the end of one flight of a quest. Called with mu held.
func (f *fetch) fail(q *quest, a *attempt, now time.Time, err error) {
	// What an attempt brought badly is asked for again together.
	if !a.again.After(now) {
		a.again = now.Add(f.s.backoff(a.n, err))
	}
	t := &q.tries[a.m.i]
	t.exact = t.exact || errors.As(err, new(brokenOff))
	t.said, t.final, t.after, t.answered = reason(a.m, err), hopeless(err), a.again, false
	if refused(err) && a.m.cfg.Token.renewable() && now.Sub(f.began) < renewWait {
		// Whoever renews the token is late: the next look at its file may find it.
		t.final, t.after = false, now.Add(renewLook)
		t.asked--
	}
	q.flights--
	for a := range f.running {
		if a.pending[q.digest] {
			q.at = a.m
		}
	}
	f.signal()
}

// ended notes the end of an attempt: what it has not answered must be asked for
// again, and its store has done well or not.
func (f *fetch) ended(ctx context.Context, a *attempt, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.signal()
	delete(f.running, a)
	gone := ctx.Err() != nil // others had the answers, or nobody wants them any more
	if err == nil && len(a.pending) > 0 {
		err = errNoBatch
	}
	now := time.Now() // one time for all, or a slow machine would ask for them one by one
	for d := range a.pending {
		if q := f.open[d]; q != nil && gone {
			q.flights--
		} else if q != nil {
			f.fail(q, a, now, err)
		}
	}
	switch {
	case gone:
		silent := !a.framed && now.Sub(a.began) >= f.s.hedgeAfter(a.m)
		if silent {
			a.m.wait(now.Sub(a.began)) // at least
		}
		a.m.left(now, silent)
	case errors.As(err, new(*stop)): // fn's
		a.m.left(now, false)
	case err != nil:
		a.m.failed(now, err)
	default:
		a.m.answered()
	}
}

// late ends a fetch whose context has ended. After a deadline, chunks of which
// there were bad copies have that error.
func (f *fetch) late(ctx context.Context) error {
	f.mu.Lock()
	if f.err == nil {
		f.err = ctx.Err()
	}
	var tried []*quest
	var silent []string
	for _, d := range f.asked {
		if q := f.open[d]; q != nil && q.reasons() != nil {
			delete(f.open, d)
			tried = append(tried, q)
		}
	}
	for _, m := range f.s.members {
		if f.runningAt(m) > 0 {
			silent = append(silent, m.String())
		}
	}
	f.mu.Unlock()
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return ctx.Err()
	}
	for _, q := range tried {
		if err := f.answer(q.digest, reasons{q.reasons(), ctx.Err()}); err != nil {
			return err
		}
	}
	if len(silent) == 0 {
		return ctx.Err()
	}
	return fmt.Errorf("%w: waiting for %s", ctx.Err(), strings.Join(silent, ", "))
}

// signal has the loop look again.
func (f *fetch) signal() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}
