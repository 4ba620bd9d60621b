package client

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"quarry/api"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Start is Client.Start at the first store that has the image and gives it
// whole. What another store sends after one has broken off is verified like the
// first: verify may be called once more for each.
func (s *Stores) Start(ctx context.Context, ref image.Ref, p image.Platform, have *chunk.Digest, prefetch bool,
	verify func(name, statement []byte) (*image.Verified, error),
) (config, bootstrap []byte, rest io.ReadCloser, err error) {
	err = s.first(ctx, func(c *Client) (err error) {
		config, bootstrap, rest, err = c.Start(ctx, ref, p, have, prefetch, func(name, statement []byte) (*image.Verified, error) {
			v, err := verify(name, statement)
			if err != nil {
				err = said{err}
			}
			return v, err
		})
		return err
	})
	return config, bootstrap, rest, err
}

// Image is Client.Image at the first store that has it.
func (s *Stores) Image(ctx context.Context, ref image.Ref, p image.Platform) (doc api.Image, err error) {
	err = s.first(ctx, func(c *Client) (err error) {
		doc, err = c.Image(ctx, ref, p)
		return err
	})
	return doc, err
}

// Bootstrap is Client.Bootstrap at the first store that has a good one.
func (s *Stores) Bootstrap(ctx context.Context, d chunk.Digest, size int64) (p []byte, err error) {
	err = s.first(ctx, func(c *Client) (err error) {
		p, err = c.Bootstrap(ctx, d, size)
		return err
	})
	return p, err
}

// Config is Client.Config at the first store that has a good one.
func (s *Stores) Config(ctx context.Context, d chunk.Digest) (p []byte, err error) {
	err = s.first(ctx, func(c *Client) (err error) {
		p, err = c.Config(ctx, d)
		return err
	})
	return p, err
}

// first makes a call at one store after the other until one succeeds. A store
// that may do better later is asked again when all have been asked. The only
// store there is gets the client's own attempts and patience.
func (s *Stores) first(ctx context.Context, call func(*Client) error) error {
	if len(s.members) == 1 {
		return call(s.members[0].Client)
	}
	errs := make([]error, len(s.members))
	settled := 0
	for n := 1; ; n++ {
		wait := maxRetryAfter
		for _, m := range s.order(time.Now()) {
			if errs[m.i] != nil && isSettled(errs[m.i]) {
				continue
			}
			m.asked()
			err := call(m.with(1, s.patience(m, n)))
			switch now := time.Now(); {
			case err == nil:
				m.answered()
				return nil
			case ctx.Err() != nil:
				m.left(now, false)
				return err
			case isSettled(err) && !errors.Is(err, store.ErrUnauthorised):
				m.left(now, false)
			default:
				m.failed(now, err)
			}
			errs[m.i] = reason(m, err)
			if isSettled(err) {
				settled++
			} else {
				wait = min(wait, s.backoff(n, err))
			}
		}
		if settled == len(s.members) || n == s.cfg.Attempts {
			return foremost(errs)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return errors.Join(ctx.Err(), foremost(errs))
		}
	}
}

// isSettled: the store has said what it has to say about an image, or nobody
// believes it.
func isSettled(err error) bool {
	return hopeless(err) || isPending(err) || errors.Is(err, api.ErrObjectCorrupt)
}

func isPending(err error) bool {
	var e *api.Error
	return errors.As(err, &e) && e.Status == http.StatusAccepted
}

// foremost joins what the stores said: first what a caller can wait for, last
// what says nothing about the image.
func foremost(errs []error) error {
	slices.SortStableFunc(errs, func(a, b error) int { return cmp.Compare(rank(a), rank(b)) })
	return joined(errs)
}

func rank(err error) int {
	switch {
	case isPending(err):
		return 0
	case isSettled(err):
		return 1
	}
	return 2
}
