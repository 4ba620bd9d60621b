package api

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"quarry/api/access"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
)

// maxTarget bounds the path and the query of a request: a reference is at most
// some 400 bytes, so 2 KiB is room enough even with every byte escaped.
const maxTarget = 2048

// maxLeaseID bounds the id of a lease.
const maxLeaseID = 64

// op is what a request asks for.
type op int

const (
	opNone op = iota
	opImages
	opImage
	opImageDelete
	opTrace
	opSignatures
	opSign
	opStart
	opBootstrap
	opConfig
	opChunk
	opBatch
	opBlob
	opConvert
	opCheck
	opRebuild
	opGC
	opPins
	opPin
	opUnpin
	opLeases
	opLeaseGet
	opLeasePut
	opLeaseDelete
	opStats
	opMetrics
	opHealth
	opReady
	opJobs
	opJob
	opJobEvents
	opJobsEvents
	opToken
	opPage
	opPageAsset
)

// writes says whether the operation changes the store, which is its writer's.
func (o op) writes() bool {
	switch o {
	case opImageDelete, opTrace, opSign, opConvert, opCheck, opGC, opPin, opUnpin:
		return true
	}
	return false
}

// route is a parsed request line. Which fields are set depends on op.
type route struct {
	op       op
	ref      image.Ref
	platform *image.Platform
	have     *chunk.Digest // image id
	digest   chunk.Digest
	lease    string
	mount    bool // the lease is asked for by a worker
	after    string
	limit    int
	quick    bool
	job      string
	jobs     jobs.Filter
}

// pagePath is where the page for people is. It is no prefix of other paths.
const pagePath = "/"

// routeRow is one row of the table of routes. A path that ends in '/' is a
// prefix, and what follows it is the argument, which must not be empty.
type routeRow struct {
	path    string
	methods map[string]op
	arg     func(*route, string) error
	query   []string // parameters allowed
	local   bool     // only on the local socket, or for a token of scope admin
	form    bool     // whoever answers reads the query
	name    string   // label in metrics and logs
}

var routeTable = []routeRow{
	{path: "/v1/images", methods: get(opImages), query: []string{"after", "limit"}, name: "images"},
	{path: "/v1/images/", methods: map[string]op{"GET": opImage, "DELETE": opImageDelete, "POST": opTrace},
		arg: (*route).setImage, query: []string{"platform"}, name: "image"},
	{path: "/v1/signatures/", methods: map[string]op{"GET": opSignatures, "POST": opSign}, arg: (*route).setRef, name: "signatures"},
	{path: "/v1/jobs", methods: get(opJobs), query: []string{"after", "limit", "state", "repo", "source"}, name: "jobs"},
	{path: "/v1/jobs/events", methods: get(opJobsEvents), name: "jobs_events"},
	{path: "/v1/jobs/", methods: get(opJob), arg: (*route).setJob, name: "job"},
	{path: "/v1/start/", methods: get(opStart), arg: (*route).setRef, query: []string{"platform", "have"}, name: "start"},
	{path: "/v1/bootstraps/", methods: get(opBootstrap), arg: (*route).setDigest, name: "bootstrap"},
	{path: "/v1/configs/", methods: get(opConfig), arg: (*route).setDigest, name: "config"},
	{path: "/v1/chunks/", methods: get(opChunk), arg: (*route).setDigest, name: "chunk"},
	{path: "/v1/chunks:batchGet", methods: post(opBatch), name: "batch_get"},
	{path: "/v1/blobs/", methods: map[string]op{"GET": opBlob, "HEAD": opBlob}, arg: (*route).setHex, name: "blob"},
	{path: "/v1/convert", methods: post(opConvert), local: true, name: "convert"},
	{path: "/v1/admin/check", methods: post(opCheck), query: []string{"quick"}, local: true, name: "check"},
	{path: "/v1/admin/rebuild", methods: post(opRebuild), local: true, name: "rebuild"},
	{path: "/v1/admin/gc", methods: post(opGC), local: true, name: "gc"},
	{path: "/v1/admin/pins", methods: get(opPins), local: true, name: "pins"},
	{path: "/v1/admin/pins/", methods: map[string]op{"PUT": opPin, "DELETE": opUnpin}, arg: (*route).setRef, local: true, name: "pin"},
	{path: "/v1/leases/", methods: map[string]op{"GET": opLeaseGet, "PUT": opLeasePut, "DELETE": opLeaseDelete},
		arg: (*route).setMount, name: "mount"},
	{path: "/v1/admin/leases", methods: get(opLeases), local: true, name: "leases"},
	{path: "/v1/admin/leases/", methods: map[string]op{"GET": opLeaseGet, "PUT": opLeasePut, "DELETE": opLeaseDelete},
		arg: (*route).setLease, local: true, name: "lease"},
	{path: "/v1/stats", methods: get(opStats), name: "stats"},
	{path: "/metrics", methods: get(opMetrics), name: "metrics"},
	{path: "/healthz", methods: get(opHealth), name: "health"},
	{path: "/readyz", methods: get(opReady), name: "ready"},
	{path: access.TokenPath, methods: map[string]op{"GET": opToken, "POST": opToken}, form: true, name: "token"},
	{path: pagePath, methods: get(opPage), form: true, name: "page"},
	{path: "/page.css", methods: get(opPageAsset), name: "page"},
	{path: "/page.js", methods: get(opPageAsset), name: "page"},
}

func get(o op) map[string]op  { return map[string]op{http.MethodGet: o} }
func post(o op) map[string]op { return map[string]op{http.MethodPost: o} }

// parse reads a request line. path is the path as sent, still escaped. It is a
// pure function, so that what a hostile request line can do is decided, tested
// and fuzzed here alone. The row is nil when no route has that path.
func parse(method, path, query string) (route, *routeRow, error) {
	clean, err := cleanPath(path)
	if err != nil {
		return route{}, nil, err
	}
	row, arg := findRoute(clean)
	if row == nil {
		return route{}, nil, fmt.Errorf("%w: %s", ErrNoRoute, clean)
	}
	rt := route{limit: MaxNames}
	var ok bool
	if rt.op, ok = row.methods[method]; !ok {
		return route{}, row, methodError(method, clean, row)
	}
	if row.arg != nil {
		if err := row.arg(&rt, arg); err != nil {
			return route{}, row, fmt.Errorf("%w: %w", ErrBadRequest, err)
		}
	}
	if row.form {
		return rt, row, nil
	}
	if err := rt.setQuery(query, row.query); err != nil {
		return route{}, row, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	return rt, row, nil
}

// cleanPath unescapes a path and refuses every spelling that a proxy or a file
// system might read differently: escaped slashes, empty and dot elements,
// control bytes and backslashes.
func cleanPath(path string) (string, error) {
	if len(path) > maxTarget {
		return "", fmt.Errorf("%w: path of %d bytes, at most %d are allowed", ErrBadRequest, len(path), maxTarget)
	}
	if strings.Contains(strings.ToLower(path), "%2f") {
		return "", fmt.Errorf("%w: path %q has an escaped slash", ErrBadRequest, path)
	}
	clean, err := url.PathUnescape(path)
	if err != nil {
		return "", fmt.Errorf("%w: path %q: %w", ErrBadRequest, path, err)
	}
	if !strings.HasPrefix(clean, "/") {
		return "", fmt.Errorf("%w: path %q does not start with a slash", ErrBadRequest, clean)
	}
	for i := range len(clean) {
		if c := clean[i]; c <= ' ' || c >= 0x7f || c == '\\' {
			return "", fmt.Errorf("%w: path %q has byte %#02x", ErrBadRequest, clean, c)
		}
	}
	if clean == pagePath {
		return clean, nil
	}
	for _, elem := range strings.Split(clean[1:], "/") {
		if elem == "" || elem == "." || elem == ".." {
			return "", fmt.Errorf("%w: path %q has an empty or dot element", ErrBadRequest, clean)
		}
	}
	return clean, nil
}

func findRoute(path string) (*routeRow, string) {
	for i := range routeTable {
		row := &routeTable[i]
		if row.path == path {
			return row, ""
		}
		if arg, ok := strings.CutPrefix(path, row.path); ok && strings.HasSuffix(row.path, "/") && row.path != pagePath {
			return row, arg
		}
	}
	return nil, ""
}

func methodError(method, path string, row *routeRow) error {
	var allowed []string
	for m := range row.methods {
		allowed = append(allowed, m)
	}
	slices.Sort(allowed)
	return &detailedError{
		err:     fmt.Errorf("%w: %q on %s, use %s", ErrMethod, method, path, strings.Join(allowed, " or ")),
		details: map[string][]string{"allow": allowed},
	}
}

func (rt *route) setRef(s string) (err error) {
	rt.ref, err = image.ParseRef(s)
	return err
}

// setImage reads a reference, or <image id>/trace where a trace is sent.
func (rt *route) setImage(s string) (err error) {
	if rt.op != opTrace {
		return rt.setRef(s)
	}
	id, ok := strings.CutSuffix(s, "/trace")
	if !ok {
		return fmt.Errorf("%q: want an image id and /trace", s)
	}
	return rt.setHex(id)
}

// setJob reads <job id>, or <job id>/events.
func (rt *route) setJob(s string) (err error) {
	id, events := strings.CutSuffix(s, "/events")
	if events {
		rt.op = opJobEvents
	}
	if _, err := chunk.ParseHex(id); err != nil {
		return fmt.Errorf("job id: %w", err)
	}
	rt.job = id
	return nil
}

func (rt *route) setDigest(s string) (err error) {
	rt.digest, err = chunk.Parse(s)
	return err
}

// setHex reads the bare hex digits by which nydusd names a blob.
func (rt *route) setHex(s string) (err error) {
	rt.digest, err = chunk.ParseHex(s)
	return err
}

// setMount is setLease for workers, who need not be admins.
func (rt *route) setMount(s string) error {
	rt.mount = true
	return rt.setLease(s)
}

func (rt *route) setLease(s string) error {
	if len(s) > maxLeaseID {
		return fmt.Errorf("lease id of %d bytes, at most %d are allowed", len(s), maxLeaseID)
	}
	for _, c := range s {
		if !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-", c) {
			return fmt.Errorf("lease id %q: want letters, digits, '.', '_' and '-'", s)
		}
	}
	rt.lease = s
	return nil
}

func (rt *route) setQuery(query string, allowed []string) error {
	if len(query) > maxTarget {
		return fmt.Errorf("query of %d bytes, at most %d are allowed", len(query), maxTarget)
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		return fmt.Errorf("query %q: %w", query, err)
	}
	for name, vs := range values {
		if len(vs) != 1 || !slices.Contains(allowed, name) {
			return fmt.Errorf("query parameter %q is unknown here or given twice", name)
		}
		if err := rt.setParam(name, vs[0]); err != nil {
			return fmt.Errorf("query parameter %s: %w", name, err)
		}
	}
	return nil
}

func (rt *route) setParam(name, value string) error {
	switch name {
	case "platform":
		p, err := image.ParsePlatform(value)
		if err != nil {
			return err
		}
		rt.platform = &p
	case "have":
		id, err := chunk.ParseHex(value)
		if err != nil {
			return err
		}
		rt.have = &id
	case "after":
		rt.after = value
	case "limit":
		n, err := strconv.Atoi(value)
		if err != nil || n < 1 || n > MaxNames {
			return fmt.Errorf("%q: want a number from 1 to %d", value, MaxNames)
		}
		rt.limit = n
	case "state":
		rt.jobs.State = jobs.State(value)
		if !slices.Contains([]jobs.State{jobs.Queued, jobs.Running, jobs.Done, jobs.Failed}, rt.jobs.State) {
			return fmt.Errorf("%q: want queued, running, done or failed", value)
		}
	case "repo":
		rt.jobs.Repo = value
		return image.ValidateRepo(value)
	case "source":
		d, err := chunk.Parse(value)
		rt.jobs.Source = d
		return err
	case "quick":
		quick, err := strconv.ParseBool(value)
		if err != nil {
			return err
		}
		rt.quick = quick
	}
	return nil
}
