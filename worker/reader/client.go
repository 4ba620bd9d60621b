package reader

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"quarry/store/chunk"
	"quarry/worker/folder"
)

// askTimeout bounds a question that the reader answers from what it has.
const askTimeout = 5 * time.Second

// statusError is an answer of the reader that is not the one wanted, and what it
// says.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string { return e.text }

// call sends a request, with a body or nil, to the reader's control socket. Errors:
// *statusError for any status but want, and those of a reader that does not answer.
func call(ctx context.Context, d folder.Dir, timeout time.Duration, method, path string, body io.Reader, want int) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://reader"+path, body)
	if err != nil {
		return nil, err
	}
	c := http.Client{
		Timeout: timeout,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var nd net.Dialer
				return nd.DialContext(ctx, "unix", d.ReaderControl())
			},
		},
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask the reader: %w", err)
	}
	if resp.StatusCode != want {
		defer resp.Body.Close()
		text, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorText))
		if err != nil {
			return nil, fmt.Errorf("ask the reader: %w", err)
		}
		return nil, &statusError{resp.StatusCode, cmp.Or(strings.TrimSpace(string(text)), resp.Status)}
	}
	return resp, nil
}

// ask is call for an answer without a body.
func ask(ctx context.Context, d folder.Dir, method, path string) error {
	resp, err := call(ctx, d, askTimeout, method, path, nil, http.StatusNoContent)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// askJSON gets a document that the reader makes of what it has.
func askJSON(ctx context.Context, d folder.Dir, path string, v any) error {
	resp, err := call(ctx, d, askTimeout, http.MethodGet, path, nil, http.StatusOK)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

// ErrNotOpen says that the reader does not have the image open.
var ErrNotOpen = errors.New("the reader does not have the image open")

// ImageStats asks the reader what an image has cost since it was opened. Errors:
// ErrNotOpen, and those of a reader that does not answer.
func ImageStats(ctx context.Context, d folder.Dir, id chunk.Digest) (Stats, error) {
	var st Stats
	err := askJSON(ctx, d, "/images/"+id.Hex()+"/stats", &st)
	var e *statusError
	if errors.As(err, &e) && e.status == http.StatusNotFound {
		err = ErrNotOpen
	}
	return st, err
}

// Ping reports whether a reader answers; an idle one stays for another while.
func Ping(ctx context.Context, d folder.Dir) bool {
	return ask(ctx, d, http.MethodGet, "/ping") == nil
}

// Answers reports whether the reader answers at all. Other than Ping it does not
// keep an idle one.
func Answers(ctx context.Context, d folder.Dir) bool {
	err := ask(ctx, d, http.MethodHead, "/")
	return err == nil || errors.As(err, new(*statusError))
}

// Pull has the reader bring all chunks of an image, which the folder holds, into
// the disk cache, and pin them there when that is wanted. progress is told how
// far it is now and then. The end of ctx ends the pull; what is cached stays.
func Pull(ctx context.Context, d folder.Dir, id chunk.Digest, pin bool, progress func(PullProgress)) (PullResult, error) {
	resp, err := call(ctx, d, 0, http.MethodPost, "/images/"+id.Hex()+"/pull?pin="+strconv.FormatBool(pin), nil, http.StatusOK)
	if err != nil {
		return PullResult{}, fmt.Errorf("pull image %s: %w", id, err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	for {
		var l pullLine
		if err := dec.Decode(&l); err != nil {
			return PullResult{}, fmt.Errorf("pull image %s: the reader ended in the middle of it: %w", id, err)
		}
		if l.Result != nil {
			return *l.Result, nil
		}
		if l.Progress != nil {
			progress(*l.Progress)
		}
	}
}

// Unpin has the chunks of an image go when there is need of room.
func Unpin(ctx context.Context, d folder.Dir, id chunk.Digest) error {
	if err := ask(ctx, d, http.MethodDelete, "/images/"+id.Hex()+"/pin"); err != nil {
		return fmt.Errorf("unpin image %s: %w", id, err)
	}
	return nil
}

// DiskCache asks what the disk cache holds.
func DiskCache(ctx context.Context, d folder.Dir) (c Cached, err error) {
	err = askJSON(ctx, d, "/cache", &c)
	return c, err
}
