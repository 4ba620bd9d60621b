package gc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"sync"

	"quarry/store/bucket"
)

// ErrEnded says that a conversion goes on whose session has ended: what it counted on
// may be deleted by now, so it must not publish.
var ErrEnded = errors.New("the session has ended; begin again")

// Gate is where conversions and a collection meet. A conversion counts on what it
// found in the store, though nothing names it yet: so a collection waits for all
// sessions that were there when it condemned, and those that begin after that find
// condemned packs empty, and take condemned objects off the list by touching them.
type Gate struct {
	// Await waits until ready is closed; nil = by a select. Simulations schedule it.
	Await func(ctx context.Context, ready <-chan struct{}) error

	mu       sync.Mutex // guards what follows; never held while waiting
	sessions map[*Session]bool
	keys     map[string]*condemned
}

// condemned is an object that will be deleted.
type condemned struct {
	deleting chan struct{} // closed when it was deleted; nil while it can be spared
}

// NewGate returns a gate without sessions.
func NewGate() *Gate {
	return &Gate{sessions: map[*Session]bool{}, keys: map[string]*condemned{}}
}

// Session is one conversion, or other work that counts on what is stored.
type Session struct {
	gate  *Gate
	ended chan struct{}
}

// Begin begins a session.
func (g *Gate) Begin() *Session {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &Session{gate: g, ended: make(chan struct{})}
	g.sessions[s] = true
	return s
}

// End ends the session: all that it stored and should stay has a root by now. A second
// End does nothing.
func (s *Session) End() {
	s.gate.mu.Lock()
	defer s.gate.mu.Unlock()
	if s.gate.sessions[s] {
		delete(s.gate.sessions, s)
		close(s.ended)
	}
}

func (s *Session) live() error {
	select {
	case <-s.ended:
		return ErrEnded
	default:
		return nil
	}
}

func (g *Gate) await(ctx context.Context, ready <-chan struct{}) error {
	if g.Await != nil {
		return g.Await(ctx, ready)
	}
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// current returns the sessions there are now.
func (g *Gate) current() []*Session {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]*Session, 0, len(g.sessions))
	for s := range g.sessions {
		out = append(out, s)
	}
	return out
}

// wait returns when all of the sessions have ended.
func (g *Gate) wait(ctx context.Context, sessions []*Session) error {
	for i, s := range sessions {
		if err := g.await(ctx, s.ended); err != nil {
			return fmt.Errorf("wait for %d conversions that were there before: %w", len(sessions)-i, err)
		}
	}
	return nil
}

// condemn puts objects on the list of what will be deleted.
func (g *Gate) condemn(keys []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, key := range keys {
		g.keys[key] = &condemned{}
	}
}

// pardon empties the list, when a collection has ended.
func (g *Gate) pardon() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.keys)
}

// take says of objects that belong together that they are being deleted, unless one of
// them was touched: then it returns false and all are off the list.
func (g *Gate) take(keys ...string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if slices.ContainsFunc(keys, func(key string) bool { return g.keys[key] == nil }) {
		for _, key := range keys {
			delete(g.keys, key)
		}
		return false
	}
	deleting := make(chan struct{})
	for _, key := range keys {
		g.keys[key].deleting = deleting
	}
	return true
}

// done ends a take.
func (g *Gate) done(keys ...string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, key := range keys {
		if i == 0 {
			close(g.keys[key].deleting)
		}
		delete(g.keys, key)
	}
}

// touch takes an object off the list, or waits until it is deleted.
func (g *Gate) touch(ctx context.Context, key string) error {
	g.mu.Lock()
	c := g.keys[key]
	if c != nil && c.deleting == nil {
		delete(g.keys, key)
		c = nil
	}
	g.mu.Unlock()
	if c == nil {
		return nil
	}
	return g.await(ctx, c.deleting)
}

// Bucket returns b for the work of this session: what it touches stays, and it changes
// nothing once the session has ended or confirm fails, which asks whether this process
// may still write.
func (s *Session) Bucket(b bucket.Bucket, confirm func(context.Context) error) bucket.Bucket {
	return &sessionBucket{s, b, confirm}
}

type sessionBucket struct {
	s       *Session
	b       bucket.Bucket
	confirm func(context.Context) error
}

var _ bucket.Bucket = (*sessionBucket)(nil)

// Put implements bucket.Bucket.
func (b *sessionBucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	if err := b.change(ctx, key); err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	return b.b.Put(ctx, key, body, size)
}

// Delete implements bucket.Bucket.
func (b *sessionBucket) Delete(ctx context.Context, key string) error {
	if err := b.change(ctx, key); err != nil {
		return fmt.Errorf("delete %s: %w", key, err)
	}
	return b.b.Delete(ctx, key)
}

func (b *sessionBucket) change(ctx context.Context, key string) error {
	if err := b.s.gate.touch(ctx, key); err != nil {
		return err
	}
	if err := b.s.live(); err != nil {
		return err
	}
	return b.confirm(ctx)
}

// ReadAt implements bucket.Bucket.
func (b *sessionBucket) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if err := b.s.gate.touch(ctx, key); err != nil {
		return err
	}
	return b.b.ReadAt(ctx, key, p, off)
}

// Stat implements bucket.Bucket.
func (b *sessionBucket) Stat(ctx context.Context, key string) (bucket.Object, error) {
	if err := b.s.gate.touch(ctx, key); err != nil {
		return bucket.Object{}, err
	}
	return b.b.Stat(ctx, key)
}

// List implements bucket.Bucket. To see a key is not to touch it.
func (b *sessionBucket) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	return b.b.List(ctx, prefix)
}
