package jobs

import (
	"context"
	"fmt"
	"time"
)

// tellEvery is how often watchers are told of the progress of one step.
const tellEvery = 200 * time.Millisecond

// Watch follows one job, or all. What changes faster than its owner asks is told
// as it is when asked, so that a slow one misses steps and never an end.
type Watch struct {
	q    *Queue
	id   string        // "": all jobs
	wake chan struct{} // has room for one

	// mu of the queue guards these.
	order   []string // jobs that have changed, the longest ago first
	pending map[string]bool
}

// Watch follows the job of that id, or all jobs when it is "". The first told are
// the job, or those that are active. Close it. Errors: ErrUnknown, ErrWatchers.
func (q *Queue) Watch(id string) (*Watch, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.watchers) >= maxWatchers {
		return nil, fmt.Errorf("%w: %d, at most as many are served", ErrWatchers, len(q.watchers))
	}
	if id != "" && q.jobs[id] == nil {
		return nil, fmt.Errorf("%w: %s", ErrUnknown, id)
	}
	w := &Watch{q: q, id: id, wake: make(chan struct{}, 1), pending: map[string]bool{}}
	q.watchers[w] = struct{}{}
	for _, j := range q.jobs {
		if id == "" && j.rec.State.Active() || id == j.id {
			w.tell(j.id)
		}
	}
	return w, nil
}

// Close ends the watch.
func (w *Watch) Close() {
	w.q.mu.Lock()
	defer w.q.mu.Unlock()
	delete(w.q.watchers, w)
}

// tell notes a change. mu is held.
func (w *Watch) tell(id string) {
	if w.pending[id] {
		return
	}
	w.pending[id] = true
	w.order = append(w.order, id)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Next waits for a job that has changed since it was told, and returns it as it is
// now. Errors: ctx's.
func (w *Watch) Next(ctx context.Context) (Status, error) {
	for {
		if st, ok := w.take(); ok {
			return st, nil
		}
		select {
		case <-ctx.Done():
			return Status{}, ctx.Err()
		case <-w.wake:
		}
	}
}

func (w *Watch) take() (Status, bool) {
	w.q.mu.Lock()
	defer w.q.mu.Unlock()
	for len(w.order) > 0 {
		id := w.order[0]
		w.order = w.order[1:]
		delete(w.pending, id)
		if j := w.q.jobs[id]; j != nil { // else it was forgotten meanwhile
			return j.status(), true
		}
	}
	return Status{}, false
}

// changed tells watchers of a job. mu is held.
func (q *Queue) changed(j *job) {
	q.figures()
	for w := range q.watchers {
		if w.id == "" || w.id == j.id {
			w.tell(j.id)
		}
	}
}

// progress notes how far a job is, and tells watchers of a new step at once and of
// the same one now and then.
func (q *Queue) progress(j *job, p Progress) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.cfg.Now()
	same := j.progress != nil && j.progress.Step == p.Step && j.progress.Item == p.Item && p.Done < p.Total
	j.progress = &p
	if same && now.Sub(j.told) < tellEvery {
		return
	}
	j.told = now
	q.changed(j)
}

// figures sets the gauges. mu is held, or nobody else has the queue yet.
func (q *Queue) figures() {
	q.cfg.Metrics.queued.Set(float64(q.active - q.running))
	q.cfg.Metrics.running.Set(float64(q.running))
}
