package jobs

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/internal/rescue"
)

// lines is whose turn it is: one line for each repository, first come first
// served, and the repositories take turns, so that one with a thousand images
// holds up no other. A job that several repositories wait for stands in the line
// of each.
type lines struct {
	repos []string // those with a line; the next one's turn comes first
	of    map[string][]*job
}

// line puts a queued job at the end of the line of each repository that waits for
// it. mu is held.
func (q *Queue) line(j *job) {
	if q.lines.of == nil {
		q.lines.of = map[string][]*job{}
	}
	for _, n := range j.rec.Names {
		if j.waits[n.Repo] {
			continue
		}
		j.waits[n.Repo] = true
		if q.lines.of[n.Repo] == nil {
			q.lines.repos = append(q.lines.repos, n.Repo)
		}
		q.lines.of[n.Repo] = append(q.lines.of[n.Repo], j)
	}
	q.awake()
}

// awake lets workers look again. mu is held.
func (q *Queue) awake() {
	close(q.wake)
	q.wake = make(chan struct{})
}

// pick takes the next job whose turn it is, or says after how long there may be
// one; 0: when somebody pushes. mu is held.
func (q *Queue) pick() (next *job, wait time.Duration) {
	now := q.cfg.Now()
	for range len(q.lines.repos) {
		repo := q.lines.repos[0]
		var rest []*job
		for _, j := range q.lines.of[repo] {
			switch left := j.retryAt.Sub(now); {
			case j.rec.State != Queued: // another repository's turn took it
				delete(j.waits, repo)
			case next == nil && left <= 0:
				next = j
				delete(j.waits, repo)
			default:
				rest = append(rest, j)
				if left > 0 && (wait == 0 || left < wait) {
					wait = left
				}
			}
		}
		q.lines.repos = q.lines.repos[1:]
		if len(rest) == 0 {
			delete(q.lines.of, repo)
		} else {
			q.lines.of[repo] = rest
			q.lines.repos = append(q.lines.repos, repo)
		}
		if next != nil {
			return next, 0
		}
	}
	return nil, wait
}

// Serve does jobs until ctx ends, and returns when those it had begun have ended
// or are queued again. It is called once.
func (q *Queue) Serve(ctx context.Context) {
	var g errgroup.Group
	for range q.cfg.Workers {
		g.Go(func() error {
			for j := q.next(ctx); j != nil; j = q.next(ctx) {
				q.attempt(ctx, j)
			}
			return nil
		})
	}
	_ = g.Wait() // none of them fails: errors are the jobs'
}

// next waits for a job, which is running then; nil when ctx has ended.
func (q *Queue) next(ctx context.Context) *job {
	for ctx.Err() == nil {
		q.mu.Lock()
		j, wait := q.pick()
		if j != nil {
			j.rec.State = Running
			j.rec.Attempts++
			j.rev++
			q.running++
			q.changed(j)
		}
		wake := q.wake
		q.mu.Unlock()
		if j != nil {
			return j
		}
		var timer <-chan time.Time
		if wait > 0 {
			timer = time.After(wait)
		}
		select {
		case <-ctx.Done():
		case <-wake:
		case <-timer:
		}
	}
	return nil
}

// attempt does a job that is running. That it runs is durable first: should it end
// the program, the next one knows.
func (q *Queue) attempt(ctx context.Context, j *job) {
	var res Result
	err := q.save(ctx, j)
	if err == nil {
		q.mu.Lock()
		rec := j.rec
		q.mu.Unlock()
		err = rescue.Do(func() (err error) {
			res, err = q.cfg.Convert(ctx, rec, func(p Progress) { q.progress(j, p) })
			return err
		})
	}
	q.settle(ctx, j, res, err)
	q.logSaved(ctx, j)
	q.trim(ctx)
}

// settle notes how an attempt ended.
func (q *Queue) settle(ctx context.Context, j *job, res Result, err error) {
	var why *Reason
	if err != nil && ctx.Err() == nil {
		why = q.final(ctx, j, err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.running--
	switch {
	case err == nil:
		q.active--
		q.end(j, Done, &res, nil)
		q.cfg.Metrics.ended.WithLabelValues(string(Done)).Inc()
	case why != nil:
		q.active--
		q.end(j, Failed, nil, why)
		q.cfg.Metrics.ended.WithLabelValues(string(Failed)).Inc()
	default:
		q.again(ctx, j, err)
	}
	q.changed(j)
}

// final returns why another attempt cannot end better; a panic would come again.
func (q *Queue) final(ctx context.Context, j *job, err error) *Reason {
	if p, ok := errors.AsType[*rescue.Panic](err); ok {
		q.cfg.Log.ErrorContext(ctx, "panic in a conversion: please report it", "job", j.id, "panic", p.Value, "stack", string(p.Stack))
		return &Reason{Message: err.Error(), Blame: BlameStore}
	}
	why := q.cfg.Final(err)
	if why != nil {
		q.cfg.Log.WarnContext(ctx, "conversion failed", "job", j.id, "error", err)
	}
	return why
}

// again queues a job whose attempt did not end well but may the next time: the
// server ends, its disk is full, its bucket away. mu is held.
func (q *Queue) again(ctx context.Context, j *job, err error) {
	j.rec.State, j.rec.Doubted = Queued, true
	j.progress = nil
	j.rev++
	if ctx.Err() == nil {
		wait := q.cfg.Backoff * min(time.Duration(1)<<min(j.fails, 10), 100)
		wait = wait/2 + rand.N(wait/2+1)
		j.fails++
		j.retryAt = q.cfg.Now().Add(wait)
		j.rec.Reason = &Reason{Message: err.Error(), Blame: BlameStore}
		q.cfg.Metrics.retried.Inc()
		q.cfg.Log.WarnContext(ctx, "conversion is tried again", "job", j.id, "in", wait, "error", err)
	}
	q.line(j)
}
