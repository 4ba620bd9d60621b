package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/access"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

// What a store answers a worker is not the worker's answer to its client: who has a good
// token of the worker is not told that it has none.
func TestTheStoresRefusalsAreTheWorkersTrouble(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want error
	}{
		"a token that is unknown":      {&api.Error{Status: http.StatusUnauthorized, Code: "unauthenticated", Message: "no valid token"}, sandbox.ErrImagePull},
		"a token of other images":      {&api.Error{Status: http.StatusForbidden, Code: "forbidden", Message: "not yours"}, sandbox.ErrImagePull},
		"a proxy that asks for one":    {fmt.Errorf("get: %w", &api.Error{Status: http.StatusUnauthorized}), sandbox.ErrImagePull},
		"no token":                     {fmt.Errorf("get: %w", store.ErrUnauthorised), sandbox.ErrImagePull},
		"an image that is not there":   {&api.Error{Status: http.StatusNotFound, Code: "image_unknown", Message: "image not found"}, sandbox.ErrImage},
		"an image that is not ready":   {api.ErrConverting, sandbox.ErrImagePending},
		"a store that is overburdened": {&api.Error{Status: http.StatusTooManyRequests, Code: "busy", Message: "come again"}, sandbox.ErrImagePull},
		"a full disk":                  {fmt.Errorf("write: %w", syscall.ENOSPC), sandbox.ErrImagePull},
	} {
		err := imageError(c.err)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
		for _, not := range []error{access.ErrUnauthenticated, access.ErrForbidden} {
			if errors.Is(err, not) {
				t.Errorf("%s: %v is %v of the client", name, err, not)
			}
		}
		if errors.Is(c.err, store.ErrUnauthorised) && !strings.Contains(err.Error(), "--token-file") {
			t.Errorf("%s: %v does not say what helps", name, err)
		}
	}
	if err := imageError(syscall.ENOSPC); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a full disk of this machine is not told: %v", err)
	}
}

// What a reader got of an image is not lost because nothing came of another.
func TestListsAreKeptUntilThereAreTooMany(t *testing.T) {
	n := newNodeImages(workerFlags{}, &worker.Worker{})
	id := func(i int) chunk.Digest { return chunk.Sum([]byte{byte(i >> 8), byte(i)}) }
	for i := range maxLists {
		n.keep(id(i), []uint32{1})
	}
	n.keep(id(maxLists), nil)
	n.keep(id(0), []uint32{1, 2})
	if len(n.lists) != maxLists || len(n.lists[id(0)]) != 2 {
		t.Errorf("%d lists are kept of %d, with %v of the first", len(n.lists), maxLists, n.lists[id(0)])
	}
	if n.keep(id(maxLists), []uint32{3}); len(n.lists) > maxLists || n.lists[id(maxLists)] == nil {
		t.Errorf("%d lists are kept, with %v of the last", len(n.lists), n.lists[id(maxLists)])
	}
}

// A store that is away, or has no list, is not asked by every create.
func TestAListIsAskedForNowAndThen(t *testing.T) {
	n := newNodeImages(workerFlags{}, &worker.Worker{})
	id, now := chunk.Sum(nil), time.Now()
	if n.again(id, wanted{}) == nil || !n.mayAsk(id, now) {
		t.Error("a list that is not known is not asked for")
	}
	if n.again(id, wanted{}) != nil || n.mayAsk(id, now.Add(askAgain/2)) {
		t.Error("a list is asked for twice at once")
	}
	if !n.mayAsk(id, now.Add(askAgain)) {
		t.Error("a list is never asked for again")
	}
	for i := range 3 * maxLists {
		n.mayAsk(chunk.Sum([]byte{byte(i >> 8), byte(i)}), now)
	}
	if len(n.asked) > maxLists {
		t.Errorf("%d images are kept in mind", len(n.asked))
	}
}

// A chunk that the reader had long ago may have made room: to read it would ask the store.
func TestWhatWasToldLongAgoIsNotReadAhead(t *testing.T) {
	n := newNodeImages(workerFlags{}, &worker.Worker{})
	s := &started{Image: &folder.Image{}, handed: make(chan struct{}), coming: make(chan uint32, 1)}
	s.coming <- 7
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the reader is not asked
	for c := range n.fresh(s, time.Now().Add(-freshTime))(ctx) {
		t.Errorf("chunk %d is read by what was told long ago", c)
	}
	if c := <-n.fresh(s, time.Now().Add(time.Hour))(ctx); c != 7 {
		t.Errorf("got chunk %d of what was just told, want 7", c)
	}
}
