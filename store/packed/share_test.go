package packed_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/packed"
)

// A burst of workers that ask for one cold image has each range of a pack read once,
// while any of them has it.
func TestABurstReadsARangeOnce(t *testing.T) {
	const workers = 256
	d := newDisk()
	ps := contents(0, 100)
	d.open(t).put(t, ps)
	var ds []chunk.Digest
	for _, p := range ps {
		ds = append(ds, chunk.Sum(p))
	}
	var reads atomic.Int64
	hold := make(chan struct{})
	o := d.readBy(t, func() error {
		reads.Add(1)
		<-hold
		return nil
	})
	var g errgroup.Group
	var asked, has sync.WaitGroup
	asked.Add(workers)
	has.Add(workers)
	for range workers {
		g.Go(func() error {
			n := 0
			asked.Done()
			err := o.StoredBatch(t.Context(), ds, func(_ chunk.Digest, _ packed.Stored, err error) error {
				if n++; n == 1 { // nobody lets go of the range before all have it
					has.Done()
					has.Wait()
				}
				return err
			})
			if err == nil && n != len(ds) {
				err = fmt.Errorf("%d of %d answers", n, len(ds))
			}
			return err
		})
	}
	asked.Wait()
	close(hold)
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := reads.Load(); n != 1 { // 100 small chunks of one pack are one range
		t.Errorf("%d reads of the bucket, want 1", n)
	}
}

// readBy opens the store over a bucket that calls before for each read that follows.
func (d disk) readBy(t *testing.T, before func() error) *opened {
	t.Helper()
	var armed atomic.Bool
	faulty := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket, Before: func(op buckettest.Op) error {
		if op.Method != "ReadAt" || !armed.Load() {
			return nil
		}
		return before()
	}}
	o, err := d.tryOpen(t, faulty, faulty, d.crash().fs)
	if err != nil {
		t.Fatal(err)
	}
	armed.Store(true)
	return o
}

// Who waits for a range that another one reads does not fail because that one left.
func TestAReaderThatLeavesTakesNobodyAlong(t *testing.T) {
	d := newDisk()
	ps := contents(0, 20)
	d.open(t).put(t, ps)
	var ds []chunk.Digest
	for _, p := range ps {
		ds = append(ds, chunk.Sum(p))
	}
	ctx, leave := context.WithCancel(t.Context())
	begun, left := make(chan struct{}), make(chan struct{})
	var once sync.Once
	o := d.readBy(t, func() (err error) {
		once.Do(func() {
			close(begun)
			<-left
			err = ctx.Err()
		})
		return err
	})
	var g errgroup.Group
	g.Go(func() error {
		err := o.StoredBatch(ctx, ds, func(chunk.Digest, packed.Stored, error) error { return nil })
		if !errors.Is(err, context.Canceled) {
			return fmt.Errorf("the one that left: got error %v, want %w", err, context.Canceled)
		}
		return nil
	})
	<-begun
	g.Go(func() error {
		return o.StoredBatch(t.Context(), ds, func(_ chunk.Digest, _ packed.Stored, err error) error { return err })
	})
	leave()
	close(left)
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}
