package api_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/lease"
)

// keeper is a LeaseKeeper that remembers what it was told.
type keeper struct {
	mu     sync.Mutex // guards leases
	leases map[string]lease.Lease
}

func (k *keeper) Renew(_ context.Context, l lease.Lease) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.leases[l.ID] = l
	return nil
}

func (k *keeper) End(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.leases, id)
}

// A lease keeps the chunks of a mount. Who knows its id and has another token neither
// ends it nor makes it one of another image; extending it harms nobody, and is what a
// worker does that got a new token.
func TestALeaseIsOfTheTokenThatBeganIt(t *testing.T) {
	w := apitest.New(t)
	k := &keeper{leases: map[string]lease.Lease{}}
	g := newGuarded(t, w, func(c *api.Config) { c.Leases = k })
	image, other := "sha256:"+strings.Repeat("1", 64), "sha256:"+strings.Repeat("2", 64)
	put := func(who, image, ttl string) answer {
		return g.ask(t, who, "PUT", "/v1/leases/m", `{"ttl_seconds":`+ttl+`,"image":"`+image+`"}`)
	}
	ok := func(what string, a answer) {
		t.Helper()
		if a.StatusCode/100 != 2 {
			t.Errorf("%s: status %d, body %s", what, a.StatusCode, a.body)
		}
	}
	ok("begun", put("pull", image, "60"))
	wantError(t, g.ask(t, "team", "DELETE", "/v1/leases/m", ""), 403, "forbidden")
	wantError(t, put("team", other, "3600"), 403, "forbidden")
	wantError(t, put("team", image, "1"), 403, "forbidden")
	if l, there := k.leases["m"]; !there || l.Image.String() != image || l.TTLSeconds != 60 {
		t.Errorf("the lease is %+v, %t", l, there)
	}
	ok("extended", put("team", image, "3600"))
	wantError(t, g.ask(t, "team", "DELETE", "/v1/leases/m", ""), 403, "forbidden")
	ok("its own", put("pull", other, "60"))
	ok("its own", g.ask(t, "pull", "DELETE", "/v1/leases/m", ""))
	if len(k.leases) != 0 {
		t.Errorf("left are %v", k.leases)
	}
	ok("begun again", put("pull", image, "60"))
	ok("by an admin", g.ask(t, "admin", "DELETE", "/v1/leases/m", ""))
	ok("none is there", g.ask(t, "team", "DELETE", "/v1/leases/m", ""))
}
