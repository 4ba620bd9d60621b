package api

import (
	"context"
	"fmt"
	"net/http"
)

func (h *Handler) serveReady(ctx context.Context, w *response) error {
	if h.cfg.Ready != nil {
		if err := h.cfg.Ready(ctx); err != nil {
			return fmt.Errorf("%w: not ready: %w", ErrBusy, err)
		}
	}
	ready := Readiness{Status: "ready"}
	if h.cfg.Lag != nil {
		lag := h.cfg.Lag()
		ready.Journal = &lag
	}
	return writeJSON(w, http.StatusOK, ready)
}

func (h *Handler) serveStats(ctx context.Context, w *response) error {
	s := Stats{
		Version:       1,
		Requests:      h.requests.Load(),
		BytesSent:     h.sent.Load(),
		UptimeSeconds: h.cfg.Now().Sub(h.started).Seconds(),
		Leases:        len(h.leases.live()),
	}
	if h.cfg.Stats != nil {
		var err error
		if s.Store, err = h.cfg.Stats(ctx); err != nil {
			return err
		}
	}
	return writeJSON(w, http.StatusOK, s)
}
