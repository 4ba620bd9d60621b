package api

import (
	"context"
	"fmt"
	"net/http"

	"quarry/store/chunk"
)

func (h *Handler) serveGC(ctx context.Context, w *response, r *http.Request) error {
	if h.cfg.GC == nil {
		return fmt.Errorf("%w: gc", ErrNotOffered)
	}
	var req GCRequest
	if err := decodeJSON(w, r, maxFormBody, &req); err != nil {
		return err
	}
	return h.stream(ctx, w, func(s *eventStream) (any, error) {
		return h.cfg.GC(ctx, req, func(p Progress) { s.send(Event{Type: EventProgress, Progress: &p}) })
	})
}

// servePins lists pins, or pins and unpins the source that a reference names.
func (h *Handler) servePins(ctx context.Context, w *response, rt route) error {
	if h.cfg.Pin == nil || h.cfg.Unpin == nil || h.cfg.Pins == nil {
		return fmt.Errorf("%w: pins", ErrNotOffered)
	}
	if rt.op == opPins {
		return writeJSON(w, http.StatusOK, PinList{append([]chunk.Digest{}, h.cfg.Pins()...)})
	}
	source, _, err := h.resolve(rt.ref)
	if err != nil {
		return err
	}
	if rt.op == opUnpin {
		err = h.cfg.Unpin(ctx, source)
	} else {
		err = h.cfg.Pin(ctx, source)
	}
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, PinList{[]chunk.Digest{source}})
}
