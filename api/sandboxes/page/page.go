// Package page is the page for people at a worker's address: which sandboxes there are,
// what they use, and how the last ones ended. Everything on it comes from hostile
// guests and their makers, and is escaped.
package page

import (
	"bytes"
	"context"
	"embed"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"time"

	"quarry/worker/sandbox"
)

// Node is what the page needs of a node.
type Node interface {
	List(ctx context.Context, f sandbox.Filter) ([]sandbox.Sandbox, string, error)
	Usage(ctx context.Context, id string) (sandbox.Usage, error)
	Status(ctx context.Context) (sandbox.NodeStatus, error)
}

const (
	// maxShown bounds the sandboxes of one page, of those that live and those that
	// have ended.
	maxShown = 256
	// patience bounds the making of a page: usage is asked of every sandbox.
	patience = 5 * time.Second
)

//go:embed page.html page.css page.js
var files embed.FS

// Page is the page of one worker. Safe for concurrent use.
type Page struct {
	node Node
	now  func() time.Time
	html *template.Template
}

// New returns the page of n; a nil now is time.Now.
func New(n Node, now func() time.Time) *Page {
	if now == nil {
		now = time.Now
	}
	funcs := template.FuncMap{
		"mib": func(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) },
		"percent": func(part, whole int64) int64 {
			if whole <= 0 {
				return 0
			}
			return min(100, 100*part/whole)
		},
		"seconds": func(ms int64) string { return (time.Duration(ms) * time.Millisecond).Round(time.Second).String() },
	}
	return &Page{node: n, now: now, html: template.Must(template.New("page.html").Funcs(funcs).ParseFS(files, "page.html"))}
}

// row is one sandbox as the page shows it.
type row struct {
	sandbox.Sandbox
	Age   string
	Usage sandbox.Usage
	Known bool // its usage was had
}

// view is what the template shows.
type view struct {
	Status sandbox.NodeStatus
	States []sandbox.State
	Live   []row
	Ended  []row
	More   bool
}

// ServeHTTP implements http.Handler.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/page.css":
		p.asset(w, "page.css", "text/css; charset=utf-8")
		return
	case "/page.js":
		p.asset(w, "page.js", "text/javascript; charset=utf-8")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	var b bytes.Buffer
	v, err := p.look(ctx)
	if err == nil {
		err = p.html.Execute(&b, v)
	}
	if err != nil {
		http.Error(w, "the page cannot be made: "+err.Error(), http.StatusInternalServerError)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	_, _ = w.Write(b.Bytes()) // who asked may have gone
}

func (p *Page) asset(w http.ResponseWriter, name, kind string) {
	b, err := files.ReadFile(name)
	if err != nil {
		panic(err) // it is embedded
	}
	w.Header().Set("Content-Type", kind)
	_, _ = w.Write(b)
}

// look asks the node for what the page shows.
func (p *Page) look(ctx context.Context) (view, error) {
	var v view
	var err error
	if v.Status, err = p.node.Status(ctx); err != nil {
		return v, err
	}
	for s := range v.Status.Sandboxes {
		v.States = append(v.States, s)
	}
	slices.Sort(v.States)
	live, next, err := p.node.List(ctx, sandbox.Filter{Limit: maxShown})
	if err != nil {
		return v, err
	}
	v.More = next != ""
	for _, sb := range live {
		r := p.row(sb)
		if u, err := p.node.Usage(ctx, sb.ID); err == nil {
			r.Usage, r.Known = u, true
		}
		v.Live = append(v.Live, r)
	}
	ended, _, err := p.node.List(ctx, sandbox.Filter{State: sandbox.StateEnded, Limit: maxShown})
	if err != nil {
		return v, err
	}
	for _, sb := range ended {
		if sb.End != nil {
			v.Ended = append(v.Ended, p.row(sb))
		}
	}
	slices.SortFunc(v.Ended, func(a, b row) int { return b.End.At.Compare(a.End.At) })
	return v, nil
}

func (p *Page) row(sb sandbox.Sandbox) row {
	return row{Sandbox: sb, Age: p.now().Sub(sb.Created).Round(time.Second).String()}
}
