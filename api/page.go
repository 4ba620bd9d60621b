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

// foreign refuses what a browser may have been led to: a page of another site, and a
// name that its owner has made lead to this machine, under which that owner's pages read
// answers as their own.
func (h *Handler) foreign(r *http.Request) error {
	if !h.local && h.cfg.HostAllowed != nil && !h.cfg.HostAllowed(r.Host) {
		return fmt.Errorf("%w: %.255q", ErrHost, r.Host)
	}
	return crossSite(r)
}
