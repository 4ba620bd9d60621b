package registry

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/api/access"
	"quarry/api/gate"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/jobs"
	"quarry/store/registry"
)

// What only requests can have wrong.
var (
	errNoRoute    = errors.New("no such route")
	errMethod     = errors.New("method is not allowed")
	errQuery      = errors.New("query is invalid")
	errTagInvalid = errors.New("tag is invalid")
	errRange      = errors.New("range is not in the blob")
	errHeader     = errors.New("header is invalid")
)

// row says how one Go error appears on the wire.
type row struct {
	target error // matched with errors.Is
	status int
	code   string // of the OCI distribution specification, or ours where it has none
	retry  bool   // the same request may succeed later
	bound  string // what the request was beyond, in the metric; "" when nothing
}

// table is the only place where Go errors become answers of the registry. The first
// row that matches wins.
var table = []row{
	{registry.ErrBody, http.StatusBadRequest, "BLOB_UPLOAD_INVALID", false, ""},
	{access.ErrUnauthenticated, http.StatusUnauthorized, "UNAUTHORIZED", false, ""},
	{access.ErrForbidden, http.StatusForbidden, "DENIED", false, ""},
	{access.ErrUnavailable, http.StatusServiceUnavailable, "UNAVAILABLE", true, ""},
	{bucket.ErrUnavailable, http.StatusServiceUnavailable, "UNAVAILABLE", true, ""},
	{errNoRoute, http.StatusNotFound, "UNSUPPORTED", false, ""},
	{errMethod, http.StatusMethodNotAllowed, "UNSUPPORTED", false, ""},
	{errQuery, http.StatusBadRequest, "PAGINATION_NUMBER_INVALID", false, ""},
	{errTagInvalid, http.StatusBadRequest, "TAG_INVALID", false, ""},
	{errRange, http.StatusRequestedRangeNotSatisfiable, "RANGE_INVALID", false, ""},
	{errHeader, http.StatusBadRequest, "BLOB_UPLOAD_INVALID", false, ""},
	{registry.ErrNameInvalid, http.StatusBadRequest, "NAME_INVALID", false, ""},
	{registry.ErrNameUnknown, http.StatusNotFound, "NAME_UNKNOWN", false, ""},
	{registry.ErrManifestBlobUnknown, http.StatusBadRequest, "MANIFEST_BLOB_UNKNOWN", false, ""},
	{registry.ErrBlobUnknown, http.StatusNotFound, "BLOB_UNKNOWN", false, ""},
	{registry.ErrUploadUnknown, http.StatusNotFound, "BLOB_UPLOAD_UNKNOWN", false, ""},
	{registry.ErrUploadBusy, http.StatusConflict, "BLOB_UPLOAD_INVALID", true, ""},
	{registry.ErrUploadRange, http.StatusRequestedRangeNotSatisfiable, "BLOB_UPLOAD_INVALID", false, ""},
	{registry.ErrUploads, http.StatusTooManyRequests, "TOOMANYREQUESTS", true, "uploads"},
	{registry.ErrHolderUploads, http.StatusTooManyRequests, "TOOMANYREQUESTS", true, "token_uploads"},
	{registry.ErrHolderSpace, http.StatusTooManyRequests, "TOOMANYREQUESTS", true, "token_upload_space"},
	{gate.ErrHolder, http.StatusTooManyRequests, "TOOMANYREQUESTS", true, "token_memory"},
	{gate.ErrFull, http.StatusServiceUnavailable, "UNAVAILABLE", true, "memory"},
	{jobs.ErrFull, http.StatusTooManyRequests, "TOOMANYREQUESTS", true, "queue"},
	{registry.ErrUploadSpace, http.StatusTooManyRequests, "TOOMANYREQUESTS", true, "upload_space"},
	{registry.ErrTooLarge, http.StatusRequestEntityTooLarge, "SIZE_INVALID", false, "too_large"},
	{registry.ErrManifestInvalid, http.StatusBadRequest, "MANIFEST_INVALID", false, ""},
	{registry.ErrManifestUnknown, http.StatusNotFound, "MANIFEST_UNKNOWN", false, ""},
	{registry.ErrSizeInvalid, http.StatusBadRequest, "SIZE_INVALID", false, ""},
	{registry.ErrDigestInvalid, http.StatusBadRequest, "DIGEST_INVALID", false, ""},
	{registry.ErrDamaged, http.StatusInternalServerError, "DAMAGED", false, ""},
	{store.ErrReadOnly, http.StatusMisdirectedRequest, "UNSUPPORTED", false, ""},
	{catalog.ErrFenced, http.StatusServiceUnavailable, "FENCED", false, ""},
	{bucket.ErrDamaged, http.StatusInternalServerError, "DAMAGED", false, ""},
	{syscall.ENOSPC, http.StatusInsufficientStorage, "DISK_FULL", false, "disk"},
	{syscall.EDQUOT, http.StatusInsufficientStorage, "DISK_FULL", false, "disk"},
	{context.DeadlineExceeded, http.StatusGatewayTimeout, "TIMEOUT", true, ""},
	{context.Canceled, statusClientGone, "CANCELED", true, ""},
}

// NewRefusals returns the metric of Config.Refusals, for its owner to register.
func NewRefusals() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "quarry_registry_refusals_total", Help: "Requests to /v2/ that were beyond a bound, by which.",
	}, []string{"bound"})
}

// statusClientGone is nginx's code for a client that went away; it only shows up in
// logs, nobody is left to read it.
const statusClientGone = 499

// retryAfter is what a client that may try again is asked to wait, in seconds.
const retryAfter = 5

// codeUnknown is the code of what the table does not know.
const codeUnknown = "UNKNOWN"

// lookup finds the row of an error; what the table does not know is internal.
func lookup(err error) row {
	for _, r := range table {
		if errors.Is(err, r.target) {
			return r
		}
	}
	return row{err, http.StatusInternalServerError, codeUnknown, true, ""}
}

// errorBody is the document that the specification wants.
type errorBody struct {
	Errors []errorEntry `json:"errors"`
}

type errorEntry struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// message is what a client is told. The text of an error of the disk, or of one that
// nobody foresaw, may have paths of this machine, which are for its log.
func message(r row, err error) string {
	if errors.Is(r.target, bucket.ErrUnavailable) {
		return "the store cannot reach its bucket: its log says why, under the X-Request-Id of this answer"
	}
	switch r.status {
	case http.StatusInsufficientStorage:
		return "the disk of the store is full: what is stored stays, and the push goes on when there is room"
	case http.StatusInternalServerError:
		if r.code == codeUnknown {
			return "the store failed: its log says why, under the X-Request-Id of this answer"
		}
	}
	return err.Error()
}

// writeError answers with an error. Headers that a handler set for it, where an
// upload goes on, stay.
func writeError(w http.ResponseWriter, err error) {
	r := lookup(err)
	b, jsonErr := json.Marshal(errorBody{[]errorEntry{{r.code, message(r, err)}}})
	if jsonErr != nil {
		panic(jsonErr) // two strings
	}
	var refusal *access.Refusal
	if errors.As(err, &refusal) && len(refusal.Challenges) > 0 {
		w.Header()["Www-Authenticate"] = refusal.Challenges
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	if r.retry && r.status != statusClientGone {
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
	}
	w.WriteHeader(r.status)
	_, _ = w.Write(b) // the client is gone if it fails
}
