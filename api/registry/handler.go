// Package registry serves what OCI clients push and pull: the distribution
// specification, version 1.1, below /v2/. A pure function reads the request line,
// handlers return errors, and one table says what an error is on the wire; what a
// push promises is store/registry's.
package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/prometheus/client_golang/prometheus"

	"quarry/api/access"
	"quarry/api/gate"
	"quarry/store/registry"
)

// Config is what a Handler serves.
type Config struct {
	Store *registry.Store
	// Authorize holds a request against what it needs, before anything else is done:
	// pull or push in its repository, any token for the root. Nil: everybody may do
	// everything.
	Authorize func(r *http.Request, need access.Scope, repo string) error
	// Covered says which repositories a request may see in lists. Nil: all.
	Covered func(r *http.Request, need access.Scope) (func(repo string) bool, error)
	// Holder says whose request it is, so that no one takes all the room for uploads, or
	// all the memory; nil: nobody's.
	Holder func(r *http.Request) string
	// Refusals counts requests beyond a bound, by which; nil: nobody counts.
	Refusals *prometheus.CounterVec
	// Memory bounds what requests hold of manifests and lists together, as much of blobs
	// that are pulled, and a quarter of it of manifests that arrive; 0 = 256 MiB.
	Memory int64
	// ReadOnly makes the registry of a node that only reads its store: it returns what
	// requests that push are answered, which wraps store.ErrReadOnly. Nil: the writer.
	ReadOnly func(context.Context) error
	Log      *slog.Logger // nil = discard
}

const (
	// defaultMemory is what 16 manifests take that are as large as they may be, and
	// 256 blobs that are pulled. What arrives of blobs has its own bound: 256 KiB for
	// each upload under way.
	defaultMemory = 256 << 20
	// fullWait is how long a request waits for others to end.
	fullWait = 2 * time.Second
	// What a request is taken to hold. A manifest that is pushed is there as bytes and
	// as values, and its descriptors once more as what is looked up; a list of referrers
	// as values and as bytes; one of tags is held against the repository's manifests,
	// some 150 bytes each, of which 100 000 are rare; one of repositories is made from
	// all names there are, which are as long.
	pushedManifest = 4 // times its length
	listMemory     = 2 * registry.MaxManifest
	tagsMemory     = 16 << 20
	// smallManifest is how much of a manifest is read before memory is asked for: who
	// sends nothing holds none, and nearly all manifests are smaller.
	smallManifest = 32 << 10
)

// Handler serves the registry. Safe for concurrent use.
type Handler struct {
	store     *registry.Store
	authorize func(r *http.Request, need access.Scope, repo string) error
	covered   func(r *http.Request, need access.Scope) (func(repo string) bool, error)
	holder    func(r *http.Request) string
	refusals  *prometheus.CounterVec
	documents *gate.Shares // what manifests and lists take
	arriving  *gate.Shares // what large manifests take until they are there
	blobs     *gate.Shares // what pulls of blobs take
	readOnly  func(context.Context) error
	log       *slog.Logger
}

var _ http.Handler = (*Handler)(nil)

// New returns a handler of cfg.
func New(cfg Config) *Handler {
	if cfg.Memory == 0 {
		cfg.Memory = defaultMemory
	}
	h := &Handler{
		store: cfg.Store, authorize: cfg.Authorize, covered: cfg.Covered, holder: cfg.Holder, refusals: cfg.Refusals, readOnly: cfg.ReadOnly, log: cfg.Log,
		documents: gate.NewShares(cfg.Memory, "bytes for manifests and lists", fullWait), blobs: gate.NewShares(cfg.Memory, "bytes for blobs", fullWait),
		arriving: gate.NewShares(cfg.Memory/4, "bytes for manifests that arrive", fullWait),
	}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	if h.authorize == nil {
		h.authorize = func(*http.Request, access.Scope, string) error { return nil }
	}
	if h.holder == nil {
		h.holder = func(*http.Request) string { return "" }
	}
	if h.covered == nil {
		h.covered = func(*http.Request, access.Scope) (func(string) bool, error) {
			return func(string) bool { return true }, nil
		}
	}
	return h
}

// begunError is an error after the status line was sent.
type begunError struct{ error }

func (e begunError) Unwrap() error { return e.error }

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Docker-Distribution-API-Version", "registry/2.0")
	req, err := parse(r.Method, r.URL.EscapedPath(), r.URL.RawQuery)
	if err == nil {
		err = h.authorize(r, req.needs(), req.repo)
	}
	if err == nil && h.readOnly != nil && req.needs() == access.Push {
		err = h.readOnly(r.Context())
	}
	if err == nil {
		err = h.serve(w, r, req)
	}
	if err == nil {
		return
	}
	h.logError(w, r, err)
	if bound := lookup(err).bound; bound != "" && h.refusals != nil {
		h.refusals.WithLabelValues(bound).Inc()
	}
	if errors.As(err, new(begunError)) {
		panic(http.ErrAbortHandler) // what cannot be finished must not look complete
	}
	writeError(w, err)
}

// logError logs what the operator has to see, with the id that the API gave to the
// request. That something is not there is an answer like others.
func (h *Handler) logError(w http.ResponseWriter, r *http.Request, err error) {
	level := slog.LevelDebug
	if row := lookup(err); row.status >= http.StatusInternalServerError {
		level = slog.LevelError
	}
	h.log.LogAttrs(r.Context(), level, "registry request refused", slog.String("request_id", w.Header().Get("X-Request-Id")),
		slog.String("method", r.Method), slog.String("path", r.URL.EscapedPath()), slog.Any("error", err))
}

func (h *Handler) serve(w http.ResponseWriter, r *http.Request, req request) error {
	switch req.op {
	case opPing:
		return writeJSON(w, "application/json", struct{}{})
	case opBlob:
		return h.getBlob(w, r, req)
	case opBlobDelete:
		return accepted(w, h.store.DeleteBlob(r.Context(), req.repo, req.digest))
	case opUploadStart:
		return h.startUpload(w, r, req)
	case opUploadOffset:
		return h.uploadOffset(w, req)
	case opUploadAppend:
		return h.appendUpload(w, r, req)
	case opUploadFinish:
		return h.finishUpload(w, r, req)
	case opUploadCancel:
		if err := h.store.CancelUpload(req.repo, req.id); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	case opManifest:
		return h.getManifest(w, r, req)
	case opManifestPut:
		return h.putManifest(w, r, req)
	case opManifestDelete:
		if req.tag != "" {
			return accepted(w, h.store.DeleteTag(r.Context(), req.repo, req.tag))
		}
		return accepted(w, h.store.DeleteManifest(r.Context(), req.repo, req.digest))
	case opTags:
		return h.listTags(w, r, req)
	case opReferrers:
		return h.listReferrers(w, r, req)
	case opCatalog:
		return h.listRepos(w, r, req)
	}
	return fmt.Errorf("%w: operation %d", errNoRoute, req.op)
}

func accepted(w http.ResponseWriter, err error) error {
	if err == nil {
		w.WriteHeader(http.StatusAccepted)
	}
	return err
}

// getManifest answers with the bytes as they were pushed, whatever the client
// accepts: their digest is what it asked for.
func (h *Handler) getManifest(w http.ResponseWriter, r *http.Request, req request) (err error) {
	if req.head {
		defer func() { err = registry.AsUnknown(err) }()
	}
	d := req.digest
	if req.tag != "" {
		if d, err = h.store.Resolve(r.Context(), req.repo, req.tag); err != nil {
			return err
		}
	}
	m, err := h.store.StatManifest(r.Context(), req.repo, d)
	if err != nil {
		return err
	}
	memory := m.Size
	switch {
	case req.head && m.IsIndex():
		memory = pushedManifest * registry.MaxManifest // its children are read too, one by one
	case req.head:
		memory = pushedManifest * m.Size
	}
	leave, err := h.documents.Enter(r.Context(), h.holder(r), memory)
	if err != nil {
		return err
	}
	defer leave()
	var body []byte
	switch {
	case !req.head:
		body, err = h.store.ReadManifest(r.Context(), m)
	case h.readOnly == nil: // to a node that only reads nobody pushes
		err = h.store.CheckWhole(r.Context(), req.repo, m)
	}
	if err != nil {
		return err
	}
	setContent(w, d, m.Size, m.MediaType)
	return send(w, body)
}

func setContent(w http.ResponseWriter, d digest.Digest, size int64, mediaType string) {
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	w.Header().Set("Docker-Content-Digest", d.String())
	w.Header().Set("ETag", `"`+d.String()+`"`)
}

// send writes a body that is all there.
func send(w http.ResponseWriter, body []byte) error {
	if _, err := w.Write(body); err != nil && !errors.Is(err, http.ErrBodyNotAllowed) {
		return begunError{fmt.Errorf("send answer: %w", err)}
	}
	return nil
}

func (h *Handler) putManifest(w http.ResponseWriter, r *http.Request, req request) error {
	body, arrived, err := h.readManifest(w, r)
	if err != nil {
		return err
	}
	leave, err := h.documents.Enter(r.Context(), h.holder(r), pushedManifest*int64(len(body)))
	arrived()
	if err != nil {
		return err
	}
	defer leave()
	m, err := h.store.PutManifest(r.Context(), registry.PutRequest{
		Repo: req.repo, MediaType: mediaType(r), Body: body, Digest: req.digest, Tags: req.tags,
	})
	if err != nil {
		return err
	}
	if m.Subject != "" {
		w.Header().Set("OCI-Subject", m.Subject.String())
	}
	for _, tag := range req.tags {
		w.Header().Add("OCI-Tag", tag)
	}
	return created(w, req.repo, "manifests", m.Digest)
}

// created answers that what has the digest is there now.
func created(w http.ResponseWriter, repo, kind string, d digest.Digest) error {
	w.Header().Set("Location", "/v2/"+repo+"/"+kind+"/"+d.String())
	w.Header().Set("Docker-Content-Digest", d.String())
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusCreated)
	return nil
}

// readManifest reads a manifest that is pushed. arrived gives back what it was admitted
// with to arrive.
func (h *Handler) readManifest(w http.ResponseWriter, r *http.Request) (body []byte, arrived func(), err error) {
	size := r.ContentLength
	if size > registry.MaxManifest {
		return nil, nil, fmt.Errorf("%w: manifest of %d bytes, at most %d are allowed", registry.ErrTooLarge, r.ContentLength, registry.MaxManifest)
	}
	// All of it must come in the time in which a blob's next bytes must: it is small,
	// and holds memory until it is there.
	ctl := http.NewResponseController(w)
	_ = ctl.SetReadDeadline(time.Now().Add(stallTimeout)) // a test's recorder has no connection
	arrived = func() {}
	body, err = io.ReadAll(io.LimitReader(r.Body, smallManifest))
	if err == nil && len(body) == smallManifest {
		if size < 0 {
			size = registry.MaxManifest
		}
		if arrived, err = h.arriving.Enter(r.Context(), h.holder(r), size); err != nil {
			return nil, nil, err
		}
		b := bytes.NewBuffer(make([]byte, 0, size+1+bytes.MinRead)) // so that it does not grow
		b.Write(body)
		_, err = b.ReadFrom(io.LimitReader(r.Body, registry.MaxManifest+1-smallManifest))
		body = b.Bytes()
	}
	if err != nil {
		arrived()
		return nil, nil, fmt.Errorf("%w: %w", registry.ErrBody, err)
	}
	_ = ctl.SetReadDeadline(time.Time{}) // only now: of a body that is refused the server reads on
	return body, arrived, nil            // PutManifest refuses one byte too much
}

func (h *Handler) listTags(w http.ResponseWriter, r *http.Request, req request) error {
	leave, err := h.documents.Enter(r.Context(), h.holder(r), tagsMemory)
	if err != nil {
		return err
	}
	defer leave()
	tags, more, err := h.store.Tags(r.Context(), req.repo, req.last, req.n)
	if err != nil {
		return err
	}
	if more && len(tags) > 0 {
		link(w, "/v2/"+req.repo+"/tags/list", url.Values{"n": {strconv.Itoa(req.n)}, "last": {tags[len(tags)-1]}})
	}
	return writeJSON(w, "application/json", struct {
		Name string   `json:"name"`
		Tags []string `json:"tags"`
	}{req.repo, tags})
}

// listRepos answers with the repositories that the client may pull from.
func (h *Handler) listRepos(w http.ResponseWriter, r *http.Request, req request) error {
	visible, err := h.covered(r, access.Pull)
	if err != nil {
		return err
	}
	leave, err := h.documents.Enter(r.Context(), h.holder(r), tagsMemory)
	if err != nil {
		return err
	}
	defer leave()
	repos, next, err := h.store.Repos(r.Context(), req.last, req.n, visible)
	if err != nil {
		return err
	}
	if next != "" && req.n > 0 {
		link(w, "/v2/_catalog", url.Values{"n": {strconv.Itoa(req.n)}, "last": {next}})
	}
	return writeJSON(w, "application/json", struct {
		Repositories []string `json:"repositories"`
	}{repos})
}

func (h *Handler) listReferrers(w http.ResponseWriter, r *http.Request, req request) error {
	leave, err := h.documents.Enter(r.Context(), h.holder(r), listMemory)
	if err != nil {
		return err
	}
	defer leave()
	list, next, err := h.store.Referrers(r.Context(), req.repo, req.digest, req.artifactType, digest.Digest(req.last))
	if err != nil {
		return err
	}
	query := url.Values{}
	if req.artifactType != "" {
		w.Header().Set("OCI-Filters-Applied", "artifactType")
		query.Set("artifactType", req.artifactType)
	}
	if next != "" {
		query.Set("last", next.String())
		link(w, "/v2/"+req.repo+"/referrers/"+req.digest.String(), query)
	}
	return writeJSON(w, v1.MediaTypeImageIndex, v1.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: list,
	})
}

// link names the next page.
func link(w http.ResponseWriter, path string, query url.Values) {
	w.Header().Set("Link", "<"+path+"?"+query.Encode()+`>; rel="next"`)
}

func writeJSON(w http.ResponseWriter, mediaType string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	return send(w, b)
}
