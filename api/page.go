package api

import (
	"fmt"
	"net/http"
)

// servePage has the page for people answer. Its style and its script tell nothing,
// so nobody is asked who they are for those.
func (h *Handler) servePage(w *response, r *http.Request, rt route) error {
	if h.cfg.Page == nil {
		return fmt.Errorf("%w: the page for people", ErrNotOffered)
	}
	if rt.op == opPageAsset {
		return h.cfg.Page(w, r, nil, false)
	}
	sees, err := h.visible(r)
	if err != nil {
		return err
	}
	return h.cfg.Page(w, r, sees, h.admin(r))
}

// crossSite refuses what a page of somebody else has a browser send here: a browser
// that logged in for the page shows its token for that, too. Other clients do not say
// where they come from, and nothing changes for them.
func crossSite(r *http.Request) error {
	if err := new(http.CrossOriginProtection).Check(r); err != nil {
		return fmt.Errorf("%w: %s %s: %w", ErrCrossSite, r.Method, r.URL.Path, err)
	}
	return nil
}
