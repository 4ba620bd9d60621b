package api_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

func TestBlobRangesAreThoseOfTheWhole(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 400, 1)
	srv, _ := w.Serve(t, nil)
	url := srv.URL + "/v1/blobs/" + img.Blob.ID.Hex()
	want := append(bytes.Clone(img.Data), img.Blob.Tail()...)
	size := int64(len(want))

	whole := ask(t, "GET", url, "")
	if whole.StatusCode != 200 || !bytes.Equal(whole.body, want) || whole.Header.Get("Accept-Ranges") != "bytes" {
		t.Fatalf("whole blob: status %d, %d bytes, want %d", whole.StatusCode, len(whole.body), size)
	}
	if head := ask(t, "HEAD", url, ""); head.StatusCode != 200 || head.ContentLength != size {
		t.Errorf("HEAD: status %d, length %d, want %d", head.StatusCode, head.ContentLength, size)
	}
	check := func(header string, start, end int64) {
		t.Helper()
		a := ask(t, "GET", url, "", "Range", header)
		contentRange := fmt.Sprintf("bytes %d-%d/%d", start, end-1, size)
		if a.StatusCode != 206 || a.Header.Get("Content-Range") != contentRange {
			t.Errorf("%s: status %d, Content-Range %q, want %q", header, a.StatusCode, a.Header.Get("Content-Range"), contentRange)
		}
		if !bytes.Equal(a.body, want[start:end]) {
			t.Errorf("%s: the bytes differ from those of the whole blob", header)
		}
	}
	data := img.Blob.DataSize()
	check("bytes=0-0", 0, 1)
	check(fmt.Sprintf("bytes=%d-", size-1), size-1, size)
	check("bytes=-600", size-600, size)
	check(fmt.Sprintf("bytes=%d-%d", data-10, data+10), data-10, data+11) // across the end of the data
	check(fmt.Sprintf("bytes=%d-%d", data, size+5), data, size)           // nydusd's read of the tail
	for _, c := range img.Blob.Chunks[:20] {
		check(fmt.Sprintf("bytes=%d-%d", c.Off, c.Off+int64(c.Len)-1), c.Off, c.Off+int64(c.Len))
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		start := rnd.Int64N(size)
		end := min(size, start+1+rnd.Int64N(1<<20))
		check(fmt.Sprintf("bytes=%d-%d", start, end-1), start, end)
	}
}

func TestBlobRangesThatCannotBeServed(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 3, 1)
	srv, _ := w.Serve(t, nil)
	url := srv.URL + "/v1/blobs/" + img.Blob.ID.Hex()
	for _, header := range []string{fmt.Sprintf("bytes=%d-", img.Blob.Size()), "bytes=0-1,3-4", "bytes=5-1", "bytes=x"} {
		a := ask(t, "GET", url, "", "Range", header)
		wantError(t, a, 416, "range_not_satisfiable")
		if got, want := a.Header.Get("Content-Range"), fmt.Sprintf("bytes */%d", img.Blob.Size()); got != want {
			t.Errorf("%s: Content-Range is %q, want %q", header, got, want)
		}
	}
	if a := ask(t, "GET", url, "", "Range", "bytes=0-1", "If-Range", `"another"`); a.StatusCode != 200 {
		t.Errorf("If-Range of another version: status %d, want 200", a.StatusCode)
	}
	tag := ask(t, "HEAD", url, "").Header.Get("ETag")
	if a := ask(t, "GET", url, "", "Range", "bytes=0-1", "If-Range", tag); a.StatusCode != 206 {
		t.Errorf("If-Range of this version: status %d, want 206", a.StatusCode)
	}
	wantError(t, ask(t, "GET", srv.URL+"/v1/blobs/"+chunk.Sum(nil).Hex(), ""), 404, "object_not_found")
}

func TestABlobThatBreaksOffIsNeverASuccess(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 600, 1) // more than one window
	chunks := img.Blob.Chunks
	damaged := &faulty{Chunks: w.Chunks, fail: map[chunk.Digest]error{}}
	srv, _ := w.Serve(t, func(c *api.Config) { c.Chunks = damaged })
	url := srv.URL + "/v1/blobs/" + img.Blob.ID.Hex()

	last := chunks[len(chunks)-1].Digest
	damaged.fail[last] = &store.CorruptError{Want: last}
	a, err := tryAsk(t, "GET", url, "")
	if err == nil {
		t.Errorf("blob with a damaged last chunk: status %d, %d bytes and no error", a.StatusCode, len(a.body))
	}
	damaged.fail[chunks[0].Digest] = &store.CorruptError{Want: chunks[0].Digest}
	wantError(t, ask(t, "GET", url, ""), 500, "chunk_corrupt")
	if a := ask(t, "GET", url, "", "Range", fmt.Sprintf("bytes=%d-%d", chunks[1].Off, chunks[1].Off+9)); a.StatusCode != 206 {
		t.Errorf("range beside the damage: status %d, want 206", a.StatusCode)
	}
}

func TestABlobThatLeadsElsewhereIsRefused(t *testing.T) {
	w := apitest.New(t)
	a, b := w.Publish(t, "a:1", 3, 1), w.Publish(t, "a:2", 3, 2)
	srv, _ := w.Serve(t, nil)
	url := srv.URL + "/v1/blobs/" + a.Blob.ID.Hex()
	w.PutObject(t, image.BlobKey(a.Blob.ID), []byte(chunk.Sum(b.Bootstrap).String()))
	wantError(t, ask(t, "GET", url, ""), 500, "object_corrupt")
	w.PutObject(t, image.BlobKey(a.Blob.ID), []byte("sha256:xyz"))
	wantError(t, ask(t, "GET", url, ""), 500, "object_corrupt")
	w.PutObject(t, image.BlobKey(a.Blob.ID), []byte(chunk.Sum(a.Bootstrap).String()))
	if got := ask(t, "GET", url, ""); got.StatusCode != 200 {
		t.Errorf("after healing: status %d, want 200", got.StatusCode)
	}
}
