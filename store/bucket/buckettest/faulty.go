package buckettest

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync/atomic"
	"testing"

	"quarry/store/bucket"
)

// ErrInjected is the error of FailNth.
var ErrInjected = errors.New("injected fault")

// Op is one call on a Faulty.
type Op struct {
	Method string // "Put", "ReadAt", "Stat", "List", "Delete", "Append" or "Read"
	Key    string // object key; the prefix of a List
	N      uint64 // journal entry number
}

// Faulty decorates a bucket and a journal with faults; without Before and After
// it changes nothing.
type Faulty struct {
	Bucket  bucket.Bucket
	Journal bucket.Journal
	// Before is asked before each call; with an error the call is not made.
	Before func(Op) error
	// After is asked after each call that succeeded; with an error the call has
	// had its effect but its caller is told that it failed. For List and Read
	// the error comes after the last element.
	After func(Op) error
}

var (
	_ bucket.Bucket  = (*Faulty)(nil)
	_ bucket.Journal = (*Faulty)(nil)
)

// FailNth returns a Before or After that fails the n-th call of the given
// methods, counting from 1, and no other; without methods it counts all.
func FailNth(n int64, methods ...string) func(Op) error {
	var count atomic.Int64
	return func(op Op) error {
		if !matches(op, methods) || count.Add(1) != n {
			return nil
		}
		return ErrInjected
	}
}

// FailAll returns a Before or After that fails every call of the methods.
func FailAll(methods ...string) func(Op) error {
	return func(op Op) error {
		if matches(op, methods) {
			return ErrInjected
		}
		return nil
	}
}

func matches(op Op, methods []string) bool {
	for _, m := range methods {
		if m == op.Method {
			return true
		}
	}
	return len(methods) == 0
}

func ask(fault func(Op) error, op Op) error {
	if fault == nil {
		return nil
	}
	return fault(op)
}

func (f *Faulty) call(op Op, fn func() error) error {
	if err := ask(f.Before, op); err != nil {
		return err
	}
	if err := fn(); err != nil {
		return err
	}
	return ask(f.After, op)
}

// Put implements bucket.Bucket.
func (f *Faulty) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	return f.call(Op{Method: "Put", Key: key}, func() error { return f.Bucket.Put(ctx, key, body, size) })
}

// ReadAt implements bucket.Bucket.
func (f *Faulty) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	return f.call(Op{Method: "ReadAt", Key: key}, func() error { return f.Bucket.ReadAt(ctx, key, p, off) })
}

// Stat implements bucket.Bucket.
func (f *Faulty) Stat(ctx context.Context, key string) (o bucket.Object, err error) {
	err = f.call(Op{Method: "Stat", Key: key}, func() error {
		o, err = f.Bucket.Stat(ctx, key)
		return err
	})
	if err != nil {
		return bucket.Object{}, err
	}
	return o, nil
}

// Delete implements bucket.Bucket.
func (f *Faulty) Delete(ctx context.Context, key string) error {
	return f.call(Op{Method: "Delete", Key: key}, func() error { return f.Bucket.Delete(ctx, key) })
}

// List implements bucket.Bucket.
func (f *Faulty) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	return faultySeq(f, Op{Method: "List", Key: prefix}, f.Bucket.List(ctx, prefix))
}

// Append implements bucket.Journal.
func (f *Faulty) Append(ctx context.Context, n uint64, entry []byte) error {
	return f.call(Op{Method: "Append", N: n}, func() error { return f.Journal.Append(ctx, n, entry) })
}

// Read implements bucket.Journal.
func (f *Faulty) Read(ctx context.Context, from uint64) iter.Seq2[bucket.Entry, error] {
	return faultySeq(f, Op{Method: "Read", N: from}, f.Journal.Read(ctx, from))
}

func faultySeq[T any](f *Faulty, op Op, seq iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		if err := ask(f.Before, op); err != nil {
			yield(zero, err)
			return
		}
		for v, err := range seq {
			if !yield(v, err) || err != nil {
				return
			}
		}
		if err := ask(f.After, op); err != nil {
			yield(zero, err)
		}
	}
}

// Corrupt flips the bits of the byte at off of an object, as a failing disk or
// a lying server would; a negative off counts from the end.
func Corrupt(t testing.TB, b bucket.Bucket, key string, off int64) {
	t.Helper()
	p := Bytes(t, b, key)
	if off < 0 {
		off += int64(len(p))
	}
	p[off] ^= 0xff
	Put(t, b, key, p)
}
