package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"testing"

	"quarry/api"
	"quarry/api/client"
	"quarry/signer"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
)

// A store that says no is believed; only one that says nothing is gone around.
func TestAnAnswerIsNoOutage(t *testing.T) {
	dir, err := os.MkdirTemp("", "q") // a worker folder's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d, err := folder.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	images := &folder.Images{Dir: d, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	digest := chunk.Sum(nil)
	ref := image.Ref{Repo: "t/x", Digest: &digest}
	for name, tt := range map[string]struct {
		err    error
		outage bool
	}{
		"nobody there":      {&client.StoreError{Outcome: store.Unreachable, Err: io.EOF}, true},
		"silence":           {fmt.Errorf("GET: %w", client.ErrSilent), true},
		"a silent store":    {errSilentStore, true},
		"no such image":     {&api.Error{Status: 404, Code: "image_unknown"}, false},
		"not signed":        {&api.Error{Status: 202, Code: api.StatusUnsigned, Retryable: true}, false},
		"not allowed":       {&api.Error{Status: 403, Code: "forbidden"}, false},
		"a wrong signature": {signer.ErrWrongKey, false},
		"an interruption":   {context.Canceled, false},
	} {
		_, err := offline(images, ref, image.HostPlatform(), tt.err)
		if !errors.Is(err, tt.err) || errors.Is(err, folder.ErrOffline) != tt.outage {
			t.Errorf("%s: %v", name, err)
		}
	}
}
