package main

import (
	"context"
	"io"
	"time"

	"quarry/api/client"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// handTime is what a command that has nothing else to do waits for its image's
// first chunks to reach the reader: 32 MiB take 0.1 s at 1 Gbit/s, and a reader
// that has the list fetches the rest by itself.
const handTime = 2 * time.Second

// started is an image that is on this machine. The rest of the store's answer goes
// to the reader while the image is being mounted.
type started struct {
	*folder.Image
	stores *client.Stores
	cancel context.CancelFunc
	handed chan struct{} // closed when nothing goes to the reader any more
}

// startImage resolves and verifies an image, and makes sure that a reader runs
// meanwhile, which it tells that a run begins. Whoever calls it calls end, also
// when it fails.
func startImage(ctx context.Context, w *workerFlags, wk *worker.Worker, name string) (*started, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &started{cancel: cancel, handed: make(chan struct{})}
	ref, platform, err := w.wanted(name)
	var images *folder.Images
	if err == nil {
		images, s.stores, err = w.target.images(ctx, wk)
	}
	if err != nil {
		close(s.handed)
		return s, err
	}
	readerUp := make(chan error, 1)
	go func() { readerUp <- wk.EnsureReader(ctx) }() // ends with ctx; waited for below
	var rest io.ReadCloser
	if w.noTrace {
		s.Image, err = images.Fetch(ctx, ref, platform)
	} else {
		s.Image, rest, err = images.FetchStart(ctx, ref, platform)
	}
	if err != nil {
		cancel() // what the reader's start says then is of no interest
	}
	readerErr := <-readerUp
	if err == nil {
		err = readerErr
	}
	if err != nil || w.noTrace {
		if rest != nil {
			rest.Close()
		}
		close(s.handed)
		return s, err
	}
	go func() { // ends with s.end, or when all is handed over
		defer close(s.handed)
		s.hand(ctx, wk, rest)
	}()
	return s, nil
}

// hand tells the reader that a run begins, and hands on what may help it. The run
// does not need that.
func (s *started) hand(ctx context.Context, wk *worker.Worker, rest io.ReadCloser) {
	var body io.Reader
	if rest != nil {
		defer rest.Close()
		body = rest
	}
	if err := reader.Start(ctx, wk.Dir, s.ID, body); err != nil && ctx.Err() == nil {
		wk.Log.DebugContext(ctx, "start not handed to the reader", "err", err)
	}
}

// await waits until the reader has what it gets, for a bounded time.
func (s *started) await(ctx context.Context) {
	select {
	case <-s.handed:
	case <-ctx.Done():
	case <-time.After(handTime):
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
