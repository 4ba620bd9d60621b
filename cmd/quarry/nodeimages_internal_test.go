package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"quarry/api"
	"quarry/api/access"
	"quarry/store"
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
