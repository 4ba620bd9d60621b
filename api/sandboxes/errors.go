package sandboxes

import (
	"context"
	"errors"
	"net/http"
	"time"

	"quarry/api/access"
	"quarry/worker/sandbox"
)

// Error is the one error shape of the contract. The client returns it with what the
// server said, so errors.Is finds the same sentinel of package sandbox on both sides.
type Error struct {
	Status     int           `json:"-"`                    // HTTP status
	RetryAfter time.Duration `json:"-"`                    // from Retry-After, 0 when there was none
	Code       string        `json:"code"`                 // constant, for programs
	Message    string        `json:"message"`              // a sentence, for people
	Retryable  bool          `json:"retryable"`            // the same request may succeed later
	Blame      string        `json:"blame"`                // sandbox.BlameUser, BlameAgent or BlameInfra
	SandboxID  string        `json:"sandbox_id,omitempty"` // that it is about
	RequestID  string        `json:"request_id"`           // to find the server's log line
	End        *sandbox.End  `json:"end,omitempty"`        // with code gone: how the sandbox ended
}

type errorBody struct {
	Error *Error `json:"error"`
}

func (e *Error) Error() string { return e.Message }

// Is makes a decoded error match the sentinel that the server's table turned into its
// code.
func (e *Error) Is(target error) bool {
	for _, r := range errorTable {
		if r.code == e.Code && r.target == target {
			return true
		}
	}
	return false
}

// Sentinels of the transport alone.
var (
	ErrNoRoute  = errors.New("no such route")
	ErrMethod   = errors.New("method not allowed")
	ErrHost     = errors.New("refused: this server, which asks for no token, is asked as localhost or by its address only")
	ErrLength   = errors.New("the body is shorter or longer than its Content-Length")
	ErrSlowBody = errors.New("request body came too slowly")
	ErrBody     = errors.New("the body cannot be read")
	ErrEncoding = errors.New("bodies are taken as they are: send it without Content-Encoding")
)

// statusClientGone is nginx's code for a client that went away: nobody is left to
// read it.
const statusClientGone = 499

type errorRow struct {
	target    error // matched with errors.Is
	status    int
	code      string
	retryable bool
	blame     string
}

// errorTable is the only place where Go errors become HTTP answers. The first row
// that matches wins.
var errorTable = []errorRow{
	{errClientGone, statusClientGone, "client_gone", true, sandbox.BlameUser},
	{ErrNoRoute, http.StatusNotFound, "no_route", false, sandbox.BlameUser},
	{ErrMethod, http.StatusMethodNotAllowed, "method_not_allowed", false, sandbox.BlameUser},
	{ErrHost, http.StatusMisdirectedRequest, "wrong_host", false, sandbox.BlameUser},
	{ErrLength, http.StatusBadRequest, "wrong_length", true, sandbox.BlameUser},
	{ErrSlowBody, http.StatusRequestTimeout, "slow_body", true, sandbox.BlameUser},
	{ErrBody, http.StatusBadRequest, "bad_body", false, sandbox.BlameUser},
	{ErrEncoding, http.StatusUnsupportedMediaType, "content_encoding", false, sandbox.BlameUser},
	{access.ErrUnauthenticated, http.StatusUnauthorized, "unauthenticated", false, sandbox.BlameUser},
	{access.ErrForbidden, http.StatusForbidden, "forbidden", false, sandbox.BlameUser},
	{access.ErrUnavailable, http.StatusServiceUnavailable, "tokens_unreadable", true, sandbox.BlameInfra},
	{sandbox.ErrUnknown, http.StatusNotFound, "not_found", false, sandbox.BlameUser},
	{sandbox.ErrEnded, http.StatusGone, "gone", false, sandbox.BlameUser},
	{sandbox.ErrNotReady, http.StatusConflict, "not_ready", true, sandbox.BlameUser},
	{sandbox.ErrKeyConflict, http.StatusConflict, "idempotency_conflict", false, sandbox.BlameUser},
	{sandbox.ErrExecUnknown, http.StatusNotFound, "exec_not_found", false, sandbox.BlameUser},
	{sandbox.ErrExecConflict, http.StatusConflict, "exec_conflict", false, sandbox.BlameUser},
	{sandbox.ErrExecEnded, http.StatusConflict, "exec_ended", false, sandbox.BlameUser},
	{sandbox.ErrStdinOffset, http.StatusConflict, "stdin_offset", false, sandbox.BlameUser},
	{sandbox.ErrRate, http.StatusTooManyRequests, "rate_limited", true, sandbox.BlameInfra},
	{sandbox.ErrCapacity, http.StatusServiceUnavailable, "capacity", true, sandbox.BlameInfra},
	{sandbox.ErrDraining, http.StatusServiceUnavailable, "draining", true, sandbox.BlameInfra},
	{sandbox.ErrFileNotFound, http.StatusNotFound, "file_not_found", false, sandbox.BlameUser},
	{sandbox.ErrFileType, http.StatusConflict, "file_type", false, sandbox.BlameUser},
	{sandbox.ErrFilePath, http.StatusBadRequest, "file_path", false, sandbox.BlameUser},
	{sandbox.ErrFileExists, http.StatusConflict, "file_exists", false, sandbox.BlameUser},
	{sandbox.ErrFileStuck, http.StatusGatewayTimeout, "file_stuck", true, sandbox.BlameAgent},
	{sandbox.ErrTooLarge, http.StatusRequestEntityTooLarge, "payload_too_large", false, sandbox.BlameUser},
	{sandbox.ErrDigest, http.StatusUnprocessableEntity, "digest_mismatch", true, sandbox.BlameUser},
	{sandbox.ErrNoProcess, http.StatusConflict, "no_process", true, sandbox.BlameAgent},
	{sandbox.ErrDiskFull, http.StatusInsufficientStorage, "disk_full", false, sandbox.BlameAgent},
	{sandbox.ErrShare, http.StatusForbidden, "share_refused", false, sandbox.BlameUser},
	{sandbox.ErrImagePending, http.StatusConflict, "image_pending", true, sandbox.BlameInfra},
	{sandbox.ErrImageVerify, http.StatusBadGateway, "image_verify_failed", false, sandbox.BlameInfra},
	{sandbox.ErrImagePull, http.StatusBadGateway, "image_pull_failed", true, sandbox.BlameInfra},
	{sandbox.ErrImage, http.StatusUnprocessableEntity, "image_not_found", false, sandbox.BlameUser},
	{sandbox.ErrUnsupported, http.StatusNotImplemented, "unsupported", false, sandbox.BlameUser},
	{sandbox.ErrNotHibernated, http.StatusConflict, "not_hibernated", true, sandbox.BlameUser},
	{sandbox.ErrRuntime, http.StatusInternalServerError, "runtime_failed", true, sandbox.BlameInfra},
	{sandbox.ErrInvalid, http.StatusBadRequest, "invalid_argument", false, sandbox.BlameUser},
	{context.DeadlineExceeded, http.StatusGatewayTimeout, "deadline", true, sandbox.BlameInfra},
	{context.Canceled, statusClientGone, "canceled", true, sandbox.BlameUser},
}

// errClientGone says that a write to the client failed, or that it takes nothing.
var errClientGone = errors.New("client is gone")

// busy reports whether the error only says to come again: what is no fault of anybody.
func (e *Error) busy() bool { return e.RetryAfter > 0 }

// codeInternal is the code of what the table does not know.
const codeInternal = "internal"

// defaultRetry is told to who is refused for want of room and by nobody told when to
// come again.
const defaultRetry = time.Second

// toError maps any error to its answer.
func toError(err error) *Error {
	if known, ok := errors.AsType[*Error](err); ok {
		e := *known
		return &e
	}
	e := &Error{
		Status: http.StatusInternalServerError, Code: codeInternal,
		Message: sandbox.Short(err.Error()), Retryable: true, Blame: sandbox.BlameInfra,
	}
	for _, r := range errorTable {
		if errors.Is(err, r.target) {
			e.Status, e.Code, e.Retryable, e.Blame = r.status, r.code, r.retryable, r.blame
			break
		}
	}
	if ended, ok := errors.AsType[*sandbox.EndedError](err); ok {
		e.SandboxID, e.End = ended.ID, &ended.End
		e.Blame, e.Retryable = ended.End.Blame, ended.End.Retryable
	}
	if e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable {
		e.RetryAfter = defaultRetry
	}
	if busy, ok := errors.AsType[*sandbox.Busy](err); ok && busy.RetryAfter > 0 {
		e.RetryAfter = busy.RetryAfter
	}
	return e
}
