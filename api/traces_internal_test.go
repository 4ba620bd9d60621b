package api

import (
	"encoding/binary"
	"log/slog"
	"sync"
	"testing"
	"time"

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
