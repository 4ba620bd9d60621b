package packed_test

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket/buckettest"
)

// TestAPackThatIsMadeAgainKeepsItsPlace lets two writers make the same pack, and
// a third in between them one that has its chunks too.
func TestAPackThatIsMadeAgainKeepsItsPlace(t *testing.T) {
	d := newDisk()
	puts := atomic.Int32{}
	arrived := make(chan struct{})
	goOn := []chan struct{}{make(chan struct{}), make(chan struct{})}
	held := &buckettest.Faulty{Bucket: d.bucket, Journal: d.bucket, Before: func(op buckettest.Op) error {
		if op.Method == "Put" && strings.HasPrefix(op.Key, "packs/") {
			if n := int(puts.Add(1)) - 1; n < len(goOn) {
				arrived <- struct{}{}
				<-goOn[n]
			}
		}
		return nil
	}}
	o, err := d.tryOpen(t, held, held, d.fs)
	if err != nil {
		t.Fatal(err)
	}
	ended := []chan error{make(chan error, 1), make(chan error, 1)}
	for i, n := range []int{10, 20} { // both look up before anything is stored
		go func() { ended[i] <- putAll(t.Context(), o, contents(0, n)) }() // waited for below
		<-arrived
	}
	o.put(t, contents(0, 10))
	for _, i := range []int{1, 0} {
		close(goOn[i])
		if err := <-ended[i]; err != nil {
			t.Fatal(err)
		}
	}
	before := o.records(t)
	if _, err := o.Rebuild(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, o.records(t)); diff != "" {
		t.Errorf("rebuilt index differs:\n%.2000s", diff)
	}
}
