package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"quarry/api"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/pack"
)

var (
	_ store.Getter      = (*Client)(nil)
	_ store.BatchGetter = (*Client)(nil)
)

// Get implements store.Getter, as a batch of one: the chunk crosses the network
// as it is stored.
func (c *Client) Get(ctx context.Context, d chunk.Digest, dst []byte) ([]byte, error) {
	err := c.GetBatch(ctx, []chunk.Digest{d}, func(_ chunk.Digest, p []byte, err error) error {
		if err == nil {
			dst = append(dst[:0], p...)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return dst, nil
}

// GetBatch implements store.BatchGetter. Chunks that an attempt did not answer,
// or answered with bytes that are not theirs, are asked for again; fn hears of a
// failure only when no attempt is left. An answer cut off behind its last chunk
// has answered, as every chunk was verified; one that breaks the format is an
// error even then.
func (c *Client) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	seen := make(map[chunk.Digest]bool, len(ds))
	var group []chunk.Digest
	for _, d := range ds {
		if seen[d] {
			continue
		}
		seen[d] = true
		if group = append(group, d); len(group) == api.MaxBatch {
			if err := c.getGroup(ctx, group, fn); err != nil {
				return err
			}
			group = nil
		}
	}
	return c.getGroup(ctx, group, fn)
}

// group is a set of digests on their way to an answer.
type group struct {
	fn     func(chunk.Digest, []byte, error) error
	open   []chunk.Digest         // not answered yet, in the order asked
	failed map[chunk.Digest]error // of open: how the last attempt failed
	plain  []byte                 // decoding buffer
}

func (c *Client) getGroup(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	g := &group{fn: fn, open: ds}
	for n := 1; len(g.open) > 0; n++ {
		g.failed = make(map[chunk.Digest]error)
		err := c.attempt(ctx, request{
			method: http.MethodPost, path: "/v1/chunks:batchGet",
			body: api.EncodeDigests(g.open), contentType: api.TypeDigests,
		}, g.read)
		var s *stop
		switch {
		case errors.As(err, &s):
			return s.err
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !retryable(err):
			return err
		case n >= c.cfg.Attempts:
			return g.giveUp(err)
		case len(g.open) == 0 && errors.As(err, new(*api.FrameError)):
			return err // nothing left to ask for, but a server that lies
		}
		if len(g.open) > 0 {
			if werr := c.pause(ctx, n, err); werr != nil {
				return werr
			}
		}
	}
	return nil
}

// giveUp reports what stays open: chunks with an error of their own to fn, and
// the error of the answer when it has not even those.
func (g *group) giveUp(err error) error {
	for _, d := range g.open {
		reason := g.failed[d]
		if reason == nil {
			continue
		}
		if ferr := g.fn(d, nil, reason); ferr != nil {
			return ferr
		}
	}
	return err
}

// read takes one answer. What it leaves in g.open has not been answered.
func (g *group) read(resp *http.Response) error {
	if kind := resp.Header.Get("Content-Type"); kind != api.TypeFrames {
		return &stop{fmt.Errorf("batch answer has Content-Type %q, want %s: is this a quarry server?", kind, api.TypeFrames)}
	}
	asked := make(map[chunk.Digest]bool, len(g.open))
	for _, d := range g.open {
		asked[d] = true
	}
	answered := make(map[chunk.Digest]bool, len(g.open))
	defer g.settle(answered)
	fr := api.NewFrameReader(resp.Body, len(g.open))
	for {
		f, err := fr.Next()
		if err == io.EOF {
			return g.complete(asked)
		}
		if err != nil {
			return err
		}
		if !asked[f.Digest] {
			return &api.FrameError{Off: fr.Offset(), Reason: fmt.Sprintf("frame for %s, which was not asked for or was answered before", f.Digest)}
		}
		delete(asked, f.Digest)
		final, err := g.take(f)
		if err != nil {
			return &stop{err}
		}
		if final {
			answered[f.Digest] = true
		}
	}
}

// complete refuses an answer that ends properly and leaves digests out.
func (g *group) complete(left map[chunk.Digest]bool) error {
	for _, d := range g.open {
		if left[d] {
			return fmt.Errorf("batch answer has no frame for %s, asked for with %d others", d, len(g.open)-1)
		}
	}
	return nil
}

// settle takes what was answered from the open digests.
func (g *group) settle(answered map[chunk.Digest]bool) {
	var open []chunk.Digest
	for _, d := range g.open {
		if !answered[d] {
			open = append(open, d)
		}
	}
	g.open = open
}

// take hands the chunk of a frame to fn, or its final error; it reports false
// when asking again may help. The error is fn's.
func (g *group) take(f api.Frame) (final bool, err error) {
	switch f.Status {
	case api.StatusNotFound:
		return true, g.fn(f.Digest, nil, fmt.Errorf("chunk %s: %w", f.Digest, store.ErrNotFound))
	case api.StatusCorrupt:
		return true, g.fn(f.Digest, nil, &store.CorruptError{Want: f.Digest, Err: fmt.Errorf("server says: %s", f.Reason)})
	case api.StatusError:
		g.failed[f.Digest] = &api.Error{
			Code: "chunk_error", Message: fmt.Sprintf("chunk %s: server says: %s", f.Digest, f.Reason),
			Retryable: true, Blame: api.BlameInfra,
		}
		return false, nil
	}
	p, verr := g.verify(f)
	if verr != nil {
		g.failed[f.Digest] = verr
		return false, nil
	}
	return true, g.fn(f.Digest, p, nil)
}

// verify returns the plain bytes of a frame when they are the chunk's.
func (g *group) verify(f api.Frame) ([]byte, error) {
	if got := pack.Checksum(f.Stored); got != f.CRC {
		return nil, &store.CorruptError{Want: f.Digest, Err: fmt.Errorf("received bytes have CRC32C %08x, the frame says %08x", got, f.CRC)}
	}
	p, err := pack.Decode(g.plain, f.Codec, f.Stored, f.Len)
	if err != nil {
		return nil, &store.CorruptError{Want: f.Digest, Err: err}
	}
	g.plain = p
	if got := chunk.Sum(p); got != f.Digest {
		return nil, &store.CorruptError{Want: f.Digest, Got: got}
	}
	return p, nil
}
