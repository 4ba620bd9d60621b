// Package client speaks to a worker: the calls of package sandboxes, with the errors
// of package sandbox on this side as on the other.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"quarry/api/sandboxes"
	"quarry/worker/sandbox"
)

// Config says which worker, and who asks.
type Config struct {
	URL string // http://HOST:PORT, https://…, or unix:PATH
	// Token is a bearer of scope run, or a sandbox's own; "" shows none.
	Token string
	HTTP  *http.Client // nil = one of its own, without a time limit
}

// Client asks one worker. Safe for concurrent use. Its errors are *sandboxes.Error for
// what the worker refused, and those of net/http for what did not reach it. No call is
// repeated: creates have keys and execs have ids for that.
type Client struct {
	base  string
	where string // as it was said
	token string
	http  *http.Client
}

// New returns a client of cfg.
func New(cfg Config) (*Client, error) {
	c := &Client{base: strings.TrimSuffix(cfg.URL, "/"), where: cfg.URL, token: cfg.Token, http: cfg.HTTP}
	if path, ok := strings.CutPrefix(cfg.URL, "unix:"); ok {
		dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
		c.base, c.http = "http://localhost", &http.Client{Transport: &http.Transport{DialContext: dial, ExpectContinueTimeout: expectWait}}
		return c, nil
	}
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("worker %q: want http://HOST:PORT, https://HOST:PORT or unix:PATH", cfg.URL)
	}
	if c.http == nil {
		c.http = &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: 64, ExpectContinueTimeout: expectWait}}
	}
	return c, nil
}

// request is one call.
type request struct {
	method string
	path   string
	query  url.Values
	header map[string]string
	body   io.Reader
	size   int64 // of body; -1 when not known
	file   bool  // the body may be large
}

// A file or tar of more than expectAbove bytes, or of unknown length, waits until the
// worker wants it, so that a refusal comes before it is sent; expectWait bounds that
// wait, for proxies that know nothing of it.
const (
	expectAbove = 1 << 20
	expectWait  = time.Second
)

// do sends a request and returns an answer whose status is not an error.
func (c *Client) do(ctx context.Context, r request) (*http.Response, error) {
	target := c.base + r.path
	if len(r.query) > 0 {
		target += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, target, r.body)
	if err != nil {
		return nil, err
	}
	if r.body != nil {
		req.ContentLength = r.size
		if r.file && (r.size < 0 || r.size > expectAbove) {
			req.Header.Set("Expect", "100-continue")
		}
	}
	req.Header.Set("TE", "trailers") // what fails in the middle says why
	for k, v := range r.header {
		req.Header.Set(k, v)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT) {
		return nil, fmt.Errorf("no worker answers at %s: start one with quarry worker, or name another: %w", c.where, err)
	}
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, readError(resp)
}

// maxError bounds an error's document.
const maxError = 1 << 20

func readError(resp *http.Response) error {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxError))
	if err != nil {
		return fmt.Errorf("the worker answers %s: %w", resp.Status, err)
	}
	var body struct {
		Error *sandboxes.Error `json:"error"`
	}
	if json.Unmarshal(raw, &body) != nil || body.Error == nil || body.Error.Code == "" {
		return fmt.Errorf("the worker answers %s, which is not an answer of quarry: is the URL right?", resp.Status)
	}
	e := body.Error
	e.Status = resp.StatusCode
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.RetryAfter = time.Duration(s) * time.Second
	}
	return withEnd(e)
}

// failed is the error that an answer's trailers have, read after its last byte: why the
// worker could not send it whole. It is nil when there is none.
func failed(resp *http.Response) error {
	if text := resp.Trailer.Get(sandboxes.HeaderError); text != "" {
		return told([]byte(text))
	}
	return nil
}

// told is the error that an answer ends with.
func told(text []byte) error {
	var e sandboxes.Error
	if err := json.Unmarshal(text, &e); err != nil || e.Code == "" {
		return fmt.Errorf("%w, for a reason that cannot be read: %q", ErrCutOff, text)
	}
	return withEnd(&e)
}

// withEnd makes an answer with a record an error that has it.
func withEnd(e *sandboxes.Error) error {
	if e.End == nil {
		return e
	}
	return &endedError{e, &sandbox.EndedError{ID: e.SandboxID, End: *e.End}}
}

// endedError is an *Error that has a record.
type endedError struct {
	answer *sandboxes.Error
	ended  *sandbox.EndedError
}

func (e *endedError) Error() string { return e.answer.Error() }

func (e *endedError) Unwrap() []error { return []error{e.answer, e.ended} }

// maxAnswer bounds a JSON answer: an exec's has two streams of MaxInline in base64.
const maxAnswer = 64 << 20

// call sends in, when it is not nil, as JSON and reads the answer as a T.
func call[T any](ctx context.Context, c *Client, r request, in any) (T, error) {
	var out T
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return out, err
		}
		r.body, r.size = bytes.NewReader(b), int64(len(b))
	}
	resp, err := c.do(ctx, r)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNoContent {
		return out, nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&out); err != nil {
		return out, fmt.Errorf("%s %s: the answer breaks off: %w", r.method, r.path, err)
	}
	return out, nil
}

func at(id string, more ...string) string {
	p := "/v1/sandboxes/" + url.PathEscape(id)
	for _, m := range more {
		p += "/" + url.PathEscape(m)
	}
	return p
}

// Create makes a sandbox and waits until it runs. The same key with the same spec
// returns the same sandbox.
func (c *Client) Create(ctx context.Context, s sandbox.Spec, key string) (sandbox.Sandbox, error) {
	r := request{method: http.MethodPost, path: "/v1/sandboxes"}
	if key != "" {
		r.header = map[string]string{sandboxes.HeaderKey: key}
	}
	return call[sandbox.Sandbox](ctx, c, r, s)
}

// Get returns what a sandbox is now; of one that has ended, its record.
func (c *Client) Get(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return call[sandbox.Sandbox](ctx, c, request{method: http.MethodGet, path: at(id)}, nil)
}

// List returns all sandboxes that f chooses.
func (c *Client) List(ctx context.Context, f sandbox.Filter) ([]sandbox.Sandbox, error) {
	q := url.Values{}
	for k, v := range f.Labels {
		q.Add("label", k+"="+v)
	}
	set(q, "group", f.Group)
	set(q, "state", string(f.State))
	var all []sandbox.Sandbox
	for after := f.After; ; {
		q.Del("after")
		set(q, "after", after)
		page, err := call[sandboxes.SandboxesPage](ctx, c, request{method: http.MethodGet, path: "/v1/sandboxes", query: q}, nil)
		if err != nil {
			return nil, err
		}
		all = append(all, page.Sandboxes...)
		if page.Next == "" || f.Limit > 0 && len(all) >= f.Limit {
			return all, nil
		}
		after = page.Next
	}
}

func set(q url.Values, key, value string) {
	if value != "" {
		q.Set(key, value)
	}
}

// Delete ends a sandbox and returns its record.
func (c *Client) Delete(ctx context.Context, id string) (sandbox.End, error) {
	return call[sandbox.End](ctx, c, request{method: http.MethodDelete, path: at(id)}, nil)
}

// Pause stops a sandbox's processes.
func (c *Client) Pause(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return call[sandbox.Sandbox](ctx, c, request{method: http.MethodPost, path: at(id, "pause")}, nil)
}

// PauseFor is Pause by a caller who knows for how long: of one that waits for long the
// worker may put the memory to disk.
func (c *Client) PauseFor(ctx context.Context, id string, d time.Duration) (sandbox.Sandbox, error) {
	q := url.Values{"expect_ms": {strconv.FormatInt(d.Milliseconds(), 10)}}
	return call[sandbox.Sandbox](ctx, c, request{method: http.MethodPost, path: at(id, "pause"), query: q}, nil)
}

// Hibernate stops them, puts the sandbox's memory to disk and ends them there.
func (c *Client) Hibernate(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return call[sandbox.Sandbox](ctx, c, request{method: http.MethodPost, path: at(id, "hibernate")}, nil)
}

// Wake has a sandbox run that was hibernated or paused.
func (c *Client) Wake(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return call[sandbox.Sandbox](ctx, c, request{method: http.MethodPost, path: at(id, "wake")}, nil)
}

// Resume lets them go on.
func (c *Client) Resume(ctx context.Context, id string) (sandbox.Sandbox, error) {
	return call[sandbox.Sandbox](ctx, c, request{method: http.MethodPost, path: at(id, "resume")}, nil)
}

// SetTTL makes a sandbox live for at least so many seconds from now on.
func (c *Client) SetTTL(ctx context.Context, id string, seconds int64) (sandbox.Sandbox, error) {
	return call[sandbox.Sandbox](ctx, c, request{method: http.MethodPost, path: at(id, "ttl")}, sandboxes.TTLRequest{Seconds: seconds})
}

// Usage returns what a sandbox uses now.
func (c *Client) Usage(ctx context.Context, id string) (sandbox.Usage, error) {
	return call[sandbox.Usage](ctx, c, request{method: http.MethodGet, path: at(id, "usage")}, nil)
}

// Give adds a share to a sandbox.
func (c *Client) Give(ctx context.Context, id string, s sandbox.Share) error {
	_, err := call[sandbox.Share](ctx, c, request{method: http.MethodPost, path: at(id, "shares")}, s)
	return err
}

// Take removes one.
func (c *Client) Take(ctx context.Context, id, target string) error {
	_, err := call[struct{}](ctx, c, request{method: http.MethodDelete, path: at(id, "shares"), query: url.Values{"target": {target}}}, nil)
	return err
}

// SetNetwork gives a sandbox another policy and returns when it is in force.
func (c *Client) SetNetwork(ctx context.Context, id string, p sandbox.Policy) (sandbox.Network, error) {
	return call[sandbox.Network](ctx, c, request{method: http.MethodPut, path: at(id, "network")}, p)
}

// Node tells what the worker has and has given away.
func (c *Client) Node(ctx context.Context) (sandbox.NodeStatus, error) {
	return call[sandbox.NodeStatus](ctx, c, request{method: http.MethodGet, path: "/v1/node"}, nil)
}

// Drain makes the worker refuse creates, and with end end what runs.
func (c *Client) Drain(ctx context.Context, end bool) (sandbox.NodeStatus, error) {
	return call[sandbox.NodeStatus](ctx, c, request{method: http.MethodPost, path: "/v1/node/drain"}, sandboxes.DrainRequest{End: end})
}

// ErrCutOff says that a stream ended without saying how the command did, or why it is
// not whole.
var ErrCutOff = errors.New("the stream of the worker breaks off")
