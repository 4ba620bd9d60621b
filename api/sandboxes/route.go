package sandboxes

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"quarry/worker/sandbox"
)

// who may use a route.
type who int

const (
	anyone  who = iota // also without a token
	owner              // who may make sandboxes, and the token of the sandbox that the path names
	maker              // a token of scope run
	manager            // a token of scope admin
)

// call is one request to a route, taken apart.
type call struct {
	w    *response
	r    *http.Request
	id   string // of the sandbox, "" for none
	exec string // of the exec, "" for none
	q    url.Values
}

// route is one row of the table.
type route struct {
	method string
	path   string // {id} and {exec} stand for one element
	query  []string
	who    who
	name   string // label in metrics and logs
	serve  func(*Handler, call) error
}

// routes is the table of routes. openapi.yaml has the same ones.
var routes = []route{
	{"POST", "/v1/sandboxes", nil, maker, "create", (*Handler).create},
	{"GET", "/v1/sandboxes", []string{"label", "group", "state", "after", "limit"}, maker, "list", (*Handler).list},
	{"GET", "/v1/sandboxes/{id}", nil, owner, "get", (*Handler).get},
	{"DELETE", "/v1/sandboxes/{id}", nil, owner, "delete", (*Handler).remove},
	{"POST", "/v1/sandboxes/{id}/pause", []string{"expect_ms"}, owner, "pause", (*Handler).pause},
	{"POST", "/v1/sandboxes/{id}/resume", nil, owner, "resume", (*Handler).resume},
	{"POST", "/v1/sandboxes/{id}/hibernate", nil, owner, "hibernate", (*Handler).hibernate},
	{"POST", "/v1/sandboxes/{id}/wake", nil, owner, "wake", (*Handler).wake},
	{"POST", "/v1/sandboxes/{id}/ttl", nil, owner, "ttl", (*Handler).ttl},
	{"GET", "/v1/sandboxes/{id}/usage", nil, owner, "usage", (*Handler).usage},
	{"POST", "/v1/sandboxes/{id}/exec", nil, owner, "exec", (*Handler).exec},
	{"GET", "/v1/sandboxes/{id}/exec", nil, owner, "execs", (*Handler).execs},
	{"GET", "/v1/sandboxes/{id}/exec/{exec}", []string{"wait_ms"}, owner, "exec_state", (*Handler).execState},
	{"GET", "/v1/sandboxes/{id}/exec/{exec}/stream", []string{"stdout", "stderr"}, owner, "exec_stream", (*Handler).execStream},
	{"GET", "/v1/sandboxes/{id}/exec/{exec}/output", []string{"stream", "offset"}, owner, "exec_output", (*Handler).output},
	{"POST", "/v1/sandboxes/{id}/exec/{exec}/stdin", []string{"offset", "end"}, owner, "exec_stdin", (*Handler).stdin},
	{"POST", "/v1/sandboxes/{id}/exec/{exec}/signal", nil, owner, "exec_signal", (*Handler).signal},
	{"POST", "/v1/sandboxes/{id}/exec/{exec}/resize", nil, owner, "exec_resize", (*Handler).resize},
	{"GET", "/v1/sandboxes/{id}/files", []string{"path"}, owner, "file_read", (*Handler).readFile},
	{"PUT", "/v1/sandboxes/{id}/files", []string{"path", "mode", "user", "mkdirs"}, owner, "file_write", (*Handler).writeFile},
	{"DELETE", "/v1/sandboxes/{id}/files", []string{"path"}, owner, "file_remove", (*Handler).removeFile},
	{"GET", "/v1/sandboxes/{id}/stat", []string{"path"}, owner, "file_stat", (*Handler).statFile},
	{"GET", "/v1/sandboxes/{id}/list", []string{"path", "depth"}, owner, "file_list", (*Handler).listFiles},
	{"GET", "/v1/sandboxes/{id}/tar", []string{"path", "exclude", "max_bytes"}, owner, "tar_down", (*Handler).tarDown},
	{"POST", "/v1/sandboxes/{id}/tar", []string{"path"}, owner, "tar_up", (*Handler).tarUp},
	{"POST", "/v1/sandboxes/{id}/shares", nil, maker, "share_give", (*Handler).give},
	{"DELETE", "/v1/sandboxes/{id}/shares", []string{"target"}, maker, "share_take", (*Handler).take},
	{"GET", "/v1/sandboxes/{id}/network", nil, owner, "network", (*Handler).network},
	{"PUT", "/v1/sandboxes/{id}/network", nil, maker, "network_set", (*Handler).setNetwork},
	{"GET", "/v1/events", []string{"after", "sandbox"}, maker, "events", (*Handler).events},
	{"GET", "/v1/node", nil, maker, "node", (*Handler).node},
	{"POST", "/v1/node/drain", nil, manager, "drain", (*Handler).drain},
	{"GET", "/metrics", nil, manager, "metrics", (*Handler).serveMetrics},
	{"GET", "/healthz", nil, anyone, "healthz", (*Handler).health},
	{"GET", "/readyz", nil, anyone, "readyz", (*Handler).ready},
	{"GET", "/", nil, maker, "page", (*Handler).page},
	{"GET", "/page.css", nil, anyone, "page_css", (*Handler).pageAsset},
	{"GET", "/page.js", nil, anyone, "page_js", (*Handler).pageAsset},
}

const (
	// maxTarget bounds path and query of a request: a file's path of 4096 bytes, each
	// of them escaped, and excludes beside it.
	maxTarget = 32 << 10
	// maxID bounds what may stand for {id} and {exec}.
	maxID = 64
)

// find parses a request line. The row is nil when there is none.
func find(method, path, query string) (*route, call, error) {
	var c call
	if len(path)+len(query) > maxTarget {
		return nil, c, fmt.Errorf("%w: the request line has more than %d bytes", sandbox.ErrTooLarge, maxTarget)
	}
	elements := strings.Split(path, "/")
	known := false
	for i := range routes {
		rt := &routes[i]
		id, exec, ok := match(rt.path, elements)
		if !ok {
			continue
		}
		known = true
		if rt.method != method {
			continue
		}
		c.id, c.exec = id, exec
		var err error
		if c.q, err = parseQuery(query, rt.query); err != nil {
			return rt, c, err
		}
		return rt, c, nil
	}
	if known {
		return nil, c, fmt.Errorf("%w: %s %s", ErrMethod, printable(method), path)
	}
	if len(elements) > 3 && elements[1] == "v1" && elements[2] == "sandboxes" && !validID(elements[3]) {
		return nil, c, fmt.Errorf("%w: %q is no id", sandbox.ErrUnknown, elements[3])
	}
	if len(elements) > 5 && elements[2] == "sandboxes" && elements[4] == "exec" && !validID(elements[5]) {
		return nil, c, fmt.Errorf("%w: %q is no id", sandbox.ErrExecUnknown, elements[5])
	}
	return nil, c, fmt.Errorf("%w: %s: the routes are in openapi.yaml, and begin with /v1/", ErrNoRoute, path)
}

func match(pattern string, elements []string) (id, exec string, ok bool) {
	want := strings.Split(pattern, "/")
	if len(want) != len(elements) {
		return "", "", false
	}
	for i, w := range want {
		switch got := elements[i]; {
		case w == "{id}" && validID(got):
			id = got
		case w == "{exec}" && validID(got):
			exec = got
		case w != got:
			return "", "", false
		}
	}
	return id, exec, true
}

// validID says what sandboxes and execs may be called: it goes into paths.
func validID(s string) bool {
	if s == "" || len(s) > maxID || s[0] == '.' {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_', c == '.':
		default:
			return false
		}
	}
	return true
}

// parseQuery reads the query; parameters that the route does not have are refused,
// and so is one that is given twice and may not be.
func parseQuery(query string, allowed []string) (url.Values, error) {
	q, err := url.ParseQuery(query)
	if err != nil {
		return nil, fmt.Errorf("%w: query: %w", sandbox.ErrInvalid, err)
	}
	for key, values := range q {
		switch {
		case !slices.Contains(allowed, key):
			return nil, fmt.Errorf("%w: query parameter %q: want one of %q", sandbox.ErrInvalid, key, allowed)
		case len(values) > 1 && key != "label" && key != "exclude":
			return nil, fmt.Errorf("%w: query parameter %q is given %d times", sandbox.ErrInvalid, key, len(values))
		case len(values) > maxRepeated:
			return nil, fmt.Errorf("%w: query parameter %q is given %d times, at most %d", sandbox.ErrTooLarge, key, len(values), maxRepeated)
		}
	}
	return q, nil
}

// maxRepeated bounds how often label and exclude may be given.
const maxRepeated = 256

func printable(s string) string {
	if len(s) > 16 || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "that method"
	}
	return s
}
