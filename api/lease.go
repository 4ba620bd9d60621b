package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"quarry/api/access"
	"quarry/store/chunk"
	"quarry/store/lease"
)

const (
	// MaxLeases bounds the table of leases: one per mount, some hundreds on a
	// busy machine.
	MaxLeases = 4096
	// MaxLeaseTTL is the longest time a holder that died can keep what it held.
	MaxLeaseTTL = time.Hour
	// maxLeaseImage bounds the image reference a lease names.
	maxLeaseImage = 1024
)

// Lease keeps the server running, and the image's chunks stored, until it
// expires. A mount renews one for as long as it stands.
type Lease struct {
	ID      string    `json:"id"`
	Image   string    `json:"image"`
	Expires time.Time `json:"expires"`
}

// LeaseKeeper keeps leases; store/lease.Table is one.
type LeaseKeeper interface {
	Renew(ctx context.Context, l lease.Lease) error
	End(id string)
}

// keepLease tells the keeper of a lease. Image and bootstrap that are no digests are for
// people to read.
func (h *Handler) keepLease(ctx context.Context, id string, req LeaseRequest) error {
	if h.cfg.Leases == nil {
		return nil
	}
	l := lease.Lease{ID: id, TTLSeconds: req.TTLSeconds}
	l.Image, _ = chunk.Parse(req.Image)
	if req.Bootstrap != "" {
		var err error
		if l.Bootstrap, err = chunk.Parse(req.Bootstrap); err != nil {
			return fmt.Errorf("%w: bootstrap: %w", ErrBadRequest, err)
		}
	}
	err := h.cfg.Leases.Renew(ctx, l)
	if errors.Is(err, lease.ErrFull) {
		return fmt.Errorf("%w: %w", ErrLeasesFull, err)
	}
	return err
}

// leases is the table of the leases that are live for people and for the server's own
// end. What gc counts is the LeaseKeeper's.
type leases struct {
	now func() time.Time
	mu  sync.Mutex // guards m
	m   map[string]heldLease
}

// heldLease is a lease and whose it is.
type heldLease struct {
	Lease
	holder    string // what the token is called that began it; "" for one who showed none
	bootstrap string
}

// caller is who asks: by the name of a token, or anybody's equal.
type caller struct {
	name string
	any  bool
}

// mine fails when the lease is of another token.
func (c caller) mine(l heldLease) error {
	if c.any || l.holder == "" || l.holder == c.name {
		return nil
	}
	return fmt.Errorf("%w: lease %s was begun with another token", access.ErrForbidden, l.ID)
}

// caller returns who makes a request about leases.
func (h *Handler) caller(r *http.Request) caller {
	c := caller{any: h.admin(r)}
	if h.cfg.TokenName != nil {
		c.name = h.cfg.TokenName(r)
	}
	return c
}

func newLeases(now func() time.Time) *leases {
	return &leases{now: now, m: make(map[string]heldLease)}
}

// renew creates or extends a lease. With another token than it was begun with, a worker
// may have got a new one, it is extended and nothing else of it changed.
func (l *leases) renew(id string, req LeaseRequest, by caller) (Lease, error) {
	ttl := time.Duration(req.TTLSeconds) * time.Second
	if req.TTLSeconds < 1 || req.TTLSeconds > int64(MaxLeaseTTL/time.Second) {
		return Lease{}, fmt.Errorf("%w: ttl_seconds is %d, want 1 to %d", ErrBadRequest, req.TTLSeconds, int64(MaxLeaseTTL/time.Second))
	}
	if len(req.Image) > maxLeaseImage {
		return Lease{}, fmt.Errorf("%w: image of %d bytes, at most %d are allowed", ErrBadRequest, len(req.Image), maxLeaseImage)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep()
	was, ok := l.m[id]
	if !ok && len(l.m) >= MaxLeases {
		return Lease{}, fmt.Errorf("%w: %d are live, wait until one ends", ErrLeasesFull, len(l.m))
	}
	lease := heldLease{Lease{ID: id, Image: req.Image, Expires: l.now().Add(ttl).UTC()}, by.name, req.Bootstrap}
	if ok && was.holder != "" {
		if err := by.mine(was); err != nil &&
			(was.Image != lease.Image || was.bootstrap != lease.bootstrap || lease.Expires.Before(was.Expires)) {
			return Lease{}, err
		}
		lease.holder = was.holder
	}
	l.m[id] = lease
	return lease.Lease, nil
}

func (l *leases) get(id string) (Lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep()
	lease, ok := l.m[id]
	if !ok {
		return Lease{}, fmt.Errorf("%w: %s", ErrLeaseUnknown, id)
	}
	return lease.Lease, nil
}

// end removes a lease; one that is not there has ended already.
func (l *leases) end(id string, by caller) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := by.mine(l.m[id]); err != nil {
		return err
	}
	delete(l.m, id)
	return nil
}

// live returns the leases that have not expired, sorted by id.
func (l *leases) live() []Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep()
	out := make([]Lease, 0, len(l.m))
	for _, lease := range l.m {
		out = append(out, lease.Lease)
	}
	slices.SortFunc(out, func(a, b Lease) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// sweep forgets expired leases. mu is held.
func (l *leases) sweep() {
	now := l.now()
	for id, lease := range l.m {
		if !now.Before(lease.Expires) {
			delete(l.m, id)
		}
	}
}
