package oci

import (
	"fmt"
	"net/http"
	"strings"
)

// pushTransport is the way of a push to its registry. It keeps to one scheme:
// go-containerregistry tries the other one too for hosts on this machine or a private
// network, and would show credentials to whoever listens there. And it answers itself
// that no manifest is there: go-containerregistry pushes nothing of one that is, and
// a push that is made again is to send what is missing, and to be seen.
type pushTransport struct {
	scheme string
	http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *pushTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != t.scheme {
		return nil, fmt.Errorf("%s://%s is not asked: the store's URL says %s", r.URL.Scheme, r.URL.Host, t.scheme)
	}
	if r.Method == http.MethodHead && strings.Contains(r.URL.Path, "/manifests/") {
		return &http.Response{
			Status: "404 Not Found", StatusCode: http.StatusNotFound, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			Header: http.Header{}, Body: http.NoBody, Request: r,
		}, nil
	}
	return t.RoundTripper.RoundTrip(r)
}
