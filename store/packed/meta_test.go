package packed_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	bucketmem "quarry/store/bucket/mem"
	"quarry/store/packed"
)

func TestMeta(t *testing.T) {
	b := bucketmem.New()
	if _, err := packed.OpenMeta(t.Context(), b); !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("open of no store: %v, want bucket.ErrNotFound", err)
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.FixedZone("", 3600))
	created, err := packed.CreateMeta(t.Context(), b, 256<<10, now)
	if err != nil {
		t.Fatal(err)
	}
	got := string(buckettest.Bytes(t, b, "store.json"))
	if want := `{"version":1,"chunk_size":262144,"created":"2026-01-02T02:04:05Z"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if opened, err := packed.OpenMeta(t.Context(), b); err != nil || opened != created {
		t.Errorf("got %v, %v, want %v", opened, err, created)
	}
	if _, err := packed.CreateMeta(t.Context(), b, 256<<10, now); err == nil {
		t.Error("a store was created twice")
	}
	if _, err := packed.CreateMeta(t.Context(), bucketmem.New(), 1000, now); err == nil {
		t.Error("chunk size 1000 was taken")
	}
}

func TestABucketThatCannotBeReadIsNotMadeAStore(t *testing.T) {
	b := bucketmem.New()
	if _, err := packed.CreateMeta(t.Context(), b, 256<<10, time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	want := string(buckettest.Bytes(t, b, "store.json"))
	faulty := &buckettest.Faulty{Bucket: b, Journal: b, Before: buckettest.FailAll("Stat")}
	if _, err := packed.CreateMeta(t.Context(), faulty, 4<<10, time.Unix(2e9, 0)); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("got %v, want the injected error", err)
	}
	if got := string(buckettest.Bytes(t, b, "store.json")); got != want {
		t.Errorf("the store is now %s, was %s", got, want)
	}
}

func TestMetaIsDecodedStrictly(t *testing.T) {
	for text, want := range map[string]string{
		`{"version":2,"shards":7}`: "version 2",
		`{"version":1,"chunk_size":262144,"created":"2026-01-02T02:04:05Z","x":1}`: "unknown field",
		`{"version":1,"chunk_size":262143,"created":"2026-01-02T02:04:05Z"}`:       "chunk size 262143",
		`{"version":1,"chunk_size":262144,"created":"2026-01-02T02:04:05Z"} `:      "not in the form",
		`{"version":1, "chunk_size":262144,"created":"2026-01-02T02:04:05Z"}`:      "not in the form",
		`{"version":1,"chunk_size":262144,"created":"2026-01-02T02:04:05Z"}{}`:     "after top-level",
		``:                        "unexpected end",
		strings.Repeat(" ", 5000): "5000 bytes",
	} {
		b := bucketmem.New()
		buckettest.Put(t, b, "store.json", []byte(text))
		if _, err := packed.OpenMeta(t.Context(), b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: got %v, want %q", text, err, want)
		} else if damaged := want != "version 2"; damaged != errors.Is(err, packed.ErrMeta) {
			t.Errorf("%.80q: ErrMeta is %t", text, !damaged)
		}
	}
}
