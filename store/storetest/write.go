package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/chunk"
)

func testPut(t *testing.T, h Harness) {
	want := Content(4, 10_000)
	buf := make([]byte, len(want))
	err := h.Store.Write(t.Context(), func(ctx context.Context, w store.Putter) error {
		copy(buf, want)
		d, err := w.Put(ctx, buf)
		if err == nil && d != chunk.Sum(want) {
			err = fmt.Errorf("put returned %s", d)
		}
		clear(buf) // the caller's again
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	wantChunk(t, h.Store, want)
	wantChunk(t, h.Getter, want)
}

func testPutTwice(t *testing.T, h Harness) {
	p := Content(4, 10_000)
	put(t, h, p, p)
	put(t, h, p)
	wantChunk(t, h.Getter, p)
}

func testPutBounds(t *testing.T, h Harness) {
	for _, n := range []int{0, chunk.MaxSize + 1} {
		err := h.Store.Write(t.Context(), func(ctx context.Context, w store.Putter) error {
			_, err := w.Put(ctx, make([]byte, n))
			return err
		})
		if err == nil {
			t.Errorf("a chunk of %d bytes was taken", n)
		}
	}
}

func testEmptyWrite(t *testing.T, h Harness) { put(t, h) }

func testWriteError(t *testing.T, h Harness) {
	mine := errors.New("mine")
	p := Content(6, 5000)
	err := h.Store.Write(t.Context(), func(ctx context.Context, w store.Putter) error {
		if _, err := w.Put(ctx, p); err != nil {
			return err
		}
		return mine
	})
	if !errors.Is(err, mine) {
		t.Fatalf("got error %v, want fn's", err)
	}
	// The chunk may be there or not, but is never wrong, and can be put again.
	got, err := h.Getter.Get(t.Context(), chunk.Sum(p), nil)
	if err == nil && !bytes.Equal(got, p) || err != nil && !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("got %d bytes, error %v", len(got), err)
	}
	put(t, h, p)
	wantChunk(t, h.Getter, p)
}

func testWriteCancelled(t *testing.T, h Harness) {
	ctx, cancel := context.WithCancel(t.Context())
	err := h.Store.Write(ctx, func(ctx context.Context, w store.Putter) error {
		cancel()
		if _, err := w.Put(ctx, []byte("late")); !errors.Is(err, context.Canceled) {
			t.Errorf("put: got %v, want context.Canceled", err)
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("write: got %v, want context.Canceled", err)
	}
}

func testPutLate(t *testing.T, h Harness) {
	var kept store.Putter
	err := h.Store.Write(t.Context(), func(_ context.Context, w store.Putter) error {
		kept = w
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	p := []byte("too late")
	_, _ = kept.Put(t.Context(), p) // may fail, must not crash or hang
	if _, err := h.Getter.Get(t.Context(), chunk.Sum(p), nil); !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("got error %v, want store.ErrNotFound", err)
	}
}

func testConcurrentPuts(t *testing.T, h Harness) {
	const putters, each = 8, 50
	content := func(i, k int) []byte { return Content(uint64(i/2*each+k), 1+700*k) } // every chunk twice
	err := h.Store.Write(t.Context(), func(ctx context.Context, w store.Putter) error {
		g, ctx := errgroup.WithContext(ctx)
		for i := range putters {
			g.Go(func() error {
				for k := range each {
					if _, err := w.Put(ctx, content(i, k)); err != nil {
						return err
					}
				}
				return nil
			})
		}
		return g.Wait()
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range putters {
		for k := range each {
			wantChunk(t, h.Getter, content(i, k))
		}
	}
}

func testConcurrentWrites(t *testing.T, h Harness) {
	const writers, each = 4, 60
	content := func(k int) []byte { return Content(uint64(k), 1+997*k) }
	g, ctx := errgroup.WithContext(t.Context())
	for i := range writers {
		g.Go(func() error {
			var ps [][]byte
			for k := range each {
				ps = append(ps, content((k+i*each/3)%(each*2))) // overlaps the next writer's
			}
			if err := writeAll(ctx, h.Store, ps); err != nil {
				return err
			}
			for _, p := range ps { // readable as soon as this Write returned
				got, err := h.Getter.Get(ctx, chunk.Sum(p), nil)
				if err != nil || !bytes.Equal(got, p) {
					return fmt.Errorf("get: %d bytes, want %d: %w", len(got), len(p), err)
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}
