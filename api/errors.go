package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"syscall"
	"time"

	"quarry/api/access"
	"quarry/api/gate"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/jobs"
)

// Who has to act on an error.
const (
	BlameUser  = "user"  // the request: wrong name, wrong range, too much asked for
	BlameInfra = "infra" // the store node, its disk or its network
)

// Error is the one error shape of the HTTP contract. The client returns it with
// what the server said, so errors.Is finds the same sentinel on both sides.
type Error struct {
	Status     int                 `json:"-"`                 // HTTP status
	RetryAfter time.Duration       `json:"-"`                 // from Retry-After, 0 when there was none
	Code       string              `json:"code"`              // constant, for programs
	Message    string              `json:"message"`           // a sentence, for people
	Retryable  bool                `json:"retryable"`         // the same request may succeed later
	Blame      string              `json:"blame"`             // BlameUser or BlameInfra
	RequestID  string              `json:"request_id"`        // to find the server's log line
	Details    map[string][]string `json:"details,omitempty"` // for example "tags": the tags there are
}

// errorBody is the JSON document that carries an Error.
type errorBody struct {
	Error *Error `json:"error"`
}

func (e *Error) Error() string { return e.Message }

// Is makes a decoded error match the sentinel that the server's table turned
// into its code, and store.ErrUnauthorised by its status: who asks for credentials
// is mostly a proxy, which has no codes.
func (e *Error) Is(target error) bool {
	if target == store.ErrUnauthorised {
		return e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden
	}
	for _, r := range errorTable {
		if r.code == e.Code && r.target == target {
			return true
		}
	}
	return false
}

// Sentinels of the contract. What callers branch on has one here or in the
// package that owns the thing.
var (
	ErrBadRequest      = errors.New("bad request")
	ErrNoRoute         = errors.New("no such route")
	ErrMethod          = errors.New("method not allowed")
	ErrCrossSite       = errors.New("refused: it comes from another site's page")
	ErrHost            = errors.New("refused: this server, which asks for no token, is asked as localhost or by its address only")
	ErrTooLarge        = errors.New("request body is too large")
	ErrTooManyDigests  = errors.New("too many digests")
	ErrRange           = errors.New("range not satisfiable")
	ErrBusy            = gate.ErrFull
	ErrRepoUnknown     = errors.New("repository not found")
	ErrTagUnknown      = errors.New("tag not found")
	ErrImageUnknown    = errors.New("image not found")
	ErrPlatformUnknown = errors.New("platform not found")
	ErrImageFailed     = errors.New("image conversion failed")
	ErrSource          = errors.New("source is out of reach")
	ErrPending         = errors.New("image is not ready")
	ErrConverting      = errors.New("image is being converted")
	ErrUnsigned        = errors.New("image is not signed yet")
	ErrLeaseUnknown    = errors.New("lease not found")
	ErrLeasesFull      = errors.New("too many leases")
	ErrObjectCorrupt   = errors.New("stored object is damaged")
	ErrNotOffered      = errors.New("not offered by this server")
	ErrBadTrace        = errors.New("not a trace of this image")
	ErrBadSignature    = errors.New("signature is refused")
	ErrMoved           = errors.New("it is not what was signed any more")

	ErrTooManyConnections = errors.New("too many connections")
	ErrSlowBody           = errors.New("request body came too slowly")
)

// statusClientGone is nginx's code for a client that went away; it only shows
// up in logs and metrics, nobody is left to read it.
const statusClientGone = 499

// errorRow says how one Go error appears on the wire.
type errorRow struct {
	target    error // matched with errors.Is
	status    int
	code      string
	retryable bool
	blame     string
}

// errorTable is the only place where Go errors become HTTP answers. The first
// row that matches wins.
var errorTable = []errorRow{
	{errClientStalled, statusClientGone, "client_stalled", true, BlameUser},
	{errClientGone, statusClientGone, "client_gone", true, BlameUser},
	{ErrBadRequest, http.StatusBadRequest, "bad_request", false, BlameUser},
	{ErrBadTrace, http.StatusBadRequest, "bad_trace", false, BlameUser},
	{ErrBadSignature, http.StatusUnprocessableEntity, "signature_refused", false, BlameUser},
	{ErrMoved, http.StatusConflict, "moved", false, BlameUser},
	{ErrNoRoute, http.StatusNotFound, "no_route", false, BlameUser},
	{ErrMethod, http.StatusMethodNotAllowed, "method_not_allowed", false, BlameUser},
	{ErrCrossSite, http.StatusForbidden, "cross_site", false, BlameUser},
	{ErrHost, http.StatusMisdirectedRequest, "wrong_host", false, BlameUser},
	{ErrTooLarge, http.StatusRequestEntityTooLarge, "too_large", false, BlameUser},
	{ErrSlowBody, http.StatusRequestTimeout, "slow_body", true, BlameUser},
	{ErrTooManyDigests, http.StatusRequestEntityTooLarge, "too_many_digests", false, BlameUser},
	{ErrRange, http.StatusRequestedRangeNotSatisfiable, "range_not_satisfiable", false, BlameUser},
	{access.ErrForm, http.StatusBadRequest, "bad_token_request", false, BlameUser},
	{access.ErrUnauthenticated, http.StatusUnauthorized, "unauthorized", false, BlameUser},
	{access.ErrForbidden, http.StatusForbidden, "forbidden", false, BlameUser},
	{access.ErrUnavailable, http.StatusServiceUnavailable, "tokens_unreadable", true, BlameInfra},
	{ErrBusy, http.StatusServiceUnavailable, "busy", true, BlameInfra},
	{ErrTooManyConnections, http.StatusServiceUnavailable, "too_many_connections", true, BlameInfra},
	{bucket.ErrUnavailable, http.StatusServiceUnavailable, codeUnavailable, true, BlameInfra},
	{ErrRepoUnknown, http.StatusNotFound, "repo_unknown", false, BlameUser},
	{ErrTagUnknown, http.StatusNotFound, "tag_unknown", false, BlameUser},
	{ErrImageUnknown, http.StatusNotFound, "image_unknown", false, BlameUser},
	{ErrPlatformUnknown, http.StatusNotFound, "platform_unknown", false, BlameUser},
	{ErrImageFailed, http.StatusUnprocessableEntity, "image_failed", false, BlameUser},
	{ErrSource, http.StatusBadGateway, "source_unavailable", true, BlameInfra},
	{ErrPending, http.StatusAccepted, StatusPending, true, BlameInfra},
	{ErrConverting, http.StatusAccepted, StatusConverting, true, BlameInfra},
	{jobs.ErrFull, http.StatusTooManyRequests, "queue_full", true, BlameInfra},
	{jobs.ErrWatchers, http.StatusServiceUnavailable, "too_many_watchers", true, BlameInfra},
	{jobs.ErrUnknown, http.StatusNotFound, "job_unknown", false, BlameUser},
	{ErrUnsigned, http.StatusAccepted, StatusUnsigned, true, BlameInfra},
	{ErrLeaseUnknown, http.StatusNotFound, "lease_unknown", false, BlameUser},
	{ErrLeasesFull, http.StatusTooManyRequests, "leases_full", true, BlameInfra},
	{ErrObjectCorrupt, http.StatusInternalServerError, "object_corrupt", false, BlameInfra},
	{ErrNotOffered, http.StatusNotImplemented, "not_offered", false, BlameUser},
	{catalog.ErrStale, http.StatusConflict, "stale_serial", false, BlameUser},
	{catalog.ErrFenced, http.StatusServiceUnavailable, "fenced", false, BlameInfra},
	{catalog.ErrNotFound, http.StatusNotFound, "name_not_found", false, BlameUser},
	{ErrChunkCorrupt, http.StatusInternalServerError, "chunk_corrupt", false, BlameInfra},
	{store.ErrNotFound, http.StatusNotFound, "chunk_not_found", false, BlameUser},
	{store.ErrReadOnly, http.StatusMisdirectedRequest, "read_only", false, BlameUser},
	{bucket.ErrNotFound, http.StatusNotFound, "object_not_found", false, BlameUser},
	{syscall.ENOSPC, http.StatusInsufficientStorage, "disk_full", false, BlameInfra},
	{context.DeadlineExceeded, http.StatusGatewayTimeout, "timeout", true, BlameInfra},
	{context.Canceled, statusClientGone, "canceled", true, BlameUser},
}

// ErrChunkCorrupt stands in the table for *store.CorruptError, which is a type
// and not a sentinel.
var ErrChunkCorrupt = errors.New("chunk is damaged")

// errClientGone says that a write to the client failed: it has left.
var errClientGone = errors.New("client is gone")

// errClientStalled says that the client took too little in Config.StallTimeout.
var errClientStalled = errors.New("client takes nothing")

// toError maps any error to its answer; what the table does not know is an
// internal error that is worth one more try.
func toError(err error) *Error {
	var known *Error
	if errors.As(err, &known) {
		e := *known
		if e.Status == 0 { // built by a Config func, which knows no HTTP
			e.Status = http.StatusInternalServerError
		}
		return &e
	}
	e := &Error{
		Status: http.StatusInternalServerError, Code: codeInternal,
		Message: err.Error(), Retryable: true, Blame: BlameInfra,
	}
	var d *detailedError
	if errors.As(err, &d) {
		e.Details = d.details
	}
	if ref, ok := errors.AsType[*access.Refusal](err); ok && ref.Need != access.Any {
		e.Details = map[string][]string{"need": {string(ref.Need)}}
		if ref.Repo != "" {
			e.Details["repository"] = []string{ref.Repo}
		}
	}
	corrupt, damaged := asCorrupt(err), errors.Is(err, bucket.ErrDamaged)
	for _, r := range errorTable {
		if errors.Is(err, r.target) || corrupt && r.target == ErrChunkCorrupt || damaged && r.target == ErrObjectCorrupt {
			e.Status, e.Code, e.Retryable, e.Blame = r.status, r.code, r.retryable, r.blame
			break
		}
	}
	return e
}

// codeUnavailable is that of a bucket that is away.
const codeUnavailable = "bucket_unavailable"

// codeInternal is the code of what the table does not know.
const codeInternal = "internal"

// withoutPaths takes from an answer what may have paths of this machine, which are for
// its log and for who is on it.
func (e *Error) withoutPaths() {
	switch e.Code {
	case "disk_full":
		e.Message = "the disk of the store is full"
	case codeUnavailable:
		e.Message = "the store cannot reach its bucket: its log says why, with request id " + e.RequestID
	case codeInternal:
		e.Message = "the store failed: its log says why, with request id " + e.RequestID
	}
}

func asCorrupt(err error) bool {
	var c *store.CorruptError
	return errors.As(err, &c)
}

// detailedError adds to an error what a caller may want to show or choose from.
type detailedError struct {
	err     error
	details map[string][]string
}

func (e *detailedError) Error() string { return e.err.Error() }
func (e *detailedError) Unwrap() error { return e.err }

// ReadOnlyError is store.ErrReadOnly that says who writes the store, "" when that is
// not known.
func ReadOnlyError(writer string) error {
	if writer == "" {
		return fmt.Errorf("%w, and its writer has left no mark: send this to the writer", store.ErrReadOnly)
	}
	return &detailedError{
		err:     fmt.Errorf("%w: send this to its writer, %s", store.ErrReadOnly, writer),
		details: map[string][]string{"writer": {writer}},
	}
}

// damagedObject reports an object of the bucket whose bytes are not those its
// key promises.
func damagedObject(key string, want, got chunk.Digest) error {
	return fmt.Errorf("%w: %s: want digest %s, content has %s (convert the image again to heal it)",
		ErrObjectCorrupt, key, want, got)
}
