// Package bucket says what object storage must do: hold immutable objects, and
// keep one append-only journal. A local folder, S3 and memory implement it; all
// else in quarry sees only these two interfaces.
package bucket

import (
	"context"
	"errors"
	"io"
	"iter"
	"os"
)

var (
	// ErrNotFound says that no object has that key.
	ErrNotFound = errors.New("object not found")
	// ErrDamaged says that what has the place of an object or a journal entry is
	// none: a link, a device, an empty entry, a gap.
	ErrDamaged = errors.New("damaged")
	// ErrUnavailable says that the bucket gives no answer, or refuses to work: nothing
	// is known of what was asked for, and a write may have happened.
	ErrUnavailable = errors.New("bucket is not available")
	// ErrTaken says that another writer already appended that journal entry.
	ErrTaken = errors.New("journal entry is taken")
)

const (
	// MaxKey bounds the length of a key in bytes, S3's own limit.
	MaxKey = 1024
	// MaxEntry bounds one journal entry in bytes.
	MaxEntry = 1 << 20
)

// Object is what Stat and List tell of a stored object.
type Object struct {
	Key  string
	Size int64
}

// Bucket holds immutable objects. Keys are slash-separated paths of the
// characters [A-Za-z0-9._+@:=-], no empty, "." or ".." element. All methods are
// safe for concurrent use.
type Bucket interface {
	// Put stores size bytes of body under key: all or nothing, durable on nil.
	// Putting a key that exists replaces it atomically (content-addressed keys
	// get the same bytes again). body is read possibly more than once, and not
	// after Put returns.
	Put(ctx context.Context, key string, body io.ReaderAt, size int64) error
	// ReadAt fills p from offset off or fails: ErrNotFound, or
	// io.ErrUnexpectedEOF when the object ends before off+len(p).
	ReadAt(ctx context.Context, key string, p []byte, off int64) error
	// Stat returns the object's size, or ErrNotFound.
	Stat(ctx context.Context, key string) (Object, error)
	// List yields the objects whose keys start with prefix, in bytewise order.
	// An error ends the sequence: ErrDamaged when something else than objects is
	// stored below prefix.
	List(ctx context.Context, prefix string) iter.Seq2[Object, error]
	// Delete removes an object, durably. A missing key is not an error.
	Delete(ctx context.Context, key string) error
}

// Files is a bucket whose objects are files of this machine, which the kernel can
// send without anybody reading them.
type Files interface {
	// File opens an object for reading, for the caller to close. What is put under
	// the key later, or deleted, changes nothing of the file. Errors: those of Stat.
	File(ctx context.Context, key string) (*os.File, error)
}

// Entry is one journal entry. Numbers start at 1 and have no gaps.
type Entry struct {
	N    uint64
	Data []byte
}

// Journal is the bucket's only mutable state, an append-only log.
type Journal interface {
	// Append stores entry n of 1 to MaxEntry bytes, durable on nil. It fails with
	// ErrTaken when another call wrote n, whatever the bytes. Exactly one of any
	// number of concurrent appends of one n succeeds. Appending n before n-1
	// exists is an error.
	Append(ctx context.Context, n uint64, entry []byte) error
	// Read yields the entries from number from on, in order, up to the last one
	// that exists. A gap or an unreadable entry ends the sequence with an error,
	// ErrDamaged when asking again does not help.
	Read(ctx context.Context, from uint64) iter.Seq2[Entry, error]
}
