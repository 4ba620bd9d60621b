package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"quarry/api"
	"quarry/signer"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/trace"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/node"
	"quarry/worker/reader"
	"quarry/worker/sandbox"
)

// nodeImages has images on this machine for the sandboxes of a worker.
type nodeImages struct {
	flags   workerFlags // resolved
	worker  *worker.Worker
	handed  sync.WaitGroup // starts whose rest goes to the reader
	ending  chan struct{}  // closed by close
	decoded folder.Decoded // of images that sandboxes are made of again and again

	mu    sync.Mutex                // guards lists
	lists map[chunk.Digest][]uint32 // what of an image the reader got the last time
}

func newNodeImages(flags workerFlags, wk *worker.Worker) *nodeImages {
	return &nodeImages{flags: flags, worker: wk, ending: make(chan struct{}), lists: map[chunk.Digest][]uint32{}}
}

const (
	// aheadTime is how long a sandbox's image may take to come in the order of its list.
	aheadTime = 30 * time.Second
	// maxLists bounds the images whose list is kept, in 16 KiB each at most.
	maxLists = 256
)

// fetch has an image on this machine. One that is named by its digest and was verified
// here before costs the store no request. Errors: those of package sandbox.
func (n *nodeImages) fetch(ctx context.Context, name string) (node.Fetched, error) {
	var none node.Fetched
	flags := n.flags // each fetch has its own: it fills in what it was not told
	ref, platform, err := flags.wanted(name)
	if err != nil {
		return none, fmt.Errorf("%w: image %q: %s", sandbox.ErrInvalid, name, strings.TrimPrefix(err.Error(), errUsage.Error()+": "))
	}
	images, stores, err := flags.target.images(ctx, n.worker)
	if err != nil {
		return none, fmt.Errorf("%w: %w", sandbox.ErrImagePull, err)
	}
	images.Decoded = &n.decoded
	if ref.Digest != nil {
		if im, err := images.Offline(ref, platform); err == nil {
			stores.Close()
			return node.Fetched{Image: im, Ahead: n.again(im.ID)}, n.worker.EnsureReader(ctx)
		}
	}
	// What follows the image in the store's answer is handed to the reader after this
	// returns.
	s, err := startFrom(context.WithoutCancel(ctx), &flags, n.worker, images, stores, wanted{ref, platform}, true)
	n.handed.Go(func() { // ends when all is handed over, for which await has a bound
		n.await(s)
		s.end()
		if err == nil {
			n.keep(s.ID, s.told)
		}
	})
	if err != nil {
		return none, imageError(err)
	}
	return node.Fetched{Image: s.Image, Ahead: func(context.Context) <-chan uint32 { return s.coming }}, nil
}

// close waits for what is handed to the reader.
func (n *nodeImages) close() {
	close(n.ending)
	n.handed.Wait()
}

// await waits until the reader has what it gets: for as long as what runs touch is being
// fetched, and for what is handed over alone once this worker ends.
func (n *nodeImages) await(s *started) {
	select {
	case <-s.handed:
	case <-n.ending:
		s.await(context.Background(), handTime)
	case <-time.After(aheadTime):
	}
}

// keep keeps in mind what of an image the reader got.
func (n *nodeImages) keep(id chunk.Digest, list []uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.lists) >= maxLists {
		clear(n.lists) // which the store tells again
	}
	if len(list) > 0 {
		n.lists[id] = list
	}
}

// again is Fetched.Ahead of an image about which no store was asked.
func (n *nodeImages) again(id chunk.Digest) func(context.Context) <-chan uint32 {
	n.mu.Lock()
	list := n.lists[id]
	n.mu.Unlock()
	if list == nil {
		return nil
	}
	return func(ctx context.Context) <-chan uint32 {
		coming := make(chan uint32, maxComing) // no list has more
		go func() {                            // ends with ctx, or when the reader has told of all
			defer close(coming)
			var stream bytes.Buffer
			w := trace.NewWriter(&stream)
			err := errors.Join(w.List(list, 0), w.Close())
			if err == nil {
				err = reader.Start(ctx, n.worker.Dir, id, &stream, func(c uint32) { coming <- c })
			}
			if err != nil && ctx.Err() == nil {
				n.worker.Log.DebugContext(ctx, "what runs touch is not read ahead", "image_id", id, "err", err)
			}
		}()
		return coming
	}
}

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
