// Package client speaks quarry's HTTP contract from the other side. It is a
// store.BatchGetter, so that a worker across the network and one beside the
// store differ in one constructor, and it trusts nothing it receives: chunks,
// bootstraps and configs are verified against the digest asked for, every
// length is bounded before memory is taken.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"quarry/api"
)

// ErrSilent says that the server sent nothing, or next to nothing, for the idle
// timeout.
var ErrSilent = errors.New("server is silent")

const (
	// maxRetryAfter bounds how long a server can make this client wait between
	// two attempts.
	maxRetryAfter = 10 * time.Second
	// maxBackoff bounds the wait that doubles with each attempt.
	maxBackoff = 2 * time.Second
	// maxErrorBody bounds an error document: a thousand tags of 128 bytes and a
	// message that names ten of them.
	maxErrorBody = 256 << 10
	// maxConns bounds the connections to the server, and with it the requests at
	// once: with 100 of them stalled, and each hedged, 56 are left to others. One
	// costs this side some 32 KiB of buffers and stacks, all of them 8 MiB.
	maxConns = 256
	// maxIdleConns bounds those that are kept for the next requests.
	maxIdleConns = 64
)

// Config says which server a Client talks to, and how patiently. Proxies of the
// environment are not used: a store is reached directly.
type Config struct {
	URL    string // http://HOST:PORT or https://…, or "" with Socket
	Socket string // path of a unix socket

	Token *Token         // shown with every request; nil: none
	CA    *x509.CertPool // of an https store; nil: the system's

	// Dial replaces net.Dialer's, for tests and for networks of one's own.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	IdleTimeout time.Duration // an attempt that receives less than 16 KiB in so long a wait has failed; 0 = 30 s
	Attempts    int           // of one call in all; 0 = 4
	Backoff     time.Duration // before the second attempt, doubling, with jitter; 0 = 100 ms
}

// Client is a client of one server. Safe for concurrent use.
type Client struct {
	cfg  Config
	base string
	http *http.Client
	n    *counters
}

// counters are those of Stats.
type counters struct{ requests, retries, in, out, bucket atomic.Uint64 }

// Stats counts what a Client has done since it was made. The bytes are those of
// its connections: headers, bodies and, with https, TLS.
type Stats struct {
	Requests uint64 // attempts of calls
	Retries  uint64 // those that repeat an earlier one
	BytesIn  uint64
	BytesOut uint64
	// BucketBytes is what the server says that it read from its bucket for the
	// batches, as far as it says so.
	BucketBytes uint64
}

// New returns a client. It connects at the first call.
func New(cfg Config) (*Client, error) {
	base, err := baseURL(cfg)
	if err != nil {
		return nil, err
	}
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	if cfg.IdleTimeout == 0 {
		cfg.IdleTimeout = 30 * time.Second
	}
	if cfg.Attempts == 0 {
		cfg.Attempts = 4
	}
	if cfg.Backoff == 0 {
		cfg.Backoff = 100 * time.Millisecond
	}
	c := &Client{cfg: cfg, base: base, n: new(counters)}
	c.http = &http.Client{
		Transport: &http.Transport{
			DialContext:            c.dial,
			DisableCompression:     true, // bootstraps ask for zstd themselves, chunks are compressed already
			MaxConnsPerHost:        maxConns,
			MaxIdleConnsPerHost:    maxIdleConns,
			IdleConnTimeout:        time.Minute, // less than the server's, so that it is rarely closed under a request
			MaxResponseHeaderBytes: 64 << 10,
			TLSHandshakeTimeout:    10 * time.Second,
			TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cfg.CA},
		},
		// The contract has no redirects: following one would send requests to
		// whomever a lying server names.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c, nil
}

func baseURL(cfg Config) (string, error) {
	if cfg.Socket != "" {
		if cfg.URL != "" {
			return "", fmt.Errorf("store has both a URL %s and a socket %s, want one", cfg.URL, cfg.Socket)
		}
		return "http://quarry", nil // the host is never looked up: dial goes to the socket
	}
	u, err := url.Parse(cfg.URL)
	if err != nil {
		return "", fmt.Errorf("store URL: %w", err)
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return "", fmt.Errorf("store URL %q: want http://HOST:PORT or https://HOST:PORT", cfg.URL)
	}
	if strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return "", fmt.Errorf("store URL %q: want a scheme, a host and a port, nothing else", cfg.URL)
	}
	return u.Scheme + "://" + u.Host, nil
}

func (c *Client) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if c.cfg.Socket != "" {
		network, addr = "unix", c.cfg.Socket
	}
	conn, err := c.cfg.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &countedConn{Conn: conn, n: c.n}, nil
}

// countedConn counts the bytes of a connection.
type countedConn struct {
	net.Conn
	n *counters
}

func (c *countedConn) Read(p []byte) (int, error) {
	k, err := c.Conn.Read(p)
	c.n.in.Add(uint64(k))
	return k, err
}

func (c *countedConn) Write(p []byte) (int, error) {
	k, err := c.Conn.Write(p)
	c.n.out.Add(uint64(k))
	return k, err
}

// Stats returns the counters.
func (c *Client) Stats() Stats {
	return Stats{
		Requests: c.n.requests.Load(), Retries: c.n.retries.Load(),
		BytesIn: c.n.in.Load(), BytesOut: c.n.out.Load(), BucketBytes: c.n.bucket.Load(),
	}
}

// String says which server it is, for people.
func (c *Client) String() string {
	if c.cfg.Socket != "" {
		return c.cfg.Socket
	}
	return c.base
}

// with returns a client of the same server, connections and counters that makes
// so many attempts of a call, and has that patience with each.
func (c *Client) with(attempts int, idle time.Duration) *Client {
	other := *c
	other.cfg.Attempts, other.cfg.IdleTimeout = attempts, idle
	return &other
}

// Close closes the idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// request is one call of the contract.
type request struct {
	method, path string
	body         []byte
	contentType  string
	accept       string // Accept-Encoding
	media        string // Accept
	once         bool   // not idempotent: never send it twice
	job          bool   // answers with events, few and small ones; see again
}

// stop marks an error that another attempt cannot mend.
type stop struct{ err error }

func (s *stop) Error() string { return s.err.Error() }
func (s *stop) Unwrap() error { return s.err }

// call sends a request until handle has taken its 200 answer without an error,
// an error says that asking again is useless, or the attempts are used up.
func (c *Client) call(ctx context.Context, rq request, handle func(*http.Response) error) error {
	for n := 1; ; n++ {
		err := c.attempt(ctx, rq, handle)
		var s *stop
		switch {
		case err == nil:
			return nil
		case errors.As(err, &s):
			return s.err
		case ctx.Err() != nil:
			return fmt.Errorf("%s %s: %w", rq.method, rq.path, ctx.Err())
		case !c.again(rq, n, err):
			return err
		}
		if werr := c.pause(ctx, n, err); werr != nil {
			return werr
		}
	}
}

// pause waits before attempt n+1.
func (c *Client) pause(ctx context.Context, n int, err error) error {
	c.n.retries.Add(1)
	wait := min(c.cfg.Backoff<<min(n-1, 10), maxBackoff)
	wait = wait/2 + rand.N(wait/2+1)
	var e *api.Error
	if errors.As(err, &e) {
		wait = max(wait, min(e.RetryAfter, maxRetryAfter))
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w (waiting to try again after: %w)", ctx.Err(), err)
	}
}

// retryable: the server says so itself; what broke on the way is worth a try.
func retryable(err error) bool {
	var e *api.Error
	if errors.As(err, &e) {
		return e.Retryable && e.Status != http.StatusAccepted
	}
	return !errors.As(err, new(noToken))
}

// attempt sends a request once, and again at once when it was refused with a token
// that has been replaced meanwhile. A request that is refused has done nothing.
func (c *Client) attempt(ctx context.Context, rq request, handle func(*http.Response) error) error {
	shown, err := c.send(ctx, rq, handle)
	if err != nil && refused(err) && c.cfg.Token.another(shown) {
		_, err = c.send(ctx, rq, handle)
	}
	return err
}

// send sends a request once, and returns the token that it showed. The timer runs only while this side waits for
// the server, so that a slow caller is not taken for a silent server.
func (c *Client) send(ctx context.Context, rq request, handle func(*http.Response) error) (shown string, err error) {
	c.n.requests.Add(1)
	ctx, cancel := context.WithCancelCause(ctx)
	idle := time.AfterFunc(c.cfg.IdleTimeout, func() { cancel(ErrSilent) })
	body := &idleBody{
		ReadCloser: http.NoBody, timer: idle, timeout: c.cfg.IdleTimeout, enough: minProgress,
		end: func() { idle.Stop(); cancel(nil) },
	}
	defer func() {
		if !body.kept {
			body.Close()
		}
	}()

	hr, err := http.NewRequestWithContext(ctx, rq.method, c.base+rq.path, bytes.NewReader(rq.body))
	if err != nil {
		return "", &stop{fmt.Errorf("%s %s: %w", rq.method, rq.path, err)}
	}
	if shown, err = c.cfg.Token.authorize(hr); err != nil {
		return "", err
	}
	hr.Header.Set("User-Agent", "quarry")
	if rq.contentType != "" {
		hr.Header.Set("Content-Type", rq.contentType)
	}
	if rq.accept != "" {
		hr.Header.Set("Accept-Encoding", rq.accept)
	}
	if rq.media != "" {
		hr.Header.Set("Accept", rq.media)
	}
	resp, err := c.http.Do(hr)
	idle.Stop()
	if err != nil {
		return shown, c.explain(ctx, rq, c.transportError(err))
	}
	body.ReadCloser = resp.Body
	if rq.job {
		body.enough = 1 // it may have nothing to say but that it is alive
	}
	resp.Body = body
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusNoContent {
		err = responseError(rq, resp)
	} else {
		err = handle(resp)
	}
	return shown, c.explain(ctx, rq, err)
}

// explain puts the silence of the server in the place of the cancellation that
// it caused.
func (c *Client) explain(ctx context.Context, rq request, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), ErrSilent) {
		return fmt.Errorf("%s %s: %w: too few bytes came in %s", rq.method, rq.path, ErrSilent, c.cfg.IdleTimeout)
	}
	return err
}

// responseError makes an *api.Error of an answer that is not 200.
func responseError(rq request, resp *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err != nil {
		return fmt.Errorf("%s %s: read answer of status %d: %w", rq.method, rq.path, resp.StatusCode, err)
	}
	e := decodeError(resp.StatusCode, text)
	ours := e != nil
	if !ours {
		e = &api.Error{
			Code:      "http_" + strconv.Itoa(resp.StatusCode),
			Message:   fmt.Sprintf("%s %s: status %s with no error document: is this a quarry server?", rq.method, rq.path, resp.Status),
			Retryable: resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests,
			Blame:     api.BlameInfra,
			RequestID: resp.Header.Get(api.HeaderRequestID),
		}
	}
	e.Status = resp.StatusCode
	if sec, err := strconv.ParseUint(resp.Header.Get("Retry-After"), 10, 31); err == nil {
		e.RetryAfter = time.Duration(sec) * time.Second
	}
	if !ours {
		return &foreign{e}
	}
	return e
}

// decodeError reads an error document, or the state of an image that is not
// ready; nil when the text is neither.
func decodeError(status int, text []byte) *api.Error {
	if status == http.StatusAccepted {
		var img api.Image
		if json.Unmarshal(text, &img) != nil || img.Status == "" {
			return nil
		}
		message := "image is " + img.Status + ": ask again later"
		switch img.Status {
		case api.StatusPending:
			message = "image is pending: its conversion waits for its turn, ask again later"
		case api.StatusConverting:
			message = "image is being converted: ask again later"
		case api.StatusUnsigned:
			message = "image is unsigned: sign it (quarry sign, on the key's host), or convert it again with a signing key (quarry serve without --no-sign)"
		}
		e := &api.Error{Code: img.Status, Message: message, Retryable: true, Blame: api.BlameInfra}
		if img.Job != "" {
			e.Details = map[string][]string{"job": {img.Job}}
		}
		return e
	}
	var doc struct {
		Error *api.Error `json:"error"`
	}
	if json.Unmarshal(text, &doc) != nil || doc.Error == nil || doc.Error.Code == "" {
		return nil
	}
	return doc.Error
}

// getJSON calls a route that answers with one JSON document.
func (c *Client) getJSON(ctx context.Context, rq request, v any) error {
	return c.call(ctx, rq, func(resp *http.Response) error {
		text, err := readAll(resp, api.MaxJSON)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, v); err != nil {
			return fmt.Errorf("%s %s: decode answer: %w", rq.method, rq.path, err)
		}
		return nil
	})
}

// readAll reads an answer of at most limit bytes; memory grows with what comes.
func readAll(resp *http.Response, limit int64) ([]byte, error) {
	if resp.ContentLength > limit {
		return nil, &stop{fmt.Errorf("%s: answer of %d bytes, at most %d are allowed", resp.Request.URL.Path, resp.ContentLength, limit)}
	}
	p, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, fmt.Errorf("%s: read answer: %w", resp.Request.URL.Path, err)
	}
	if int64(len(p)) > limit {
		return nil, &stop{fmt.Errorf("%s: answer of more than %d bytes", resp.Request.URL.Path, limit)}
	}
	return p, nil
}
