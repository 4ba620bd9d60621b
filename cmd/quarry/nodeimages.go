package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"quarry/api"
	"quarry/signer"
	"quarry/store"
	"quarry/store/image"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

// nodeImages has images on this machine for the sandboxes of a worker.
type nodeImages struct {
	flags   workerFlags // resolved
	worker  *worker.Worker
	handed  sync.WaitGroup // starts whose rest goes to the reader
	decoded folder.Decoded // of images that sandboxes are made of again and again
}

// fetch has an image on this machine. One that is named by its digest and was verified
// here before costs the store no request. Errors: those of package sandbox.
func (n *nodeImages) fetch(ctx context.Context, name string) (*folder.Image, error) {
	flags := n.flags // each fetch has its own: it fills in what it was not told
	ref, platform, err := flags.wanted(name)
	if err != nil {
		return nil, fmt.Errorf("%w: image %q: %s", sandbox.ErrInvalid, name, strings.TrimPrefix(err.Error(), errUsage.Error()+": "))
	}
	images, stores, err := flags.target.images(ctx, n.worker)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", sandbox.ErrImagePull, err)
	}
	images.Decoded = &n.decoded
	if ref.Digest != nil {
		if im, err := images.Offline(ref, platform); err == nil {
			stores.Close()
			return im, n.worker.EnsureReader(ctx)
		}
	}
	// What follows the image in the store's answer is handed to the reader after this
	// returns.
	s, err := startFrom(context.WithoutCancel(ctx), &flags, n.worker, images, stores, wanted{ref, platform}, false)
	n.handed.Go(func() { // ends when all is handed over, for which await has a bound
		s.await(context.WithoutCancel(ctx))
		s.end()
	})
	if err != nil {
		return nil, imageError(err)
	}
	return s.Image, nil
}

// close waits for what is handed to the reader.
func (n *nodeImages) close() { n.handed.Wait() }

// imageError says in the words of package sandbox why an image was not had. What the
// store answered the worker is none of its answers to a client: only the words are kept.
func imageError(err error) error {
	kind := sandbox.ErrImagePull
	switch {
	case isAny(err, api.ErrPending, api.ErrConverting, api.ErrUnsigned):
		kind = sandbox.ErrImagePending
	case isAny(err, api.ErrRepoUnknown, api.ErrTagUnknown, api.ErrImageUnknown, api.ErrPlatformUnknown, api.ErrImageFailed):
		kind = sandbox.ErrImage
	case isDamage(err) || isAny(err, signer.ErrWrongKey, image.ErrRollback, image.ErrExpired, image.ErrWrongRepo, image.ErrWrongTag, image.ErrNoName):
		kind = sandbox.ErrImageVerify
	case errors.Is(err, store.ErrUnauthorised):
		return fmt.Errorf("%w: the store refused this worker, not you: its operator gives it a token that is good for the image with --token-file: %v", kind, err)
	}
	if _, told := errors.AsType[*api.Error](err); told {
		return fmt.Errorf("%w: %v", kind, err)
	}
	return fmt.Errorf("%w: %w", kind, err)
}

func isAny(err error, targets ...error) bool {
	for _, t := range targets {
		if errors.Is(err, t) {
			return true
		}
	}
	return false
}
