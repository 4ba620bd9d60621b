package oci

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

const (
	// cancelTime bounds the cancelling of what a push leaves, when nobody waits for it
	// any more.
	cancelTime = 10 * time.Second
	// cancelWait is how long to wait for a registry that has not seen yet that nobody
	// sends to an upload any more.
	cancelWait = 200 * time.Millisecond
)

// pushTransport is the way of a push to its registry. It keeps to one scheme:
// go-containerregistry tries the other one too for hosts on this machine or a private
// network, and would show credentials to whoever listens there. It answers itself
// that no manifest is there: go-containerregistry pushes nothing of one that is, and
// a push that is made again is to send what is missing, and to be seen. And it
// remembers uploads, of which go-containerregistry goes on with none that failed.
type pushTransport struct {
	scheme string
	http.RoundTripper

	mu      sync.Mutex          // guards what is below
	shown   string              // the last Authorization
	uploads map[string]*url.URL // begun and not finished, by path
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
	resp, err := t.RoundTripper.RoundTrip(r)
	if err == nil {
		t.note(r, resp)
	}
	return resp, err
}

// note remembers an upload that begins, and forgets one that ends.
func (t *pushTransport) note(r *http.Request, resp *http.Response) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case r.Method == http.MethodPost && resp.StatusCode == http.StatusAccepted:
		loc, err := resp.Location()
		if err != nil || loc.Host != r.URL.Host {
			return
		}
		if t.uploads == nil {
			t.uploads = map[string]*url.URL{}
		}
		t.uploads[loc.Path], t.shown = loc, r.Header.Get("Authorization")
	case r.Method == http.MethodPut && resp.StatusCode == http.StatusCreated:
		delete(t.uploads, r.URL.Path)
	}
}

// cancel tells the registry of the uploads that nobody will finish: what has come of
// them takes room that others lack. A registry that is away drops them in its time.
func (t *pushTransport) cancel(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTime)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, u := range t.uploads {
		for {
			r, err := http.NewRequestWithContext(ctx, http.MethodDelete, u.String(), nil)
			if err != nil {
				break
			}
			if t.shown != "" {
				r.Header.Set("Authorization", t.shown)
			}
			resp, err := t.RoundTripper.RoundTrip(r)
			if err != nil {
				return
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusConflict {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(cancelWait):
			}
		}
	}
}
