package bucket_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
)

// An object that is replaced between the question for its length and the read.
func TestReadReplacedReturnsOneOrTheOther(t *testing.T) {
	for _, lengths := range [][]int{{10, 20}, {20, 10}, {10, 20, 10, 30}, {0, 5}, {5, 0}} {
		b := mem.New()
		put := func(n int) {
			t.Helper()
			buckettest.Put(t, b, "k", bytes.Repeat([]byte{byte(n)}, n))
		}
		put(lengths[0])
		next := 1
		faulty := &buckettest.Faulty{Bucket: b, Before: func(op buckettest.Op) error {
			if op.Method == "ReadAt" && next < len(lengths) {
				put(lengths[next])
				next++
			}
			return nil
		}}
		got, err := bucket.ReadReplaced(t.Context(), faulty, "k", 100)
		want := lengths[len(lengths)-1]
		if err != nil || !bytes.Equal(got, bytes.Repeat([]byte{byte(want)}, want)) {
			t.Errorf("%v: got %v, %v", lengths, got, err)
		}
	}
	if _, err := bucket.ReadReplaced(t.Context(), mem.New(), "k", 1); !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("nothing there: %v", err)
	}
}

// One that always ends early, or always changes, is not read for ever.
func TestReadReplacedEnds(t *testing.T) {
	b := mem.New()
	n := 1
	faulty := &buckettest.Faulty{Bucket: b, After: func(op buckettest.Op) error {
		if op.Method == "Stat" {
			n++
			buckettest.Put(t, b, "k", []byte(strings.Repeat("x", n)))
		}
		return nil
	}}
	buckettest.Put(t, b, "k", []byte("x"))
	if _, err := bucket.ReadReplaced(t.Context(), faulty, "k", 100); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
}
