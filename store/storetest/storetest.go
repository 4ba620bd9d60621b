// Package storetest is the conformance suite of package store. Every chunk
// store runs it, and so does everything that wraps or serves one, so that a
// reader need not know which one it has.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/chunk"
)

// Harness is one fresh, empty store under test.
type Harness struct {
	Getter      store.Getter
	BatchGetter store.BatchGetter
	// Store is nil when what is tested can only be read.
	Store store.Store
	// Plant puts a chunk underneath what is tested. It is needed without a
	// Store, and not used with one.
	Plant func(t *testing.T, p []byte)
	// Damage makes the stored copy of a chunk wrong, underneath what is tested.
	Damage func(t *testing.T, d chunk.Digest)
}

// Run runs the suite; open makes a harness for each test.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	read := map[string]func(*testing.T, Harness){
		"Get returns what was put":                            testGet,
		"chunks of the largest size":                          testMaxSize,
		"Get appends to dst from its start":                   testGetDst,
		"Get of an unknown chunk is ErrNotFound":              testNotFound,
		"Get and GetBatch obey a cancelled context":           testReadCancelled,
		"GetBatch answers each digest once":                   testBatch,
		"GetBatch of nothing calls nothing":                   testEmptyBatch,
		"GetBatch answers an unknown chunk alone":             testBatchNotFound,
		"GetBatch stops at an error of fn":                    testBatchStops,
		"GetBatch never calls fn concurrently":                testBatchSerial,
		"damaged bytes are a CorruptError and never returned": testDamage,
		"a damaged chunk leaves the others of a batch good":   testBatchDamage,
		"many readers at once":                                testReaders,
	}
	write := map[string]func(*testing.T, Harness){
		"Put returns the digest and keeps no p":           testPut,
		"a chunk put twice is one chunk":                  testPutTwice,
		"Put refuses empty and oversized chunks":          testPutBounds,
		"Write without puts is fine":                      testEmptyWrite,
		"Write returns the error of fn":                   testWriteError,
		"Write and Put obey a cancelled context":          testWriteCancelled,
		"Put after its Write has ended changes nothing":   testPutLate,
		"concurrent puts in one Write":                    testConcurrentPuts,
		"concurrent Writes of the same chunks, and reads": testConcurrentWrites,
	}
	for name, test := range read {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
	for name, test := range write {
		t.Run(name, func(t *testing.T) {
			if h := open(t); h.Store != nil {
				test(t, h)
			}
		})
	}
}

// Content returns n bytes that depend on seed only; every second seed
// compresses well.
func Content(seed uint64, n int) []byte {
	p := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24)})
	if seed%2 == 0 {
		word := make([]byte, 13)
		rng.Read(word)
		for i := 0; i < n; i += len(word) {
			copy(p[i:], word)
		}
		return p
	}
	rng.Read(p)
	return p
}

// sizes are those of a set of chunks.
var sizes = []int{1, 2, 100, 4095, 4096, 4097, 70_000, chunk.DefaultSize - 1, chunk.DefaultSize}

// fill puts a set of chunks into the store.
func fill(t *testing.T, h Harness) map[chunk.Digest][]byte {
	t.Helper()
	set := map[chunk.Digest][]byte{}
	var ps [][]byte
	for i, n := range sizes {
		p := Content(uint64(i+1), n)
		set[chunk.Sum(p)] = p
		ps = append(ps, p)
	}
	put(t, h, ps...)
	return set
}

func put(t *testing.T, h Harness, ps ...[]byte) {
	t.Helper()
	if h.Store == nil {
		for _, p := range ps {
			h.Plant(t, p)
		}
		return
	}
	if err := writeAll(t.Context(), h.Store, ps); err != nil {
		t.Fatalf("write: %v", err)
	}
}

func writeAll(ctx context.Context, s store.Store, ps [][]byte) error {
	return s.Write(ctx, func(ctx context.Context, w store.Putter) error {
		for _, p := range ps {
			d, err := w.Put(ctx, p)
			if err != nil {
				return err
			}
			if want := chunk.Sum(p); d != want {
				return fmt.Errorf("put returned %s, want %s", d, want)
			}
		}
		return nil
	})
}

func digests(set map[chunk.Digest][]byte) []chunk.Digest {
	var ds []chunk.Digest
	for d := range set {
		ds = append(ds, d)
	}
	slices.SortFunc(ds, func(a, b chunk.Digest) int { return bytes.Compare(a[:], b[:]) })
	return ds
}

func wantChunk(t *testing.T, g store.Getter, want []byte) {
	t.Helper()
	got, err := g.Get(t.Context(), chunk.Sum(want), nil)
	if err != nil {
		t.Fatalf("get: %v", err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("get returned %d other bytes, want the %d put", len(got), len(want))
	}
}

// batch collects the answers of one GetBatch.
func batch(t *testing.T, h Harness, ds []chunk.Digest) (map[chunk.Digest][]byte, map[chunk.Digest]error) {
	t.Helper()
	got, errs := map[chunk.Digest][]byte{}, map[chunk.Digest]error{}
	err := h.BatchGetter.GetBatch(t.Context(), ds, func(d chunk.Digest, p []byte, err error) error {
		_, answered := got[d]
		_, refused := errs[d]
		if answered || refused {
			t.Errorf("%s was answered twice", d)
		}
		if err != nil {
			if len(p) != 0 {
				t.Errorf("%s came with an error and %d bytes", d, len(p))
			}
			errs[d] = err
		} else {
			got[d] = bytes.Clone(p)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("get batch: %v", err)
	}
	return got, errs
}

func testGet(t *testing.T, h Harness) {
	for _, p := range fill(t, h) {
		wantChunk(t, h.Getter, p)
	}
}

func testMaxSize(t *testing.T, h Harness) {
	small, large := Content(2, chunk.MaxSize), Content(3, chunk.MaxSize)
	put(t, h, small, large)
	wantChunk(t, h.Getter, small)
	got, errs := batch(t, h, []chunk.Digest{chunk.Sum(large)})
	if len(errs) != 0 || !bytes.Equal(got[chunk.Sum(large)], large) {
		t.Fatalf("get batch: errors %v", errs)
	}
}

func testGetDst(t *testing.T, h Harness) {
	p := Content(2, 5000)
	put(t, h, p)
	for _, dst := range [][]byte{nil, make([]byte, 3), make([]byte, 0, 10_000), make([]byte, 10_000)} {
		got, err := h.Getter.Get(t.Context(), chunk.Sum(p), dst)
		if err != nil || !bytes.Equal(got, p) {
			t.Fatalf("get into len %d cap %d: %d bytes, error %v", len(dst), cap(dst), len(got), err)
		}
	}
}

func testNotFound(t *testing.T, h Harness) {
	fill(t, h)
	p, err := h.Getter.Get(t.Context(), chunk.Sum([]byte("no such chunk")), nil)
	if !errors.Is(err, store.ErrNotFound) || p != nil {
		t.Fatalf("got %d bytes, error %v, want store.ErrNotFound", len(p), err)
	}
}

func testReadCancelled(t *testing.T, h Harness) {
	set := fill(t, h)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for d := range set {
		if _, err := h.Getter.Get(ctx, d, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("get: got %v, want context.Canceled", err)
		}
	}
	err := h.BatchGetter.GetBatch(ctx, digests(set), func(chunk.Digest, []byte, error) error { return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("get batch: got %v, want context.Canceled", err)
	}
}

func testBatch(t *testing.T, h Harness) {
	set := fill(t, h)
	ds := digests(set)
	got, errs := batch(t, h, append(ds, ds...))
	if len(errs) != 0 || len(got) != len(set) {
		t.Fatalf("%d answers and errors %v, want %d answers", len(got), errs, len(set))
	}
	for d, p := range got {
		if !bytes.Equal(p, set[d]) {
			t.Errorf("%s: %d wrong bytes", d, len(p))
		}
	}
}

func testEmptyBatch(t *testing.T, h Harness) {
	if got, errs := batch(t, h, nil); len(got)+len(errs) != 0 {
		t.Fatalf("%d answers to nothing", len(got)+len(errs))
	}
}

func testBatchNotFound(t *testing.T, h Harness) {
	set := fill(t, h)
	unknown := chunk.Sum([]byte("no such chunk"))
	got, errs := batch(t, h, append(digests(set), unknown))
	if len(got) != len(set) || len(errs) != 1 || !errors.Is(errs[unknown], store.ErrNotFound) {
		t.Fatalf("%d answers and errors %v, want %d and store.ErrNotFound", len(got), errs, len(set))
	}
}

func testBatchStops(t *testing.T, h Harness) {
	set := fill(t, h)
	stop, calls := errors.New("stop"), 0
	err := h.BatchGetter.GetBatch(t.Context(), digests(set), func(chunk.Digest, []byte, error) error {
		calls++
		if calls == 3 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || calls != 3 {
		t.Fatalf("%d calls, error %v, want 3 and fn's error", calls, err)
	}
}

func testBatchSerial(t *testing.T, h Harness) {
	set := fill(t, h)
	var busy sync.Mutex
	err := h.BatchGetter.GetBatch(t.Context(), digests(set), func(chunk.Digest, []byte, error) error {
		if !busy.TryLock() {
			return errors.New("fn runs twice at once")
		}
		defer busy.Unlock()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// wantCorrupt accepts that a store which took the damaged copy out of use no
// longer has the chunk.
func wantCorrupt(t *testing.T, err error, d chunk.Digest, again bool) {
	t.Helper()
	var corrupt *store.CorruptError
	switch {
	case errors.As(err, &corrupt) && corrupt.Want == d:
	case again && errors.Is(err, store.ErrNotFound):
	default:
		t.Errorf("got error %v, want *store.CorruptError", err)
	}
}

func testDamage(t *testing.T, h Harness) {
	for d := range fill(t, h) {
		h.Damage(t, d)
		for i := range 2 {
			p, err := h.Getter.Get(t.Context(), d, nil)
			if p != nil {
				t.Errorf("get of a damaged chunk returned %d bytes", len(p))
			}
			wantCorrupt(t, err, d, i > 0)
		}
	}
}

func testBatchDamage(t *testing.T, h Harness) {
	set := fill(t, h)
	ds := digests(set)
	h.Damage(t, ds[3])
	got, errs := batch(t, h, ds)
	if len(got) != len(set)-1 || len(errs) != 1 {
		t.Fatalf("%d answers and errors %v, want %d and 1", len(got), errs, len(set)-1)
	}
	wantCorrupt(t, errs[ds[3]], ds[3], false)
}

func testReaders(t *testing.T, h Harness) {
	set := fill(t, h)
	ds := digests(set)
	var g errgroup.Group
	for i := range 64 {
		g.Go(func() error {
			d := ds[i%len(ds)]
			p, err := h.Getter.Get(t.Context(), d, nil)
			if err == nil && !bytes.Equal(p, set[d]) {
				err = fmt.Errorf("%s: %d wrong bytes", d, len(p))
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}
