package bucket_test

import (
	"bytes"
	"context"
	"testing"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
)

func TestAMeteredBucketIsABucket(t *testing.T) {
	buckettest.Run(t, func(*testing.T) bucket.Bucket { return bucket.Metered(mem.New()) })
}

func TestReadsAreCountedForTheirContext(t *testing.T) {
	b := bucket.Metered(mem.New())
	if err := b.Put(t.Context(), "a", bytes.NewReader(make([]byte, 100)), 100); err != nil {
		t.Fatal(err)
	}
	var one, two bucket.Meter
	read := func(ctx context.Context, n int, off int64) error {
		return b.ReadAt(ctx, "a", make([]byte, n), off)
	}
	ctx := bucket.WithMeter(t.Context(), &one)
	if err := read(ctx, 60, 0); err != nil {
		t.Fatal(err)
	}
	if err := read(ctx, 60, 50); err == nil {
		t.Fatal("a read beyond the end")
	}
	if err := read(bucket.WithMeter(ctx, &two), 7, 0); err != nil {
		t.Fatal(err)
	}
	if err := read(t.Context(), 5, 0); err != nil {
		t.Fatal(err)
	}
	if one.Read() != 120 || two.Read() != 7 {
		t.Errorf("counted %d and %d bytes, want 120 and 7", one.Read(), two.Read())
	}
}
