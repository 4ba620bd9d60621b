package bucket

import (
	"context"
	"sync/atomic"
)

// Meter counts the bytes that were asked of a bucket for one purpose, such as
// one request of a client. Safe for concurrent use.
type Meter struct{ read atomic.Int64 }

// Read returns the bytes counted so far.
func (m *Meter) Read() int64 { return m.read.Load() }

type meterKey struct{}

// WithMeter returns a context whose reads of a Metered bucket m counts.
func WithMeter(ctx context.Context, m *Meter) context.Context {
	return context.WithValue(ctx, meterKey{}, m)
}

// Count counts bytes that are read of a bucket, or sent from it, around a Metered one.
func Count(ctx context.Context, n int64) {
	if m, ok := ctx.Value(meterKey{}).(*Meter); ok {
		m.read.Add(n)
	}
}

// Metered returns b with reads that are counted by the meter of their context.
// What is read is counted, whether it comes whole or not: the bucket was asked.
func Metered(b Bucket) Bucket { return metered{b} }

type metered struct{ Bucket }

// ReadAt implements Bucket.
func (b metered) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	Count(ctx, int64(len(p)))
	return b.Bucket.ReadAt(ctx, key, p, off)
}
