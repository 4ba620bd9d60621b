package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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

	mu    sync.Mutex                 // guards what follows
	lists map[chunk.Digest][]uint32  // what of an image the reader got the last time
	asked map[chunk.Digest]time.Time // when a store was last asked for a list alone
}

func newNodeImages(flags workerFlags, wk *worker.Worker) *nodeImages {
	return &nodeImages{
		flags: flags, worker: wk, ending: make(chan struct{}),
		lists: map[chunk.Digest][]uint32{}, asked: map[chunk.Digest]time.Time{},
	}
}

const (
	// aheadTime is how long a sandbox's image may take to come in the order of its list.
	aheadTime = 30 * time.Second
	// freshTime is how long after its image came a mount may be read ahead by what the
	// reader told meanwhile: then the reader is asked what of it is still here.
	freshTime = 2 * time.Second
	// askTime bounds the request for a list, as another mount may wait for its turn.
	askTime = 2 * time.Second
	// askAgain is how long a store is not asked again for the list of an image.
	askAgain = time.Minute
	// maxLists bounds the images whose list is kept, in 16 KiB each at most.
	maxLists = 256
)

// fetch has an image on this machine. One that is named by its digest and was verified
// here before waits for no store. Errors: those of package sandbox.
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
			return node.Fetched{Image: im, Ahead: n.again(im.ID, wanted{ref, platform})}, n.worker.EnsureReader(ctx)
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
	return node.Fetched{Image: s.Image, Ahead: n.fresh(s, time.Now())}, nil
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
	if len(list) == 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, known := n.lists[id]; !known && len(n.lists) >= maxLists {
		clear(n.lists) // which the store tells again
	}
	n.lists[id] = list
}

// mayAsk reports whether a store is to be asked for the list of an image, and notes that
// it is.
func (n *nodeImages) mayAsk(id chunk.Digest, now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	last, known := n.asked[id]
	if known && now.Sub(last) < askAgain {
		return false
	}
	if !known && len(n.asked) >= maxLists {
		clear(n.asked)
	}
	n.asked[id] = now
	return true
}

// fresh is Fetched.Ahead of an image that came then. What the reader told of it is what it
// had: late, it is asked what it still has, so that no read of the mount waits for a store.
func (n *nodeImages) fresh(s *started, then time.Time) func(context.Context) <-chan uint32 {
	return func(ctx context.Context) <-chan uint32 {
		if time.Since(then) < freshTime {
			return s.coming
		}
		return n.told(ctx, s.ID, func() ([]uint32, error) {
			select {
			case <-s.handed:
				return s.told, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		})
	}
}

// again is Fetched.Ahead of an image that is here. A store is asked for its list when
// that is not known, and the create does not wait for it; a run that leaves no trace asks
// for none.
func (n *nodeImages) again(id chunk.Digest, want wanted) func(context.Context) <-chan uint32 {
	n.mu.Lock()
	list, asked := n.lists[id], n.asked[id]
	n.mu.Unlock()
	if list == nil && (n.worker.NoTrace || time.Since(asked) < askAgain) {
		return nil
	}
	return func(ctx context.Context) <-chan uint32 {
		return n.told(ctx, id, func() ([]uint32, error) {
			if list != nil || !n.mayAsk(id, time.Now()) {
				return list, nil
			}
			list, err := n.ask(ctx, id, want)
			n.keep(id, list)
			return list, err
		})
	}
}

// ask has a store tell the list of an image that is here. No record is made for it, of
// a run that has begun.
func (n *nodeImages) ask(ctx context.Context, id chunk.Digest, want wanted) (list []uint32, err error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	flags := n.flags
	images, stores, err := flags.target.images(ctx, n.worker)
	if err != nil {
		return nil, err
	}
	defer stores.Close()
	images.Decoded = &n.decoded
	var listErr error
	_, err = images.FetchStart(ctx, want.ref, want.platform, true, func(its chunk.Digest, rest io.ReadCloser) {
		if rest == nil {
			return
		}
		defer rest.Close()
		if its == id { // else the image was converted anew
			list, _, listErr = trace.NewReader(rest).List()
		}
	})
	if err = errors.Join(err, listErr); err != nil {
		return nil, err
	}
	return list[:min(len(list), maxComing)], nil
}

// told tells which chunks of a list the reader has, once that is known.
func (n *nodeImages) told(ctx context.Context, id chunk.Digest, list func() ([]uint32, error)) <-chan uint32 {
	coming := make(chan uint32, maxComing) // no list has more
	go func() {                            // ends with ctx, or when the reader has told of all
		defer close(coming)
		its, err := list()
		if err == nil && len(its) > 0 {
			var stream bytes.Buffer
			w := trace.NewWriter(&stream)
			err = errors.Join(w.List(its, 0), w.Close())
			if err == nil {
				err = reader.Start(ctx, n.worker.Dir, id, &stream, func(c uint32) { coming <- c })
			}
		}
		if err != nil && ctx.Err() == nil {
			n.worker.Log.DebugContext(ctx, "what runs touch is not read ahead", "image_id", id, "err", err)
		}
	}()
	return coming
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
