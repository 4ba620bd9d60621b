package oci

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// guard is the only way to the network: https to every host, plain http only
// when the registry and the host asked are this machine, or by the scheme that
// somebody gave, and no body that stops
// coming for longer than stall, those of errors and tokens included. It holds
// for redirects and token services too, which a registry chooses.
type guard struct {
	base  *http.Transport
	plain bool
	given bool // with the scheme: plain says which
	stall time.Duration
}

// errPlainHTTP says that a host would be asked without encryption.
var errPlainHTTP = errors.New("plain http is for registries on this machine (localhost, 127.0.0.1, [::1]) only")

// errOtherScheme says that a host would be asked by another scheme than was given.
var errOtherScheme = errors.New("the store's URL says another scheme")

// RoundTrip implements http.RoundTripper.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	mayPlain := g.plain && (g.given || isLoopback(r.URL.Hostname()))
	if !g.allows(r.URL.Scheme, mayPlain) {
		if r.Body != nil {
			r.Body.Close()
		}
		if g.given {
			return nil, fmt.Errorf("%s://%s is not asked: %w", r.URL.Scheme, r.URL.Host, errOtherScheme)
		}
		return nil, fmt.Errorf("%s://%s: %w", r.URL.Scheme, r.URL.Host, errPlainHTTP)
	}
	ctx, cancel := context.WithCancel(r.Context())
	resp, err := g.base.RoundTrip(r.WithContext(ctx))
	if err != nil {
		cancel()
		if !mayPlain && speaksPlain(err) {
			return nil, fmt.Errorf("%s does not speak https: %w", r.URL.Host, errPlainHTTP)
		}
		return nil, err
	}
	resp.Body = &watched{ReadCloser: resp.Body, cancel: cancel, timeout: g.stall}
	return resp, nil
}

func (g *guard) allows(scheme string, mayPlain bool) bool {
	if g.given {
		return scheme == schemeOf(g.plain)
	}
	return scheme == "https" || scheme == "http" && mayPlain
}

func schemeOf(plain bool) string {
	if plain {
		return "http"
	}
	return "https"
}

// speaksPlain reports whether a TLS handshake failed because plain HTTP came.
func speaksPlain(err error) bool {
	var record tls.RecordHeaderError
	return errors.As(err, &record) && string(record.RecordHeader[:]) == "HTTP/"
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func newTransport(reg name.Registry, cfg Config) *guard {
	if cfg.Transport != nil {
		return &guard{base: cfg.Transport, plain: cfg.Plain, given: true, stall: cfg.StallTimeout}
	}
	host := (&url.URL{Host: reg.RegistryStr()}).Hostname()
	return &guard{plain: isLoopback(host), stall: cfg.StallTimeout, base: &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: cfg.StallTimeout, KeepAlive: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:    cfg.StallTimeout,
		ResponseHeaderTimeout:  cfg.StallTimeout,
		MaxResponseHeaderBytes: 1 << 20,
		DisableCompression:     true, // digests are of the bytes as they are stored
		ForceAttemptHTTP2:      true,
		IdleConnTimeout:        time.Minute,
	}}
}

// permanentError is one that another try would not change.
type permanentError struct{ error }

// Unwrap returns what it is about.
func (e *permanentError) Unwrap() error { return e.error }

// busyError is an answer that asks to come again, and when.
type busyError struct {
	error
	after time.Duration
}

// Unwrap returns what the registry answered.
func (e *busyError) Unwrap() error { return e.error }

// classify tells what may pass from what will not. Addresses are left out of
// network errors: the one that a registry redirects to is a password for a while.
func (r *registry) classify(err error) error {
	var status *transport.Error
	if errors.As(err, &status) {
		if status.StatusCode == http.StatusUnauthorized || status.StatusCode == http.StatusForbidden {
			return r.denied(err)
		}
		if !status.Temporary() {
			return &permanentError{err}
		}
		return err
	}
	var u *url.Error
	for errors.As(err, &u) {
		err = u.Err
	}
	if errors.Is(err, errPlainHTTP) || errors.Is(err, errOtherScheme) || errors.As(err, new(*tls.CertificateVerificationError)) {
		return &permanentError{err}
	}
	return err
}

// denied says whose access was refused, and what to do.
func (r *registry) denied(err error) error {
	host := r.ref.Context().RegistryStr()
	if r.cfg.Credentials == (Credentials{}) {
		return &permanentError{fmt.Errorf("%s wants credentials and docker's config file of this user has none for it (docker login %s): %w", host, host, err)}
	}
	return &permanentError{fmt.Errorf("%s refuses the credentials that docker's config file of this user has for it: %w", host, err)}
}

// checkStatus judges an answer by its status and its range.
func (r *registry) checkStatus(resp *http.Response, off int64) error {
	switch resp.StatusCode {
	case http.StatusOK:
		if enc := resp.Header.Get("Content-Encoding"); enc != "" && enc != "identity" {
			return &permanentError{fmt.Errorf("the registry sends Content-Encoding %s, which was not asked for", enc)}
		}
		return nil
	case http.StatusPartialContent:
		if start, ok := rangeStart(resp.Header.Get("Content-Range")); off == 0 || !ok || start != off {
			return &permanentError{fmt.Errorf("the registry sends the range %q, asked for was %d-", resp.Header.Get("Content-Range"), off)}
		}
		return nil
	case http.StatusNotFound:
		return fmt.Errorf("%w: %w", ErrNoBlob, transport.CheckError(resp))
	case http.StatusUnauthorized, http.StatusForbidden:
		return r.denied(transport.CheckError(resp))
	}
	err := transport.CheckError(resp)
	var status *transport.Error
	if !errors.As(err, &status) { // its text is too long or did not come
		status = &transport.Error{StatusCode: resp.StatusCode}
		err = fmt.Errorf("%w: its text: %w", status, err)
	}
	if after := retryAfter(resp); status.Temporary() && after > 0 {
		return &busyError{err, after}
	}
	if status.Temporary() {
		return err
	}
	return &permanentError{err}
}

// rangeStart reads "bytes START-END/LENGTH".
func rangeStart(s string) (int64, bool) {
	var start, end int64
	var length string
	n, err := fmt.Sscanf(s, "bytes %d-%d/%s", &start, &end, &length)
	return start, err == nil && n == 3 && start >= 0
}

// retryAfter reads the header's seconds; a date is not worth a clock's error.
func retryAfter(resp *http.Response) time.Duration {
	n, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || n < 0 {
		return 0
	}
	return time.Duration(min(n, int(maxPause/time.Second))) * time.Second
}
