// Package page is the page for people at a store node's address: which images there
// are, what each costs, what is under way and what went wrong. It only shows what
// the catalog, the bucket and the queue of jobs say, so that nobody needs a program
// for a look; everything on it comes from hostile pushers and is escaped.
package page

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/jobs"
)

// Paths are what the page consists of: the page, its style and its script.
const (
	Path       = "/"
	StylePath  = "/page.css"
	ScriptPath = "/page.js"
)

// perPage is the number of names on one page.
const perPage = 100

// maxFilter bounds the text that repositories are filtered by: a repository has no
// more bytes.
const maxFilter = 255

// ErrRequest says that the query of a request is none of the page's.
var ErrRequest = errors.New("the page has no such view")

// Catalog is what the page needs of the catalog.
type Catalog interface {
	Names() []catalog.Name
	Packs() []catalog.Pack
}

// Config is what a page shows.
type Config struct {
	Catalog Catalog
	Bucket  bucket.Bucket
	Jobs    *jobs.Queue // nil: there is none
	// Stored returns the stored length of each chunk, -1 of one that is not stored.
	Stored  func(ctx context.Context, ds []chunk.Digest) ([]int64, error)
	Metrics prometheus.Gatherer // nil: no figures of them
	Log     *slog.Logger        // nil = discard
	Now     func() time.Time
}

// Viewer is who looks at the page.
type Viewer struct {
	// Sees says which repositories the viewer may know of; nil: all.
	Sees func(repo string) bool
	// Admin: what the node does for all together is the viewer's business too.
	Admin bool
}

func (v Viewer) sees(repo string) bool { return v.Sees == nil || v.Sees(repo) }

//go:embed page.html page.css page.js
var files embed.FS

// Page is the page of one store. Safe for concurrent use.
type Page struct {
	cfg    Config
	log    *slog.Logger
	html   *template.Template
	turns  *turns
	states states
	share  sharing
	queue  queueView
}

// New returns the page of cfg. Close it before what it reads is closed.
func New(cfg Config) *Page {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Page{
		cfg: cfg, log: cfg.Log, turns: newTurns(), share: newSharing(),
		html: template.Must(template.New("page.html").Funcs(funcs).ParseFS(files, "page.html")),
	}
}

// Close ends what the page does in the background and waits for it.
func (p *Page) Close() { p.turns.close() }

// policy lets a browser load nothing but the page's own style and script, run
// nothing that stands in the page, and show it in no frame.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// Serve answers a GET of one of the paths. Errors: ErrRequest, and those of the
// connection.
func (p *Page) Serve(w http.ResponseWriter, r *http.Request, v Viewer) error {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	switch r.URL.Path {
	case StylePath:
		return asset(w, r, "page.css", "text/css; charset=utf-8")
	case ScriptPath:
		return asset(w, r, "page.js", "text/javascript; charset=utf-8")
	}
	q, err := parseQuery(r.URL.RawQuery)
	if err != nil {
		return err
	}
	var body bytes.Buffer
	if err := p.html.Execute(&body, p.view(r.Context(), v, q)); err != nil {
		return fmt.Errorf("make the page: %w", err)
	}
	h.Set("Cache-Control", "no-store") // names are for who may see them
	return send(w, r, body.Bytes(), "text/html; charset=utf-8")
}

func asset(w http.ResponseWriter, r *http.Request, name, contentType string) error {
	b, err := files.ReadFile(name)
	if err != nil {
		return err
	}
	w.Header().Set("Cache-Control", "no-cache")
	return send(w, r, b, contentType)
}

// send answers with b, or with 304 when the client has the same.
func send(w http.ResponseWriter, r *http.Request, b []byte, contentType string) error {
	sum := chunk.Sum(b)
	tag := `"` + sum.Hex()[:32] + `"`
	w.Header().Set("ETag", tag)
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(http.StatusOK)
	_, err := w.Write(b)
	return err
}

// query says which view is asked for.
type query struct {
	repo string // part of the name of the repositories shown
	page int    // from 1
}

func parseQuery(raw string) (query, error) {
	q := query{page: 1}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	for name, vs := range values {
		switch {
		case len(vs) != 1:
			return q, fmt.Errorf("%w: %q is given twice", ErrRequest, name)
		case name == "repo" && len(vs[0]) <= maxFilter && utf8.ValidString(vs[0]):
			q.repo = vs[0]
		case name == "page":
			if q.page, err = strconv.Atoi(vs[0]); err != nil || q.page < 1 {
				return q, fmt.Errorf("%w: page %q: want a number from 1 on", ErrRequest, vs[0])
			}
		default:
			return q, fmt.Errorf("%w: query parameter %q is unknown or too long: want repo and page", ErrRequest, name)
		}
	}
	return q, nil
}

func (q query) link(page int) string {
	v := url.Values{}
	if q.repo != "" {
		v.Set("repo", q.repo)
	}
	if page > 1 {
		v.Set("page", strconv.Itoa(page))
	}
	if len(v) == 0 {
		return Path
	}
	return Path + "?" + v.Encode()
}
