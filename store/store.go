// Package store says what a chunk store is. The real store, the worker's
// cache, the HTTP client and the in-memory fake all implement these
// interfaces, so a reader does not know which one it has.
package store

import (
	"context"
	"errors"
	"fmt"

	"quarry/store/chunk"
)

// ErrNotFound says that the store holds no chunk of that digest.
var ErrNotFound = errors.New("chunk not found")

// ErrReadOnly says that a change was asked of a node that only reads its store:
// another one is the store's writer.
var ErrReadOnly = errors.New("this node only reads the store")

// CorruptError says that a stored copy of a chunk exists but its bytes are not
// the chunk's. Nothing of the bad copy is returned with it.
type CorruptError struct {
	Want chunk.Digest // the chunk asked for
	Got  chunk.Digest // digest of what was read; zero when it could not be decoded
	Key  string       // object that holds the bad copy, "" when not known
	Off  int64        // offset of the copy in the object
	Err  error        // why it could not be decoded, nil for a plain mismatch
}

func (e *CorruptError) Error() string {
	where := ""
	if e.Key != "" {
		where = fmt.Sprintf(" in %s at %d", e.Key, e.Off)
	}
	if e.Err != nil {
		return fmt.Sprintf("chunk %s is damaged%s: %v", e.Want, where, e.Err)
	}
	return fmt.Sprintf("chunk %s is damaged%s: content has digest %s", e.Want, where, e.Got)
}

// Unwrap returns the underlying decoding error.
func (e *CorruptError) Unwrap() error { return e.Err }

// Getter reads single chunks. What it returns has been verified against d.
type Getter interface {
	// Get appends the chunk to dst[:0], growing it when needed, and returns the
	// result; the caller owns it. Errors: ErrNotFound, *CorruptError, ctx's, and
	// transport errors. Safe for concurrent use.
	Get(ctx context.Context, d chunk.Digest, dst []byte) ([]byte, error)
}

// BatchGetter reads many chunks in one request.
type BatchGetter interface {
	// GetBatch calls fn once for every digest of ds (a digest given twice is
	// answered once), in any order and never concurrently, with the verified
	// plain bytes or the error of that chunk alone. The slice is valid only
	// during the call of fn. It stops at fn's first error and returns it. An
	// error of GetBatch itself means that the chunks fn was not called for have
	// no answer. Safe for concurrent use.
	GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error
}

// Putter takes chunks inside one Store.Write.
type Putter interface {
	// Put takes one chunk of 1 to chunk.MaxSize bytes and returns its digest. It
	// copies what it keeps of p. The chunk is durable only when the enclosing
	// Write has returned nil. Safe for concurrent use.
	Put(ctx context.Context, p []byte) (chunk.Digest, error)
}

// Store is a chunk store that can also be written.
type Store interface {
	Getter
	// Write runs fn with a Putter; when it returns nil every chunk put is
	// durable and can be read. When fn or the store fails, chunks put may or may
	// not be stored; none of them is ever readable with wrong bytes.
	Write(ctx context.Context, fn func(context.Context, Putter) error) error
}
