package api_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/chunk"
	"quarry/store/packed"
)

func TestABatchTellsWhatItReadFromTheBucket(t *testing.T) {
	w := apitest.New(t)
	var ds []chunk.Digest
	want := 0
	srv, _ := w.Serve(t, nil)
	url := srv.URL + "/v1/chunks:batchGet"
	read := func(ds ...chunk.Digest) (n int, stored int) {
		t.Helper()
		a := ask(t, "POST", url, string(api.EncodeDigests(ds)), "Content-Type", api.TypeDigests)
		n, err := strconv.Atoi(a.Trailer.Get(api.HeaderBucketBytes))
		if err != nil {
			t.Fatalf("trailer %v: %v", a.Trailer, err)
		}
		return n, len(a.body) - 12 - 48*(len(ds)+1)
	}
	for i := range 5 {
		d := w.PutChunk(t, fmt.Appendf(nil, "chunk %d, alone in its pack", i))
		ds = append(ds, d)
		n, stored := read(d)
		if n != stored || n == 0 {
			t.Errorf("%d bytes of the bucket for a chunk of %d", n, stored)
		}
		want += n
	}
	if n, _ := read(ds...); n != want {
		t.Errorf("a batch: %d bytes, want %d", n, want)
	}
	if n, _ := read(chunk.Sum(nil)); n != 0 {
		t.Errorf("a missing chunk: %d bytes", n)
	}
}

// A server that has not seen the blob before answers a range as later.
func TestTheFirstRangeOfAServerIsPartialContent(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 20, 1)
	for _, last := range []int64{0, 99, img.Blob.Size() - 1} {
		srv, _ := w.Serve(t, nil)
		a := ask(t, "GET", srv.URL+"/v1/blobs/"+img.Blob.ID.Hex(), "", "Range", fmt.Sprintf("bytes=0-%d", last))
		if want := fmt.Sprintf("bytes 0-%d/%d", last, img.Blob.Size()); a.StatusCode != 206 || a.Header.Get("Content-Range") != want || int64(len(a.body)) != last+1 {
			t.Errorf("status %d, Content-Range %q, %d bytes, want 206, %q", a.StatusCode, a.Header.Get("Content-Range"), len(a.body), want)
		}
	}
}

// waiting is a store whose batches wait until they are released.
type waiting struct {
	api.Chunks
	begun   chan struct{}
	release chan struct{}
}

func (s waiting) StoredBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, packed.Stored, error) error) error {
	s.begun <- struct{}{}
	<-s.release
	return s.Chunks.StoredBatch(ctx, ds, fn)
}

// A batch holds one read, however large it is: more only while helpers are free.
func TestRequestsAreAdmittedByWhatTheyHold(t *testing.T) {
	w := apitest.New(t)
	s := waiting{w.Chunks, make(chan struct{}), make(chan struct{})}
	srv, _ := w.Serve(t, func(c *api.Config) { c.Chunks, c.MaxReads, c.QueueTimeout = s, 3, time.Nanosecond })
	batch := func(n int) error {
		var ds []chunk.Digest
		for i := range n {
			ds = append(ds, chunk.Sum(fmt.Append(nil, i)))
		}
		a, err := tryAsk(t, "POST", srv.URL+"/v1/chunks:batchGet", string(api.EncodeDigests(ds)), "Content-Type", api.TypeDigests)
		if err == nil && a.StatusCode != 200 {
			err = errors.New(a.Status)
		}
		return err
	}
	done := make(chan error)
	for _, n := range []int{500, 1, 1} {
		go func() { done <- batch(n) }() // ends when it is released
		<-s.begun
	}
	if err := batch(1); err == nil || err.Error() != "503 Service Unavailable" {
		t.Errorf("one too many: got %v", err)
	}
	close(s.release)
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	go func() { <-s.begun }()
	if err := batch(1000); err != nil {
		t.Errorf("after the others: %v", err)
	}
}
