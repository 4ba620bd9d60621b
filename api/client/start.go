package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"quarry/api"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Start asks in one request for all that a cold start needs, and returns the
// config and the bootstrap of the image, verified. have, when not nil, is the id
// of an image that the caller has: both are nil when ref still is that image.
//
// verify gets the signed envelopes, that of the name statement nil when ref is a
// digest, and says what they prove: image.Verify. Nothing beyond the envelopes
// is read before it has, and nothing beyond what its statement names after.
//
// With prefetch it asks for what runs of the image touch first as well, and
// returns the rest of the answer, a stream that trace.NewReader reads, for the
// caller to close. It has been read up to the bootstrap and no further, nobody has
// verified it, and that it breaks off is no error of Start. It lives as long as
// ctx. Without prefetch, and from a server that has no such stream, it is nil.
// Otherwise it is a Rest.
//
// An answer that breaks off is asked for again. When the next one has the same
// envelopes, the word of the first verify holds and it is not called again. A
// name that moved in between brings other envelopes, which verify sees as it
// would those of a later Start: a verify that remembers serials refuses an older
// name and remembers a newer one, which loses nothing, as a serial says what was
// seen and not what is here. What Start returns is always of the last call, and
// an error of verify is returned at once.
//
// Other errors are those of Image, and api.ErrObjectCorrupt for content that the
// statement does not name.
func (c *Client) Start(ctx context.Context, ref image.Ref, p image.Platform, have *chunk.Digest, prefetch bool,
	verify func(name, statement []byte) (*image.Verified, error),
) (config, bootstrap []byte, rest io.ReadCloser, err error) {
	s := starting{named: ref.Digest == nil, have: have, prefetch: prefetch, verify: verify}
	err = c.call(ctx, startRequest(ref, p, have, prefetch), func(resp *http.Response) error {
		if err := s.read(resp.Body); err != nil || s.version == 1 {
			return err
		}
		keep(resp.Body)
		rest = Rest{resp.Body, resp.Header.Get(api.HeaderTrace) == api.TraceEnough}
		return nil
	})
	if err != nil {
		return nil, nil, nil, err
	}
	return s.config, s.bootstrap, rest, nil
}

// Rest is the rest of an answer to Start.
type Rest struct {
	io.ReadCloser
	// Enough says that the run need not be recorded: the store knows what runs of the
	// image touch.
	Enough bool
}

func startRequest(ref image.Ref, p image.Platform, have *chunk.Digest, prefetch bool) request {
	path := (&url.URL{Path: "/v1/start/" + ref.String()}).EscapedPath() + "?platform=" + url.QueryEscape(p.String())
	if have != nil {
		path += "&have=" + have.Hex()
	}
	media := api.TypeStart
	if prefetch {
		media = api.TypeStart2 + ", " + api.TypeStart
	}
	return request{method: http.MethodGet, path: path, media: media}
}

// starting is one Start, with what its attempts leave for the next.
type starting struct {
	named    bool // the ref is a tag: a name statement must come
	have     *chunk.Digest
	prefetch bool // version 2 was asked for
	verify   func(name, statement []byte) (*image.Verified, error)

	name, image []byte          // envelopes that verify has seen
	proved      *image.Verified // what it said

	config, bootstrap []byte
	version           int // of the answer
}

// read reads one answer; one of version 2 up to what follows the image.
func (s *starting) read(r io.Reader) error {
	sr := api.NewStartReader(r)
	if err := s.envelopes(sr); err != nil {
		return err
	}
	if s.version = sr.Version(); s.version > 1 && !s.prefetch {
		return fmt.Errorf("the server sent version %d of its answer, which was not asked for", s.version)
	}
	known := s.have != nil && *s.have == s.proved.ID
	if known && s.version > 1 {
		s.config, s.bootstrap = nil, nil
		return nil
	}
	switch _, err := sr.Next(); {
	case err == io.EOF && known:
		s.config, s.bootstrap = nil, nil
		return nil
	case err == io.EOF:
		return fmt.Errorf("the server left config and bootstrap of image %s out, which were asked for", s.proved.ID)
	case err != nil:
		return err
	case known:
		return fmt.Errorf("the server sent config and bootstrap of image %s, which is here already", s.proved.ID)
	}
	return s.content(sr)
}

// envelopes reads the envelopes and has them verified.
func (s *starting) envelopes(sr *api.StartReader) error {
	part, err := sr.Next()
	if err != nil {
		return err
	}
	if named := part.Type == api.PartName; named != s.named {
		return fmt.Errorf("the server sent a name statement: %t, want %t", named, s.named)
	}
	var name []byte
	if s.named {
		if name, err = sr.Bytes(); err != nil {
			return err
		}
		if _, err := sr.Next(); err != nil {
			return err
		}
	}
	img, err := sr.Bytes()
	if err != nil {
		return err
	}
	if s.proved != nil && bytes.Equal(name, s.name) && bytes.Equal(img, s.image) {
		return nil
	}
	s.proved, err = s.verify(name, img)
	if err != nil {
		return &stop{err}
	}
	s.name, s.image = name, img
	return nil
}

// content reads config and bootstrap, bounded by what the statement says of
// them, and the end of a stream of version 1. The reader sees to their order.
func (s *starting) content(sr *api.StartReader) error {
	st := s.proved.Statement
	config, err := sr.Bytes()
	if err != nil {
		return err
	}
	if s.config, err = verified("config", config, st.Config); err != nil {
		return err
	}
	part, err := sr.Next()
	if err != nil {
		return err
	}
	if part.Plain != st.BootstrapSize {
		return fmt.Errorf("bootstrap %s: the server sends %d bytes, the image statement says %d", st.Bootstrap, part.Plain, st.BootstrapSize)
	}
	boot, err := sr.Bytes()
	if err != nil {
		return err
	}
	if s.bootstrap, err = verified("bootstrap", boot, st.Bootstrap); err != nil || s.version > 1 {
		return err
	}
	if _, err := sr.Next(); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
