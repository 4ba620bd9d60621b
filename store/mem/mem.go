// Package mem keeps chunks in memory. It is the fake for tests of everything
// that reads or writes chunks, and holds to the contract as the real store does:
// what it returns was verified, also when a test planted other bytes.
package mem

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"sync"

	"quarry/store"
	"quarry/store/chunk"
)

// Store is a chunk store in memory. All methods are safe for concurrent use.
type Store struct {
	mu     sync.RWMutex            // guards chunks; the byte slices never change
	chunks map[chunk.Digest][]byte // what stands for each digest
}

var (
	_ store.Store       = (*Store)(nil)
	_ store.BatchGetter = (*Store)(nil)
)

// New returns an empty store.
func New() *Store { return &Store{chunks: map[chunk.Digest][]byte{}} }

// Plant makes p stand for d, right or wrong.
func (s *Store) Plant(d chunk.Digest, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.chunks[d] = bytes.Clone(p)
}

// Delete forgets a chunk.
func (s *Store) Delete(d chunk.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.chunks, d)
}

// Len returns how many chunks there are.
func (s *Store) Len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.chunks)
}

// Has reports for each digest whether there is a chunk.
func (s *Store) Has(ctx context.Context, ds []chunk.Digest) ([]bool, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	found := make([]bool, len(ds))
	for i, d := range ds {
		_, found[i] = s.chunks[d]
	}
	return found, nil
}

// Get implements store.Getter.
func (s *Store) Get(ctx context.Context, d chunk.Digest, dst []byte) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.RLock()
	p, ok := s.chunks[d]
	s.mu.RUnlock()
	if !ok {
		return nil, fmt.Errorf("%s: %w", d, store.ErrNotFound)
	}
	if got := chunk.Sum(p); got != d {
		return nil, &store.CorruptError{Want: d, Got: got}
	}
	return append(dst[:0], p...), nil
}

// GetBatch implements store.BatchGetter.
func (s *Store) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	answered := map[chunk.Digest]bool{}
	var buf []byte
	for _, d := range ds {
		if answered[d] {
			continue
		}
		answered[d] = true
		if err := ctx.Err(); err != nil {
			return err
		}
		p, err := s.Get(ctx, d, buf)
		if err := fn(d, p, err); err != nil {
			return err
		}
		if err == nil {
			buf = p
		}
	}
	return ctx.Err()
}

// Write implements store.Store: all chunks that fn put appear when it returns
// nil, none otherwise.
func (s *Store) Write(ctx context.Context, fn func(context.Context, store.Putter) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	w := &putter{chunks: map[chunk.Digest][]byte{}}
	if err := fn(ctx, w); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(s.chunks, w.chunks)
	return nil
}

type putter struct {
	mu     sync.Mutex // guards chunks
	chunks map[chunk.Digest][]byte
}

// Put implements store.Putter.
func (w *putter) Put(ctx context.Context, p []byte) (chunk.Digest, error) {
	if len(p) == 0 || len(p) > chunk.MaxSize {
		return chunk.Digest{}, fmt.Errorf("put chunk of %d bytes: want 1 to %d", len(p), chunk.MaxSize)
	}
	if err := ctx.Err(); err != nil {
		return chunk.Digest{}, err
	}
	d := chunk.Sum(p)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.chunks[d] = bytes.Clone(p)
	return d, nil
}
