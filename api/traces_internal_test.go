package api

import (
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/trace"
)

func recordOf(t *testing.T, n uint32) (trace.Record, []byte) {
	t.Helper()
	r := trace.Record{
		Image:    chunk.Sum(binary.LittleEndian.AppendUint32(nil, n)),
		Platform: image.HostPlatform(), Numbers: []uint32{1, 2, 3},
	}
	b, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return r, b
}

func TestImagesThatRanLongestAgoLoseTheirRecords(t *testing.T) {
	b := mem.New()
	now := time.Unix(1e9, 0)
	tr := newTraces(b, slog.New(slog.DiscardHandler), func() time.Time { now = now.Add(time.Millisecond); return now })
	add := func(n uint32) {
		r, encoded := recordOf(t, n)
		if err := tr.add(t.Context(), r, encoded); err != nil {
			t.Fatal(err)
		}
	}
	for n := range uint32(maxTraced) {
		add(n)
	}
	add(0) // it ran again
	add(maxTraced)
	if keys := buckettest.Keys(t, b, trace.Prefix); len(keys) != maxTraced+1 {
		t.Errorf("%d records, want one of each of %d images and a second of one", len(keys), maxTraced)
	}
	for n, want := range map[uint32]bool{0: true, 1: false, 2: true, maxTraced: true} {
		r, _ := recordOf(t, n)
		if got := tr.images[r.Image] != nil; got != want {
			t.Errorf("image %d is known: %t, want %t", n, got, want)
		}
	}
}

func TestRecordsOfOneMomentAreAllKept(t *testing.T) {
	b := mem.New()
	now := time.Unix(1e9, 0)
	tr := newTraces(b, slog.New(slog.DiscardHandler), func() time.Time { return now })
	var g sync.WaitGroup
	for n := range uint32(40) {
		r, _ := recordOf(t, n%8)
		r.Numbers = []uint32{1, n + 2}
		encoded, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		g.Go(func() {
			if err := tr.add(t.Context(), r, encoded); err != nil {
				t.Error(err)
			}
		})
	}
	g.Wait()
	if keys := buckettest.Keys(t, b, trace.Prefix); len(keys) != 40 {
		t.Errorf("%d records of 40", len(keys))
	}
	again := newTraces(b, slog.New(slog.DiscardHandler), func() time.Time { return now })
	for n := range uint32(8) {
		r, _ := recordOf(t, n)
		for _, tr := range []*traces{tr, again} {
			if list, _, err := tr.list(t.Context(), r.Image); err != nil || len(list) != 1 || list[0] != 1 {
				t.Errorf("image %d: list %v, %v", n, list, err)
			}
		}
	}
}

// hanging is a bucket whose listings wait until they are released.
type hanging struct {
	bucket.Bucket
	begun, release chan struct{}
}

func (h hanging) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	return func(yield func(bucket.Object, error) bool) {
		h.begun <- struct{}{}
		select {
		case <-h.release:
		case <-ctx.Done():
			yield(bucket.Object{}, ctx.Err())
			return
		}
		h.Bucket.List(ctx, prefix)(yield)
	}
}

func TestAListingThatHangsHoldsUpNobody(t *testing.T) {
	h := hanging{mem.New(), make(chan struct{}, 10), make(chan struct{})}
	tr := newTraces(h, slog.New(slog.DiscardHandler), time.Now)
	r, encoded := recordOf(t, 1)
	var g sync.WaitGroup
	defer g.Wait()
	for range 2 {
		g.Go(func() {
			if err := tr.add(t.Context(), r, encoded); err != nil {
				t.Error(err)
			}
		})
	}
	defer close(h.release)
	<-h.begun
	left, cancel := context.WithCancel(t.Context())
	cancel()
	others := make(chan error, 1)
	g.Go(func() {
		tr.added()
		_, _, err := tr.list(left, r.Image)
		others <- errors.Join(tr.admit(), err)
	})
	select {
	case err := <-others:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("a caller that has left: %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("others wait for the bucket")
	}
	if n := len(h.begun); n != 0 {
		t.Errorf("%d more listings for one", n)
	}
}

func TestAListingThatNeverEndsIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hanging{mem.New(), make(chan struct{}, 10), make(chan struct{})}
		tr := newTraces(h, slog.New(slog.DiscardHandler), time.Now)
		r, encoded := recordOf(t, 1)
		if err := tr.add(t.Context(), r, encoded); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want a deadline", err)
		}
		close(h.release)
		if err := tr.add(t.Context(), r, encoded); err != nil {
			t.Error(err)
		}
	})
}
