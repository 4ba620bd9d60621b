package reader

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// The answer to a start must not wait for a stream that nobody takes.
func TestAStreamTooManyIsNotWaitedFor(t *testing.T) {
	r := &reader{starts: make(chan struct{})} // none is free
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		r.takeStart(q.Context(), newTeller(w), q.Body, nil)
	}))
	defer srv.Close()
	body, stream := io.Pipe()
	defer stream.Close() // it stays open
	late := time.AfterFunc(time.Minute, func() { stream.Close() })
	resp, err := http.Post(srv.URL, "", body)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if !late.Stop() {
		t.Error("the answer waited for the stream to end")
	}
}
