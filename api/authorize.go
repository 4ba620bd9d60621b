package api

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"quarry/api/access"
)

// needs says what a request must be allowed, and in which repository. Digests of
// chunks, bootstraps, configs and blobs are capabilities: whoever knows one, and may
// read anything, may read that. open routes tell nothing but that the server runs.
func (rt route) needs() (need access.Scope, repo string, open bool) {
	switch rt.op {
	case opHealth, opReady, opToken, opPageAsset: // the token service looks at credentials itself
		return access.Any, "", true
	case opImage, opStart, opSignatures:
		return access.Pull, rt.ref.Repo, false
	case opImageDelete, opSign:
		return access.Push, rt.ref.Repo, false
	case opTrace:
		return access.Trace, "", false
	case opPage, opImages, opJobs, opJob, opJobEvents, opJobsEvents, opBootstrap, opConfig, opChunk, opBatch, opBlob:
		return access.Pull, "", false
	}
	if rt.mount {
		return access.Pull, "", false // whoever may read an image may keep it while reading
	}
	return access.Admin, "", false
}

// open reports whether nobody is asked for a token: on the local socket, which the
// owner of the data folder alone can reach, and where there are none.
func (h *Handler) open() bool { return h.local || h.cfg.Authorize == nil }

// authorize holds a request against what its route needs.
func (h *Handler) authorize(r *http.Request, rt route) error {
	need, repo, open := rt.needs()
	if open || h.open() || rt.op == opMetrics && h.cfg.MetricsOpen {
		return nil
	}
	return h.cfg.Authorize(r, need, repo)
}

// visible returns which repositories a request may see in a list.
func (h *Handler) visible(r *http.Request) (func(repo string) bool, error) {
	if h.open() || h.cfg.Covered == nil {
		return func(string) bool { return true }, nil
	}
	return h.cfg.Covered(r, access.Pull)
}

// admin reports whether a request may know what the node does for all together.
func (h *Handler) admin(r *http.Request) bool {
	return h.open() || h.cfg.Admin != nil && h.cfg.Admin(r)
}

// closed says why a route is not there for whoever asks without a token to show:
// what changes the store is not for everybody who can reach it.
func (h *Handler) closed(rt route, row *routeRow) error {
	if h.local || h.cfg.Authorize != nil {
		return nil
	}
	switch {
	case row.local:
		return fmt.Errorf("%w: %s is served on the local socket, and elsewhere to tokens of scope admin", ErrNoRoute, row.path)
	case rt.op == opImageDelete:
		return fmt.Errorf("%w: names are deleted on the local socket, and elsewhere by tokens of scope push", ErrNoRoute)
	}
	return nil
}

// serveToken answers the token flow of registries.
func (h *Handler) serveToken(_ context.Context, w *response, r *http.Request) error {
	if h.cfg.Token == nil {
		return fmt.Errorf("%w: tokens", ErrNotOffered)
	}
	return h.cfg.Token(w, r)
}

// remoteSource refuses a source that is a path of the server's machine to whoever is
// elsewhere: a token is not for reading files.
func (h *Handler) remoteSource(source string) error {
	if h.local || strings.HasPrefix(source, "registry://") {
		return nil
	}
	return fmt.Errorf("%w: source %q is a path on the server's machine, for its local socket only: give registry://REF, or push the image", ErrBadRequest, source)
}
