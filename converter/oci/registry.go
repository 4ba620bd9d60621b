package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"quarry/store/chunk"
)

// ErrUnavailable says that a registry did not answer, or not with what it
// should, and may do so later.
var ErrUnavailable = errors.New("registry is out of reach")

// registry is one repository of a registry. What it sends is believed only when
// its digest is right; a tag is its own to answer for.
type registry struct {
	ref  name.Reference
	cfg  Config
	base *guard

	mu     sync.Mutex // guards the fields below
	client *http.Client
	docs   map[chunk.Digest][]byte // the manifest that the reference names
}

var _ blobs = (*registry)(nil)

// parseRegistrySource returns the reference of a registry:// source, nil of
// another one.
func parseRegistrySource(src string) (name.Reference, error) {
	rest, ok := strings.CutPrefix(src, "registry:")
	if !ok {
		return nil, nil
	}
	text, ok := strings.CutPrefix(rest, "//")
	host, repo, _ := strings.Cut(text, "/")
	if !ok || repo == "" {
		return nil, errors.New("want registry://HOST[:PORT]/REPO[:TAG|@DIGEST]")
	}
	if !strings.ContainsAny(host, ".:") {
		return nil, fmt.Errorf("%q is no host: one has a dot or a port; images of Docker Hub are registry://docker.io/%s", host, text)
	}
	ref, err := name.ParseReference(text)
	if err != nil {
		return nil, fmt.Errorf("not a reference: %w", err)
	}
	return ref, nil
}

func openRegistry(_ context.Context, rest string, cfg Config) (blobs, error) {
	ref, err := parseRegistrySource("registry:" + rest)
	if err != nil {
		return nil, err
	}
	if cfg.Transport != nil && cfg.Plain {
		if ref, err = name.ParseReference(ref.Name(), name.Insecure); err != nil {
			return nil, err
		}
	}
	return &registry{ref: ref, cfg: cfg, base: newTransport(ref.Context().Registry, cfg), docs: map[chunk.Digest][]byte{}}, nil
}

// Close gives connections back.
func (r *registry) Close() error {
	r.base.base.CloseIdleConnections()
	return nil
}

// accepted are the documents that are asked for, and understood.
var accepted = strings.Join([]string{
	string(types.OCIImageIndex), string(types.OCIManifestSchema1), string(types.DockerManifestList), string(types.DockerManifestSchema2),
}, ", ")

// top fetches the document that the reference names. Its digest is computed
// here, so that a tag that moves meanwhile changes nothing more.
func (r *registry) top(ctx context.Context) (descriptor, error) {
	var raw []byte
	var header http.Header
	err := r.retry(ctx, func() error {
		resp, err := r.get(ctx, kindManifest, r.ref.Identifier(), 0, -1)
		if err != nil {
			return err
		}
		header = resp.Header
		raw, err = readLimited(resp.Body, resp.ContentLength, MaxManifest)
		return err
	})
	if err != nil {
		return descriptor{}, fmt.Errorf("manifest %s: %w", r.ref.Identifier(), err)
	}
	d := descriptor{Digest: hash(chunk.Sum(raw)), Size: int64(len(raw)), MediaType: documentType(header)}
	if want, ok := r.ref.(name.Digest); ok && want.DigestStr() != d.Digest.String() {
		return d, fmt.Errorf("manifest %s is damaged: what came has digest %s%s", want.DigestStr(), d.Digest, htmlNote(header))
	}
	if told := header.Get("Docker-Content-Digest"); strings.HasPrefix(told, "sha256:") && told != d.Digest.String() {
		return d, fmt.Errorf("manifest %s: the registry says it is %s, what came is %s%s", r.ref.Identifier(), told, d.Digest, htmlNote(header))
	}
	if _, err := parseDocument(raw, d.MediaType); err != nil {
		return d, fmt.Errorf("manifest %s: %w%s", r.ref.Identifier(), err, htmlNote(header))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.docs[chunk.Sum(raw)] = raw
	return d, nil
}

// documentType is what the answer says the document is; empty when it says
// nothing of use, so that the document itself does.
func documentType(h http.Header) types.MediaType {
	t, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	m := types.MediaType(t)
	if err != nil || !m.IsIndex() && !m.IsImage() && !m.IsSchema1() {
		return ""
	}
	return m
}

// htmlNote says that a page for people came, as from a proxy or a login portal.
func htmlNote(h http.Header) string {
	if strings.HasPrefix(h.Get("Content-Type"), "text/html") {
		return " (an HTML page: is something between here and the registry?)"
	}
	return ""
}

func (r *registry) open(ctx context.Context, k kind, d chunk.Digest) (io.ReadCloser, int64, error) {
	r.mu.Lock()
	p, ok := r.docs[d]
	r.mu.Unlock()
	if ok {
		return io.NopCloser(bytes.NewReader(p)), int64(len(p)), nil
	}
	dl := &download{
		get:   func(off, size int64) (*http.Response, error) { return r.get(ctx, k, d.String(), off, size) },
		pause: func(fails int, err error) error { return r.pause(ctx, fails, err) },
		size:  -1,
	}
	if err := dl.start(); err != nil {
		return nil, 0, err
	}
	return dl, dl.size, nil
}

// get makes one request. Off is where the body shall begin and size where it
// ends, -1 when that is not known. Errors: ErrNoBlob, *permanentError, and
// others, after which it is worth another try.
func (r *registry) get(ctx context.Context, k kind, what string, off, size int64) (*http.Response, error) {
	client, err := r.connect(ctx)
	if err != nil {
		return nil, err
	}
	repo := r.ref.Context()
	req, err := http.NewRequest(http.MethodGet, fmt.Sprintf("%s://%s/v2/%s/%s/%s", repo.Scheme(), repo.RegistryStr(), repo.RepositoryStr(), k, what), nil)
	if err != nil {
		return nil, &permanentError{err}
	}
	if k == kindManifest {
		req.Header.Set("Accept", accepted)
	}
	switch { // not every registry understands a range without an end
	case off > 0 && size > 0:
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, size-1))
	case off > 0:
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
	resp, err := client.Do(req.WithContext(ctx))
	if err != nil {
		return nil, r.classify(err)
	}
	if err := r.checkStatus(resp, off); err != nil {
		resp.Body.Close() // the status has said it
		return nil, err
	}
	return resp, nil
}

// connect finds out how the registry wants to be asked, once.
func (r *registry) connect(ctx context.Context) (*http.Client, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client != nil {
		return r.client, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*r.cfg.StallTimeout)
	defer cancel()
	repo := r.ref.Context()
	rt, err := transport.NewWithContext(ctx, repo.Registry, r.cfg.Credentials.authenticator(), r.base, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		return nil, r.classify(err)
	}
	r.client = &http.Client{Transport: rt}
	return r.client, nil
}

// tries is how often a request is made that fails in a way that may pass.
const tries = 5

// maxPause bounds what a registry may ask for with Retry-After.
const maxPause = 60 * time.Second

// retry does f until it succeeds or trying again is of no use.
func (r *registry) retry(ctx context.Context, f func() error) error {
	for fails := 1; ; fails++ {
		err := f()
		if err == nil {
			return nil
		}
		if perr := r.pause(ctx, fails, err); perr != nil {
			return perr
		}
	}
}

// pause waits before try number fails+1, or returns the error when there is none.
func (r *registry) pause(ctx context.Context, fails int, err error) error {
	var busy *busyError
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, ErrNoBlob) || errors.As(err, new(*permanentError)):
		return err
	case fails >= tries:
		return fmt.Errorf("%w: tried %d times: %w", ErrUnavailable, fails, err)
	}
	wait := r.cfg.RetryWait << (fails - 1)
	if errors.As(err, &busy) && busy.after > wait {
		wait = min(busy.after, maxPause)
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
