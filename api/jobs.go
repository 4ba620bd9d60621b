package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
)

// TypeEvents is the media type of server-sent events.
const TypeEvents = "text/event-stream"

// MaxJobs is the number of jobs in one page of GET /v1/jobs: a job is 48 KiB at
// most, so a page is well below MaxJSON.
const MaxJobs = 50

// Job is one conversion.
type Job struct {
	ID       string       `json:"id"`
	Source   chunk.Digest `json:"source"`
	Platform string       `json:"platform,omitempty"` // of an image index: the one that is converted
	Names    []string     `json:"names"`              // REPO:TAG, or REPO, that wait for it; the newest last
	State    jobs.State   `json:"state"`
	Created  time.Time    `json:"created"`
	Ended    *time.Time   `json:"ended,omitempty"`
	Attempts int          `json:"attempts"`
	RetryAt  *time.Time   `json:"retry_at,omitempty"` // of what waits for another attempt
	Reason   *jobs.Reason `json:"reason,omitempty"`   // why the newest attempt did not end well
	Result   *jobs.Result `json:"result,omitempty"`
	Progress *Progress    `json:"progress,omitempty"` // of what is running
}

// JobsPage answers GET /v1/jobs, the newest first.
type JobsPage struct {
	Jobs []Job  `json:"jobs"`
	Next string `json:"next,omitempty"` // value of ?after= for the next page, "" on the last
}

// jobOf is a status as the contract shows it.
func jobOf(st jobs.Status) Job {
	j := Job{
		ID: st.ID(), Source: st.Source, Platform: st.Platform, State: st.State, Created: st.Created, Ended: st.Ended,
		Attempts: st.Attempts, Reason: st.Reason, Result: st.Result,
	}
	for _, n := range st.Names {
		j.Names = append(j.Names, n.String())
	}
	if !st.RetryAt.IsZero() {
		at := st.RetryAt.UTC()
		j.RetryAt = &at
	}
	if p := st.Progress; p != nil {
		j.Progress = &Progress{Step: p.Step, Item: p.Item, Done: p.Done, Total: p.Total, Unit: p.Unit}
	}
	return j
}

// JobError says what a job means for who asks for its image: that it is pending,
// or being converted, or why it failed. nil when it is done.
func JobError(ref image.Ref, st jobs.Status) error {
	details := map[string][]string{"job": {st.ID()}, "state": {string(st.State)}}
	switch st.State {
	case jobs.Queued:
		err := fmt.Errorf("%w: %s waits for its conversion", ErrPending, ref)
		if st.Reason != nil {
			err = fmt.Errorf("%w, which is tried again: %s", err, st.Reason.Message)
		}
		return &detailedError{err, details}
	case jobs.Running:
		return &detailedError{fmt.Errorf("%w: %s", ErrConverting, ref), details}
	case jobs.Failed:
		details["failure_blame"] = []string{st.Reason.Blame}
		if st.Reason.Layer != "" {
			details["layer"] = []string{st.Reason.Layer}
		}
		if st.Reason.Entry != "" {
			details["entry"] = []string{st.Reason.Entry}
		}
		fix := "push it again when it is mended"
		if st.Reason.Blame != jobs.BlameInput {
			fix = "push it again"
		}
		e := toError(fmt.Errorf("%w: %s has no image: %s (%s)", ErrImageFailed, ref, st.Reason.Message, fix))
		e.Details = details
		if st.Reason.Blame != jobs.BlameInput {
			e.Blame = BlameInfra
		}
		return e
	}
	return nil
}

func (h *Handler) queue() (*jobs.Queue, error) {
	if h.cfg.Jobs == nil {
		return nil, fmt.Errorf("%w: jobs", ErrNotOffered)
	}
	return h.cfg.Jobs, nil
}

// seen is a status as far as it is about repositories that the caller may see; false
// when none is.
func seen(st jobs.Status, visible func(repo string) bool) (jobs.Status, bool) {
	st.Names = slices.DeleteFunc(slices.Clone(st.Names), func(n jobs.Name) bool { return !visible(n.Repo) })
	return st, len(st.Names) > 0
}

func (h *Handler) serveJobs(w *response, r *http.Request, rt route) error {
	q, err := h.queue()
	if err != nil {
		return err
	}
	visible, err := h.visible(r)
	if err != nil {
		return err
	}
	f := rt.jobs
	f.Visible, f.After, f.Limit = visible, rt.after, min(rt.limit, MaxJobs)
	list, next := q.List(f)
	page := JobsPage{Jobs: []Job{}, Next: next}
	for _, st := range list {
		if st, ok := seen(st, visible); ok {
			page.Jobs = append(page.Jobs, jobOf(st))
		}
	}
	return writeJSON(w, http.StatusOK, page)
}

func (h *Handler) serveJob(w *response, r *http.Request, rt route) error {
	st, _, err := h.visibleJob(r, rt.job)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, jobOf(st))
}

// visibleJob returns a job of which the caller may see some name; another one is not
// there for him. id "" is no job, and none is looked for.
func (h *Handler) visibleJob(r *http.Request, id string) (st jobs.Status, visible func(repo string) bool, err error) {
	q, err := h.queue()
	if err != nil {
		return st, nil, err
	}
	if visible, err = h.visible(r); err != nil || id == "" {
		return st, visible, err
	}
	if st, err = q.Job(id); err != nil {
		return st, nil, err
	}
	st, ok := seen(st, visible)
	if !ok {
		return st, nil, fmt.Errorf("%w: %s", jobs.ErrUnknown, id)
	}
	return st, visible, nil
}

// eventsPause is what lies between two events of a stream, so that a busy queue
// and a fast client do not keep each other busy: what changes faster is told as it
// is then.
const eventsPause = 100 * time.Millisecond

// serveJobEvents sends what changes, of one job until it has ended, of all until
// the client goes. An event says all of its job, so none is needed to understand
// another, and a client that comes again misses nothing.
func (h *Handler) serveJobEvents(ctx context.Context, w *response, r *http.Request, rt route) error {
	_, _, err := h.visibleJob(r, rt.job)
	if err != nil {
		return err
	}
	watch, err := h.cfg.Jobs.Watch(rt.job)
	if err != nil {
		return err
	}
	defer watch.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer h.addStream(func() { cancel(errClosing) })()
	w.Header().Set("Content-Type", TypeEvents)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if err := w.flush(); err != nil {
		return err
	}
	for {
		st, err := nextEvent(ctx, watch)
		// What a token allows counts as long as the token does.
		visible, verr := h.visible(r)
		if verr != nil {
			return verr
		}
		switch {
		case errors.Is(err, errNothing):
			err = writeEvent(w, ": alive\n\n")
		case errors.Is(err, errClosing):
			return nil
		case err == nil:
			if shown, ok := seen(st, visible); ok {
				err = sendJob(w, jobOf(shown))
			}
		}
		if err != nil {
			return err
		}
		if rt.job != "" && st.State != "" && !st.State.Active() {
			return nil
		}
	}
}

var (
	errNothing = errors.New("nothing happened")
	errClosing = errors.New("the server ends")
)

// nextEvent waits for a change, for aliveEvery at most.
func nextEvent(ctx context.Context, watch *jobs.Watch) (jobs.Status, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, aliveEvery, errNothing)
	defer cancel()
	st, err := watch.Next(ctx)
	if err != nil {
		err = context.Cause(ctx)
	}
	return st, err
}

func sendJob(w *response, j Job) error {
	b, err := json.Marshal(j)
	if err != nil {
		return fmt.Errorf("encode job: %w", err)
	}
	if err := writeEvent(w, "event: job\ndata: "+string(b)+"\n\n"); err != nil {
		return err
	}
	time.Sleep(eventsPause)
	return nil
}

func writeEvent(w *response, text string) error {
	if _, err := w.Write([]byte(text)); err != nil {
		return err
	}
	return w.flush()
}

// addStream notes how a stream is ended when the server is told to end, and
// returns how to forget it.
func (h *Handler) addStream(end func()) (remove func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closing {
		end()
	}
	h.nth++
	n := h.nth
	if h.streams == nil {
		h.streams = map[int]func(){}
	}
	h.streams[n] = end
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.streams, n)
	}
}

// endStreams ends the streams that would not end by themselves.
func (h *Handler) endStreams() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closing = true
	for _, end := range h.streams {
		end()
	}
}
