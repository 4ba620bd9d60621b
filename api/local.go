package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"quarry/internal/rescue"
)

// aliveEvery is how often a stream says that it is alive when nothing else
// happens: well under the clients' idle timeout of 30 s.
const aliveEvery = 10 * time.Second

// maxFormBody bounds the JSON bodies of the local routes, which hold a source,
// a name and a platform at most.
const maxFormBody = 64 << 10

// serveLocal answers the routes of the local socket.
func (h *Handler) serveLocal(ctx context.Context, w *response, r *http.Request, rt route) error {
	switch rt.op {
	case opConvert:
		return h.serveConvert(ctx, w, r)
	case opCheck:
		return h.serveCheck(ctx, w, r, rt)
	case opRebuild:
		return h.serveRebuild(ctx, w)
	case opGC:
		return h.serveGC(ctx, w, r)
	case opPins, opPin, opUnpin:
		return h.servePins(ctx, w, rt)
	case opLeases:
		return writeJSON(w, http.StatusOK, LeaseList{h.leases.live()})
	case opLeaseGet:
		lease, err := h.leases.get(rt.lease)
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusOK, lease)
	case opLeasePut:
		var req LeaseRequest
		if err := decodeJSON(w, r, maxFormBody, &req); err != nil {
			return err
		}
		lease, err := h.leases.renew(rt.lease, req, h.caller(r))
		if err == nil {
			err = h.keepLease(ctx, rt.lease, req)
		}
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusOK, lease)
	case opLeaseDelete:
		if err := h.leases.end(rt.lease, h.caller(r)); err != nil {
			return err
		}
		if h.cfg.Leases != nil {
			h.cfg.Leases.End(rt.lease)
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	return fmt.Errorf("%w: operation %d", ErrNoRoute, rt.op)
}

func (h *Handler) serveConvert(ctx context.Context, w *response, r *http.Request) error {
	if h.cfg.Convert == nil {
		return fmt.Errorf("%w: convert", ErrNotOffered)
	}
	var req ConvertRequest
	if err := decodeJSON(w, r, maxFormBody, &req); err != nil {
		return err
	}
	if req.Source == "" || req.Name == "" {
		return fmt.Errorf("%w: source and name are needed", ErrBadRequest)
	}
	if err := h.remoteSource(req.Source); err != nil {
		return err
	}
	return h.stream(ctx, w, func(s *eventStream) (any, error) {
		return h.cfg.Convert(ctx, req, func(p Progress) { s.send(Event{Type: EventProgress, Progress: &p}) })
	})
}

func (h *Handler) serveCheck(ctx context.Context, w *response, r *http.Request, rt route) error {
	if h.cfg.Check == nil {
		return fmt.Errorf("%w: check", ErrNotOffered)
	}
	var req CheckRequest
	if r.ContentLength != 0 {
		if err := decodeJSON(w, r, maxCheckBody, &req); err != nil {
			return err
		}
	}
	req.Quick = rt.quick
	return h.stream(ctx, w, func(s *eventStream) (any, error) {
		return h.cfg.Check(ctx, req, func(p Problem) {
			s.send(Event{Type: EventProblem, Problem: &p})
		})
	})
}

func (h *Handler) serveRebuild(ctx context.Context, w *response) error {
	if h.cfg.Rebuild == nil {
		return fmt.Errorf("%w: rebuild", ErrNotOffered)
	}
	return h.stream(ctx, w, func(*eventStream) (any, error) { return h.cfg.Rebuild(ctx) })
}

// stepWait is what a job says that has no slot yet.
const stepWait = "waiting for other conversions"

// stream runs a job and sends its events as NDJSON, ending with its result or
// its error. The status is 200 either way: it is known only at the end. Jobs wait
// for their turn as long as their client does.
func (h *Handler) stream(ctx context.Context, w *response, job func(*eventStream) (any, error)) error {
	w.Header().Set("Content-Type", TypeNDJSON)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	s := &eventStream{w: w}
	result, err := s.run(func(s *eventStream) (any, error) {
		leave, ok := h.jobs.Try(1)
		if !ok {
			s.send(Event{Type: EventProgress, Progress: &Progress{Step: stepWait}})
			var err error
			if leave, err = h.jobs.Enter(ctx, 1); err != nil {
				return nil, err
			}
		}
		defer leave()
		var res any
		err := rescue.Do(func() (err error) { res, err = job(s); return err })
		return res, err
	})
	if err != nil {
		e := toError(err)
		e.RequestID = w.Header().Get(HeaderRequestID)
		h.log.WarnContext(ctx, "job ended with an error", "request_id", e.RequestID, "error", err)
		if p, ok := errors.AsType[*rescue.Panic](err); ok {
			h.log.ErrorContext(ctx, "panic in a job: please report it", "request_id", e.RequestID, "panic", p.Value, "stack", string(p.Stack))
		}
		s.send(Event{Type: EventError, Error: e})
		w.status = e.Status // for the metrics: the client was sent 200 before
		return s.err
	}
	raw, err := json.Marshal(result)
	if err != nil {
		return fmt.Errorf("encode result: %w", err)
	}
	s.send(Event{Type: EventResult, Result: raw})
	return s.err
}

// eventStream writes the events of one job. Safe for concurrent use, as jobs
// report from their workers.
type eventStream struct {
	mu  sync.Mutex // guards the rest
	w   *response
	err error // the client is gone; later events are dropped
}

func (s *eventStream) send(e Event) {
	b, err := json.Marshal(e)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && err == nil {
		_, err = s.w.Write(append(b, '\n'))
	}
	if s.err == nil && err == nil {
		err = s.w.flush()
	}
	if s.err == nil {
		s.err = err
	}
}

// run runs the job with alive events between its own.
func (s *eventStream) run(job func(*eventStream) (any, error)) (any, error) {
	stop := s.keepAlive()
	defer stop()
	return job(s)
}

// keepAlive sends alive events until stop is called.
func (s *eventStream) keepAlive() (stop func()) {
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() { // ends when stop closes quit
		defer close(ended)
		tick := time.NewTicker(aliveEvery)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				s.send(Event{Type: EventAlive})
			}
		}
	}()
	return func() { close(quit); <-ended }
}
