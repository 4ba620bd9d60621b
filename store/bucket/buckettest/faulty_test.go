package buckettest_test

import (
	"bytes"
	"errors"
	"testing"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
)

func TestFaultyWithoutFaultsChangesNothing(t *testing.T) {
	open := func() *buckettest.Faulty {
		m := mem.New()
		return &buckettest.Faulty{Bucket: m, Journal: m}
	}
	buckettest.Run(t, func(*testing.T) bucket.Bucket { return open() })
	buckettest.RunJournal(t, func(*testing.T) bucket.Journal { return open() })
}

func TestFaultyFailsNotApplied(t *testing.T) {
	m := mem.New()
	f := &buckettest.Faulty{Bucket: m, Journal: m, Before: buckettest.FailAll("Put", "Append")}
	if err := f.Put(t.Context(), "a", bytes.NewReader(nil), 0); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("Put: got error %v, want the injected one", err)
	}
	if err := f.Append(t.Context(), 1, []byte("x")); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("Append: got error %v, want the injected one", err)
	}
	if keys := buckettest.Keys(t, m, ""); len(keys) != 0 {
		t.Errorf("the object is there: %q", keys)
	}
	if entries := buckettest.Entries(t, m, 1); len(entries) != 0 {
		t.Errorf("the entry is there: %v", entries)
	}
}

func TestFaultyFailsApplied(t *testing.T) {
	m := mem.New()
	f := &buckettest.Faulty{Bucket: m, Journal: m, After: buckettest.FailNth(2)}
	buckettest.Put(t, f, "a", []byte("a"))
	if err := f.Put(t.Context(), "b", bytes.NewReader([]byte("b")), 1); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("second call: got error %v, want the injected one", err)
	}
	buckettest.Put(t, f, "c", []byte("c"))
	if keys := buckettest.Keys(t, f, ""); len(keys) != 3 {
		t.Errorf("got %q, want all three objects", keys)
	}
}

func TestFaultySequencesEndWithTheFault(t *testing.T) {
	m := mem.New()
	buckettest.Put(t, m, "a", nil)
	f := &buckettest.Faulty{Bucket: m, Journal: m, After: buckettest.FailAll("List")}
	var keys []string
	var last error
	for o, err := range f.List(t.Context(), "") {
		if last = err; err == nil {
			keys = append(keys, o.Key)
		}
	}
	if len(keys) != 1 || !errors.Is(last, buckettest.ErrInjected) {
		t.Errorf("got %q, then error %v, want [a], then the injected error", keys, last)
	}
}

func TestCorruptFlipsOneByte(t *testing.T) {
	m := mem.New()
	buckettest.Put(t, m, "a", []byte{1, 2, 3})
	buckettest.Corrupt(t, m, "a", 1)
	buckettest.Corrupt(t, m, "a", -1)
	if got, want := buckettest.Bytes(t, m, "a"), []byte{1, 2 ^ 0xff, 3 ^ 0xff}; !bytes.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
