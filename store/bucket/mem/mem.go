// Package mem keeps a bucket and its journal in memory. It is the fake that
// tests of everything above run on, and its Clone is what a crash leaves.
package mem

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	"quarry/store/bucket"
)

// Bucket is a bucket.Bucket and a bucket.Journal in memory.
type Bucket struct {
	mu      sync.RWMutex      // guards what follows; the byte slices never change
	objects map[string][]byte // by key
	entries [][]byte          // entry n is at n-1
}

var (
	_ bucket.Bucket  = (*Bucket)(nil)
	_ bucket.Journal = (*Bucket)(nil)
)

// New returns an empty bucket.
func New() *Bucket { return &Bucket{objects: map[string][]byte{}} }

// Clone returns a copy of the bucket and journal as they are now, all or none
// of any call in progress.
func (b *Bucket) Clone() *Bucket {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return &Bucket{objects: maps.Clone(b.objects), entries: slices.Clone(b.entries)}
}

// Put implements bucket.Bucket.
func (b *Bucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	if err := bucket.ValidKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if size < 0 {
		return fmt.Errorf("put %s: size %d is negative", key, size)
	}
	p := make([]byte, size)
	if _, err := io.ReadFull(io.NewSectionReader(body, 0, size), p); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("put %s: read body of %d bytes: %w", key, size, err)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.objects[key] = p
	return nil
}

func (b *Bucket) get(ctx context.Context, key string) ([]byte, error) {
	if err := bucket.ValidKey(key); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.RLock()
	defer b.mu.RUnlock()
	p, ok := b.objects[key]
	if !ok {
		return nil, fmt.Errorf("%s: %w", key, bucket.ErrNotFound)
	}
	return p, nil
}

// ReadAt implements bucket.Bucket.
func (b *Bucket) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	object, err := b.get(ctx, key)
	if err != nil {
		return err
	}
	if n, err := bytes.NewReader(object).ReadAt(p, off); n < len(p) {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read %s at %d, %d bytes: %w", key, off, len(p), err)
	}
	return nil
}

// Stat implements bucket.Bucket.
func (b *Bucket) Stat(ctx context.Context, key string) (bucket.Object, error) {
	object, err := b.get(ctx, key)
	if err != nil {
		return bucket.Object{}, err
	}
	return bucket.Object{Key: key, Size: int64(len(object))}, nil
}

// List implements bucket.Bucket. It yields the objects there are when it starts.
func (b *Bucket) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	return func(yield func(bucket.Object, error) bool) {
		if err := ctx.Err(); err != nil {
			yield(bucket.Object{}, fmt.Errorf("list %q: %w", prefix, err))
			return
		}
		for _, o := range b.listing(prefix) {
			if !yield(o, nil) {
				return
			}
		}
	}
}

func (b *Bucket) listing(prefix string) []bucket.Object {
	b.mu.RLock()
	defer b.mu.RUnlock()
	var objects []bucket.Object
	for key, p := range b.objects {
		if strings.HasPrefix(key, prefix) {
			objects = append(objects, bucket.Object{Key: key, Size: int64(len(p))})
		}
	}
	slices.SortFunc(objects, func(x, y bucket.Object) int { return strings.Compare(x.Key, y.Key) })
	return objects
}

// Delete implements bucket.Bucket.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	if err := bucket.ValidKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.objects, key)
	return nil
}

// Append implements bucket.Journal.
func (b *Bucket) Append(ctx context.Context, n uint64, entry []byte) error {
	if err := bucket.ValidEntry(n, entry); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch last := uint64(len(b.entries)); {
	case n <= last:
		return fmt.Errorf("append journal entry %d: %w", n, bucket.ErrTaken)
	case n > last+1:
		return fmt.Errorf("append journal entry %d: entry %d does not exist", n, n-1)
	}
	b.entries = append(b.entries, bytes.Clone(entry))
	return nil
}

// Read implements bucket.Journal.
func (b *Bucket) Read(ctx context.Context, from uint64) iter.Seq2[bucket.Entry, error] {
	return func(yield func(bucket.Entry, error) bool) {
		for n := max(from, 1); ; n++ {
			if err := ctx.Err(); err != nil {
				yield(bucket.Entry{}, err)
				return
			}
			entry, ok := b.entry(n)
			if !ok || !yield(bucket.Entry{N: n, Data: bytes.Clone(entry)}, nil) {
				return
			}
		}
	}
}

func (b *Bucket) entry(n uint64) ([]byte, bool) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if n > uint64(len(b.entries)) {
		return nil, false
	}
	return b.entries[n-1], true
}
