package sandboxes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"quarry/worker/sandbox"
)

// maxKey bounds an idempotency key.
const maxKey = 256

func (h *Handler) create(c call) error {
	spec, err := decode[sandbox.Spec](c)
	if err != nil {
		return err
	}
	key := c.r.Header.Get(HeaderKey)
	if len(key) > maxKey {
		return fmt.Errorf("%w: %s has %d bytes, at most %d", sandbox.ErrInvalid, HeaderKey, len(key), maxKey)
	}
	sb, made, err := h.cfg.Node.Create(c.r.Context(), spec, key)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if made {
		status = http.StatusCreated
		c.w.Header().Set("Location", "/v1/sandboxes/"+sb.ID)
	}
	return c.w.json(status, sb)
}

func (h *Handler) list(c call) error {
	f := sandbox.Filter{Group: c.q.Get("group"), State: sandbox.State(c.q.Get("state")), After: c.q.Get("after")}
	limit, err := c.number("limit", MaxPage, MaxPage)
	if err != nil {
		return err
	}
	if limit < 1 {
		return fmt.Errorf("%w: limit=0: want 1 to %d", sandbox.ErrInvalid, MaxPage)
	}
	if f.State != "" && !f.State.Known() {
		return fmt.Errorf("%w: state=%q: want creating, running, paused, hibernated, ending or ended", sandbox.ErrInvalid, f.State)
	}
	f.Limit = int(limit)
	for _, text := range c.q["label"] {
		key, value, ok := strings.Cut(text, "=")
		if !ok || key == "" {
			return fmt.Errorf("%w: label=%q: want KEY=VALUE", sandbox.ErrInvalid, text)
		}
		if f.Labels == nil {
			f.Labels = map[string]string{}
		}
		f.Labels[key] = value
	}
	page, next, err := h.cfg.Node.List(c.r.Context(), f)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, SandboxesPage{append([]sandbox.Sandbox{}, page...), next})
}

func (h *Handler) get(c call) error {
	sb, err := h.cfg.Node.Get(c.r.Context(), c.id)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, sb)
}

func (h *Handler) remove(c call) error {
	end, err := h.cfg.Node.Delete(c.r.Context(), c.id)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, end)
}

// maxExpect bounds how long a pause may be expected to be: a year.
const maxExpect = 365 * 24 * 3600 * 1000

func (h *Handler) pause(c call) error {
	ms, err := c.number("expect_ms", 0, maxExpect)
	if err != nil {
		return err
	}
	return h.change(c, func(ctx context.Context, id string) error {
		return h.cfg.Node.Pause(ctx, id, time.Duration(ms)*time.Millisecond)
	})
}

func (h *Handler) resume(c call) error { return h.change(c, h.cfg.Node.Resume) }

func (h *Handler) hibernate(c call) error { return h.change(c, h.cfg.Node.Hibernate) }

func (h *Handler) wake(c call) error { return h.change(c, h.cfg.Node.Wake) }

// change does something to a sandbox and answers with what it is then.
func (h *Handler) change(c call, do func(context.Context, string) error) error {
	if err := do(c.r.Context(), c.id); err != nil {
		return err
	}
	return h.get(c)
}

func (h *Handler) ttl(c call) error {
	body, err := decode[TTLRequest](c)
	if err != nil {
		return err
	}
	if body.Seconds <= 0 {
		return fmt.Errorf("%w: ttl_s %d: want seconds from now on, 1 or more", sandbox.ErrInvalid, body.Seconds)
	}
	sb, err := h.cfg.Node.SetTTL(c.r.Context(), c.id, body.Seconds)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, sb)
}

func (h *Handler) usage(c call) error {
	u, err := h.cfg.Node.Usage(c.r.Context(), c.id)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, u)
}

func (h *Handler) give(c call) error {
	s, err := decode[sandbox.Share](c)
	if err != nil {
		return err
	}
	if err := h.cfg.Node.Give(c.r.Context(), c.id, s); err != nil {
		return err
	}
	return c.w.json(http.StatusOK, s)
}

func (h *Handler) take(c call) error {
	target := c.q.Get("target")
	if target == "" {
		return fmt.Errorf("%w: parameter target is missing", sandbox.ErrInvalid)
	}
	if err := h.cfg.Node.Take(c.r.Context(), c.id, target); err != nil {
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

func (h *Handler) network(c call) error {
	sb, err := h.cfg.Node.Get(c.r.Context(), c.id)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, sb.Network)
}

func (h *Handler) setNetwork(c call) error {
	p, err := decode[sandbox.Policy](c)
	if err != nil {
		return err
	}
	n, err := h.cfg.Node.SetNetwork(c.r.Context(), c.id, p)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, n)
}

// events streams what happens, as server-sent events.
func (h *Handler) events(c call) error {
	after := uint64(0)
	text := c.q.Get("after")
	if text == "" {
		text = c.r.Header.Get("Last-Event-ID")
	}
	if text != "" {
		if _, err := fmt.Sscanf(text, "%d", &after); err != nil {
			return fmt.Errorf("%w: after=%q: want the number of an event", sandbox.ErrInvalid, text)
		}
	}
	ctx, done := h.streaming(c)
	defer done()
	c.w.Header().Set("Content-Type", "text/event-stream")
	c.w.WriteHeader(http.StatusOK)
	if err := c.w.flush(); err != nil {
		return nil
	}
	s := newStream(h, c, func(b []byte) []byte { return b })
	defer s.end()
	err := h.cfg.Node.Events(ctx, after, c.q.Get("sandbox"), func(e sandbox.Event) error {
		b, err := json.Marshal(e)
		if err != nil {
			return err
		}
		return s.write(fmt.Appendf(nil, "id: %d\nevent: %s\ndata: %s\n\n", e.Sequence, e.Type, b))
	})
	if c.r.Context().Err() != nil {
		return nil // the client has ended it
	}
	over := ctx.Err() != nil
	if over {
		err = fmt.Errorf("%w: the server ends: ask again for what comes after the last event", sandbox.ErrNotReady)
	}
	e := toError(err)
	e.about(c)
	if b, jerr := json.Marshal(e); jerr == nil {
		_ = s.write(fmt.Appendf(nil, "event: %s\ndata: %s\n\n", EventError, b))
	}
	if over {
		return nil
	}
	return err
}

// EventError is the last of a stream of events that its server ends: an Error, and no
// event of a sandbox, so that it has no number.
const EventError = "error"

func (h *Handler) node(c call) error {
	s, err := h.cfg.Node.Status(c.r.Context())
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, s)
}

func (h *Handler) drain(c call) error {
	body, err := decode[DrainRequest](c)
	if err != nil {
		return err
	}
	if err := h.cfg.Node.Drain(c.r.Context(), body.End); err != nil {
		return err
	}
	return h.node(c)
}

func (h *Handler) serveMetrics(c call) error {
	h.gather.ServeHTTP(c.w, c.r)
	return nil
}

func (h *Handler) health(c call) error {
	return c.w.json(http.StatusOK, map[string]string{"status": "ok"})
}

// notReadyRetry is when a node that is not ready is worth another look.
const notReadyRetry = 5 * time.Second

// ready says whether the node takes creates.
func (h *Handler) ready(c call) error {
	ctx, cancel := context.WithTimeout(c.r.Context(), 5*time.Second)
	defer cancel()
	s, err := h.cfg.Node.Status(ctx)
	if err != nil {
		return err
	}
	if s.Draining {
		return sandbox.ErrDraining
	}
	if s.NotReady != "" {
		return &sandbox.Busy{Err: sandbox.ErrCapacity, What: "node", Why: s.NotReady, RetryAfter: notReadyRetry}
	}
	return c.w.json(http.StatusOK, map[string]string{"status": "ready"})
}

func (h *Handler) page(c call) error {
	if h.cfg.Page == nil {
		return fmt.Errorf("%w: /", ErrNoRoute)
	}
	h.cfg.Page.ServeHTTP(c.w, c.r)
	return nil
}

func (h *Handler) pageAsset(c call) error { return h.page(c) }
