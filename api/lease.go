package api

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

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
	m   map[string]Lease
}

func newLeases(now func() time.Time) *leases {
	return &leases{now: now, m: make(map[string]Lease)}
}

// renew creates or extends a lease.
func (l *leases) renew(id string, req LeaseRequest) (Lease, error) {
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
	if _, ok := l.m[id]; !ok && len(l.m) >= MaxLeases {
		return Lease{}, fmt.Errorf("%w: %d are live, wait until one ends", ErrLeasesFull, len(l.m))
	}
	lease := Lease{ID: id, Image: req.Image, Expires: l.now().Add(ttl).UTC()}
	l.m[id] = lease
	return lease, nil
}

func (l *leases) get(id string) (Lease, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep()
	lease, ok := l.m[id]
	if !ok {
		return Lease{}, fmt.Errorf("%w: %s", ErrLeaseUnknown, id)
	}
	return lease, nil
}

// end removes a lease; one that is not there has ended already.
func (l *leases) end(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.m, id)
}

// live returns the leases that have not expired, sorted by id.
func (l *leases) live() []Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sweep()
	out := make([]Lease, 0, len(l.m))
	for _, lease := range l.m {
		out = append(out, lease)
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
