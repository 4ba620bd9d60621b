package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"quarry/api/client"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// handTime is what a command that has nothing else to do waits for its image's
// first chunks to reach the reader: 32 MiB take 0.1 s at 1 Gbit/s, and a reader
// that has the list fetches the rest by itself.
const handTime = 2 * time.Second

// maxComing is how many chunks that the reader has got are kept in mind for whoever
// reads them ahead: a list of 64 MiB has some 1300.
const maxComing = 4096

// started is an image that is on this machine. The rest of the store's answer goes
// to the reader while the image is being decoded and mounted.
type started struct {
	*folder.Image
	stores *client.Stores
	cancel context.CancelFunc
	handed chan struct{} // closed when nothing goes to the reader any more
	// coming has the numbers of the chunks that the reader has got, and is closed
	// before handed.
	coming chan uint32
	told   []uint32 // the same; not to be read before handed is closed
}

// startImage resolves and verifies an image, and makes sure that a reader runs
// meanwhile, which it tells that a run begins. With ahead, the caller reads the chunks
// that are coming when the store can do without a record of the run. Whoever calls it
// calls end, also when it fails.
func startImage(ctx context.Context, w *workerFlags, wk *worker.Worker, name string, ahead bool) (*started, error) {
	ref, platform, err := w.wanted(name)
	if err != nil {
		return notStarted(), err
	}
	images, stores, err := w.target.images(ctx, wk)
	if err != nil {
		return notStarted(), err
	}
	return startFrom(ctx, w, wk, images, stores, wanted{ref, platform}, ahead)
}

// wanted is an image that is asked for.
type wanted struct {
	ref      image.Ref
	platform image.Platform
}

// notStarted is what there is of an image when nothing was begun.
func notStarted() *started {
	s := &started{cancel: func() {}, handed: make(chan struct{}), coming: make(chan uint32)}
	s.nothing()
	return s
}

// startFrom is startImage from stores that are known, which end closes.
func startFrom(ctx context.Context, w *workerFlags, wk *worker.Worker, images *folder.Images, stores *client.Stores, want wanted, ahead bool) (*started, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &started{cancel: cancel, stores: stores, handed: make(chan struct{}), coming: make(chan uint32, maxComing)}
	patience, err := w.reader.readTimeout.duration()
	if err != nil {
		s.nothing()
		return s, err
	}
	fetchCtx, heard := unlessSilent(ctx, s.stores, patience)
	var readerErr error
	readerUp := make(chan struct{})
	go func() { // ends with ctx; waited for below
		defer close(readerUp)
		readerErr = wk.EnsureReader(ctx)
	}()
	handing := false
	hand := func(id chunk.Digest, rest io.ReadCloser) {
		handing = true
		go func() { // ends with s.end, or when all is handed over
			<-readerUp
			s.hand(ctx, wk, id, rest, ahead)
		}()
	}
	err = whenReady(fetchCtx, w.wait, func() (err error) {
		s.Image, err = images.FetchStart(fetchCtx, want.ref, want.platform, !wk.NoTrace, hand)
		return err
	})
	if err = heard(err); err != nil && !handing {
		if s.Image, err = offline(images, want.ref, want.platform, err); err == nil {
			hand(s.Image.ID, nil)
		}
	}
	if err != nil {
		cancel() // what the reader's start says then is of no interest
	}
	<-readerUp
	if err == nil {
		err = readerErr
	}
	if !handing {
		s.nothing()
	}
	return s, err
}

// offline returns an image of a digest that this machine has, when err says that no
// store answers.
func offline(images *folder.Images, ref image.Ref, p image.Platform, err error) (*folder.Image, error) {
	if !errors.Is(err, store.ErrUnreachable) && !errors.Is(err, client.ErrSilent) && !errors.Is(err, errSilentStore) {
		return nil, err
	}
	im, why := images.Offline(ref, p)
	if why != nil {
		return nil, fmt.Errorf("%w; %w", err, why)
	}
	images.Log.Warn("no store answers: the image is used as it was fetched, and content that is not in the cache cannot be read", "image_id", im.ID, "err", err)
	return im, nil
}

// nothing says that there is nothing to hand to the reader.
func (s *started) nothing() {
	close(s.coming)
	close(s.handed)
}

// hand tells the reader that a run begins, which then opens the image, and hands on
// what may help it. The run does not need that. One that leaves no trace is not
// recorded, as one that reads ahead is not.
func (s *started) hand(ctx context.Context, wk *worker.Worker, id chunk.Digest, rest io.ReadCloser, ahead bool) {
	defer s.nothing()
	var body io.Reader
	var came func(uint32)
	if wk.NoTrace {
		came = s.came
	}
	if rest != nil {
		defer rest.Close()
		body = rest
		if r, ok := rest.(client.Rest); ok && r.Enough && ahead {
			came = s.came
		}
	}
	if err := reader.Start(ctx, wk.Dir, id, body, came); err != nil && ctx.Err() == nil {
		wk.Log.DebugContext(ctx, "start not handed to the reader", "err", err)
	}
}

// came notes a chunk that the reader has got; what is too much is not read ahead.
func (s *started) came(n uint32) {
	if len(s.told) < maxComing {
		s.told = append(s.told, n)
	}
	select {
	case s.coming <- n:
	default:
	}
}

// await waits until the reader has what it gets, for so long at most.
func (s *started) await(ctx context.Context, most time.Duration) {
	select {
	case <-s.handed:
	case <-ctx.Done():
	case <-time.After(most):
	}
}

// end ends the handing over.
func (s *started) end() {
	s.cancel()
	<-s.handed
	if s.stores != nil {
		s.stores.Close()
	}
}

// cost is what was exchanged with the store, beside what the reader counts.
func (s *started) cost() reader.Stats {
	if s.stores == nil {
		return reader.Stats{}
	}
	t := trafficOf(s.stores.Stats().Stats)
	return reader.Stats{Requests: t.Requests, WireBytes: t.WireBytes, BucketBytes: t.BucketBytes}
}
