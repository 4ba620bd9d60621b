package registry

import (
	"context"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// keyLocks are locks by name; one that nobody holds or waits for takes no memory,
// so there are as many as requests.
type keyLocks struct {
	mu    sync.Mutex // guards byKey and the counts in it
	byKey map[string]*keyLock
}

type keyLock struct {
	held  chan struct{} // holds one element while the lock is held
	users int
}

// lock waits for the lock of key, at most as long as ctx lives.
func (l *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	l.mu.Lock()
	if l.byKey == nil {
		l.byKey = map[string]*keyLock{}
	}
	k := l.byKey[key]
	if k == nil {
		k = &keyLock{held: make(chan struct{}, 1)}
		l.byKey[key] = k
	}
	k.users++
	l.mu.Unlock()
	done := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if k.users--; k.users == 0 {
			delete(l.byKey, key)
		}
	}
	select {
	case k.held <- struct{}{}:
		return func() { <-k.held; done() }, nil
	case <-ctx.Done():
		done()
		return nil, ctx.Err()
	}
}

// pushes remembers when each push of a manifest that is under way began.
type pushes struct {
	mu    sync.Mutex // guards begun
	begun map[*time.Time]bool
}

func (p *pushes) begin(now time.Time) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.begun == nil {
		p.begun = map[*time.Time]bool{}
	}
	p.begun[&now] = true
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.begun, &now)
	}
}

// since is when the first of them began, but t when all began later.
func (p *pushes) since(t time.Time) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	for begun := range p.begun {
		if begun.Before(t) {
			t = *begun
		}
	}
	return t
}

// maxRecent bounds the digests that are remembered: at some 200 bytes each less
// than 16 MiB.
const maxRecent = 64 << 10

// maxDamaged bounds a damaged: more are found anew when they are read again.
const maxDamaged = 4096

// damaged remembers what content was found to be other bytes than its digest's.
// The zero value is empty.
type damaged struct {
	mu   sync.Mutex // guards seen
	seen map[digest.Digest]bool
}

func (d *damaged) add(c digest.Digest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seen == nil {
		d.seen = map[digest.Digest]bool{}
	}
	if len(d.seen) < maxDamaged {
		d.seen[c] = true
	}
}

func (d *damaged) has(c digest.Digest) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seen[c]
}

func (d *damaged) forget(c digest.Digest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.seen, c)
}

// recent remembers which content clients were told is there: one that asks with
// HEAD uploads nothing, and names the blob in a manifest later. Nothing of it may
// be collected for a time of grace.
type recent struct {
	now func() time.Time

	mu    sync.Mutex // guards what is below
	seen  map[digest.Digest]time.Time
	blind time.Time // until then something was seen that is not in the map
}

func newRecent(now func() time.Time) *recent {
	return &recent{now: now, seen: map[digest.Digest]time.Time{}, blind: now()}
}

func (r *recent) touch(d digest.Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if _, ok := r.seen[d]; !ok && len(r.seen) >= maxRecent {
		clear(r.seen)
		r.blind = now
	}
	r.seen[d] = now
}

// since reports whether d was, or may have been, touched less than grace ago.
func (r *recent) since(d digest.Digest, grace time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	limit := r.now().Add(-grace)
	return r.blind.After(limit) || r.seen[d].After(limit)
}
