package s3

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"

	"quarry/store/bucket"
)

const (
	// maxAttempts bounds how often one request is made. With full jitter the seven
	// pauses between them take 6 s on average, and 13 at most.
	maxAttempts = 8
	firstPause  = 100 * time.Millisecond
	maxPause    = 5 * time.Second
	// slowDown is how much longer the pauses are once the server said that it is
	// asked too much.
	slowDown = 4
	// maxRetryAfter bounds how long a server can make us wait.
	maxRetryAfter = 30 * time.Second
)

type httpTransport = http.Transport

// final marks an answer that asking again does not change. Its error is what
// callers may look into; all others are bucket.ErrUnavailable and text, because what they
// wrap has meanings of its own here: a connection that was cut wraps
// io.ErrUnexpectedEOF, which would say that the object is short.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// retry makes attempts until one succeeds or fails for good. Each may take the
// timeout of a request, and what bytes take at the slowest rate.
func (b *Bucket) retry(ctx context.Context, bytes int64, attempt func(context.Context) error) error {
	for try := 0; ; try++ {
		err := b.once(ctx, bytes, attempt)
		var f final
		switch {
		case err == nil:
			return nil
		case errors.As(err, &f):
			return f.error
		case ctx.Err() != nil:
			return ctx.Err()
		case !passing(err):
			return fmt.Errorf("%w: %v", bucket.ErrUnavailable, err)
		case try == maxAttempts-1:
			return fmt.Errorf("%w: %d attempts failed, the last: %v", bucket.ErrUnavailable, maxAttempts, err)
		}
		b.metrics.retries.Inc()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(b.pause(try, err)):
		}
	}
}

func (b *Bucket) once(ctx context.Context, bytes int64, attempt func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	limit := b.cfg.AttemptTimeout + time.Duration(float64(bytes)/float64(b.cfg.Slowest)*float64(time.Second))
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %s", limit))
	defer cancel()
	return attempt(ctx)
}

// pause returns how long to wait after a failed attempt: anything from nothing to
// the bound that doubles with each one, so that many clients do not come back
// together.
func (b *Bucket) pause(try int, err error) time.Duration {
	bound := b.cfg.Backoff << try
	var least time.Duration
	if status := statusOf(err); status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		bound *= slowDown
		least = retryAfter(err)
	}
	return max(least, rand.N(min(bound, maxPause)+1))
}

func retryAfter(err error) time.Duration {
	var r *awshttp.ResponseError
	if !errors.As(err, &r) || r.Response == nil {
		return 0
	}
	seconds, err := strconv.ParseUint(r.Response.Header.Get("Retry-After"), 10, 16)
	if err != nil {
		return 0
	}
	return min(time.Duration(seconds)*time.Second, maxRetryAfter)
}

// passing says whether an error may be gone at the next attempt: all but a
// refusal.
func passing(err error) bool {
	switch status := statusOf(err); status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooManyRequests:
		return true
	default:
		if status < 300 || status >= 500 {
			return true
		}
	}
	switch codeOf(err) {
	case "RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "SlowDown":
		return true // of status 400: what arrived is not what was sent
	}
	return false
}

// statusOf returns the HTTP status of a server's answer, 0 without one.
func statusOf(err error) int {
	var r interface{ HTTPStatusCode() int }
	if errors.As(err, &r) {
		return r.HTTPStatusCode()
	}
	return 0
}

func codeOf(err error) string {
	var e smithy.APIError
	if errors.As(err, &e) {
		return e.ErrorCode()
	}
	return ""
}

// missing says whether the server has no such object. A bucket that is gone has
// said nothing of its objects.
func missing(err error) bool {
	return statusOf(err) == http.StatusNotFound && codeOf(err) != "NoSuchBucket" && codeOf(err) != "NoSuchUpload"
}
