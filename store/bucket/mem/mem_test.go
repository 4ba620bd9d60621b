package mem_test

import (
	"testing"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
)

func TestConformance(t *testing.T) {
	buckettest.Run(t, func(*testing.T) bucket.Bucket { return mem.New() })
	buckettest.RunJournal(t, func(*testing.T) bucket.Journal { return mem.New() })
}

func TestCloneDoesNotFollow(t *testing.T) {
	b := mem.New()
	buckettest.Put(t, b, "a", []byte("a"))
	if err := b.Append(t.Context(), 1, []byte("one")); err != nil {
		t.Fatal(err)
	}
	clone := b.Clone()
	buckettest.Put(t, b, "b", []byte("b"))
	buckettest.Put(t, clone, "c", []byte("c"))
	for _, writer := range []*mem.Bucket{b, clone} { // each appends its own entry 2
		if err := writer.Append(t.Context(), 2, []byte("two")); err != nil {
			t.Fatal(err)
		}
	}
	buckettest.Corrupt(t, clone, "a", 0)
	if got := string(buckettest.Bytes(t, b, "a")); got != "a" {
		t.Errorf("the original changed to %q with its clone", got)
	}
	if got := buckettest.Keys(t, clone, ""); len(got) != 2 || got[1] != "c" {
		t.Errorf("clone: got %q, want [a c]", got)
	}
}
