package client_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store/chunk"
)

// A job that panics ends with an internal error, and the server stays.
func TestAPanicInAJobEndsThatJobAlone(t *testing.T) {
	w := apitest.New(t)
	var log syncBuffer
	srv := httptest.NewServer(api.NewHandler(api.Config{
		Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket, Local: true, MaxJobs: 1, Log: slog.New(slog.NewJSONHandler(&log, nil)),
		Convert: func(_ context.Context, r api.ConvertRequest, _ func(api.Progress)) (api.ConvertResult, error) {
			if r.Source == "oci:wall" {
				panic("at the wall")
			}
			return api.ConvertResult{Name: "a:b"}, nil
		},
	}))
	defer srv.Close()
	c := connect(t, client.Config{URL: srv.URL})
	_, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:wall", Name: "a:b"}, nil)
	var e *api.Error
	if !errors.As(err, &e) || e.Code != "internal" || !strings.Contains(e.Message, "at the wall") {
		t.Errorf("got %v", err)
	}
	if !strings.Contains(log.String(), "panic_test.go") {
		t.Errorf("the log has no stack: %s", log.String())
	}
	if _, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:x", Name: "a:b"}, nil); err != nil {
		t.Errorf("the next job: %v", err)
	}
}

// Who waits for a slot is told so.
func TestAJobThatWaitsSaysSo(t *testing.T) {
	w := apitest.New(t)
	begun, end := make(chan struct{}), make(chan struct{})
	srv := httptest.NewServer(api.NewHandler(api.Config{
		Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket, Local: true, MaxJobs: 1,
		Convert: func(_ context.Context, r api.ConvertRequest, _ func(api.Progress)) (api.ConvertResult, error) {
			if r.Source == "oci:first" {
				close(begun)
				<-end
			}
			return api.ConvertResult{Name: "a:b"}, nil
		},
	}))
	defer srv.Close()
	c := connect(t, client.Config{URL: srv.URL})
	ended := make(chan error, 1)
	go func() { // ends when end is closed
		_, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:first", Name: "a:b"}, func(p api.Progress) {
			t.Errorf("the first job says %+v", p)
		})
		ended <- err
	}()
	<-begun
	var said []string
	_, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:second", Name: "a:b"}, func(p api.Progress) {
		said = append(said, p.Step)
		close(end)
	})
	if err := errors.Join(err, <-ended); err != nil || strings.Join(said, ",") != "waiting for other conversions" {
		t.Errorf("it said %q, error %v", said, err)
	}
}

// JSON would make other letters of what is not UTF-8, and so another file.
func TestNamesThatJSONCannotCarryAreRefused(t *testing.T) {
	c := connect(t, client.Config{URL: "http://127.0.0.1:1"})
	for _, r := range []api.ConvertRequest{
		{Source: "oci:/no\xff", Name: "a:b"}, {Source: "oci:/x", Name: "a\xff"}, {Source: "oci:/x", Name: "a", Platform: "l\xff"},
		{Source: "oci:/x", Name: "a", Limits: map[string]int64{"\xff": 1}},
	} {
		if _, err := c.Convert(t.Context(), r, nil); !errors.Is(err, api.ErrBadRequest) || !strings.Contains(err.Error(), `\xff`) {
			t.Errorf("%+v: got %v", r, err)
		}
	}
	if _, err := c.RenewLease(t.Context(), "a", "im\xff", chunk.Digest{}, 1e9); !errors.Is(err, api.ErrBadRequest) {
		t.Errorf("lease: got %v", err)
	}
	w := apitest.New(t)
	srv := httptest.NewServer(api.NewHandler(api.Config{
		Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket, Local: true,
		Convert: func(_ context.Context, r api.ConvertRequest, _ func(api.Progress)) (api.ConvertResult, error) {
			t.Errorf("the source became %q", r.Source)
			return api.ConvertResult{}, nil
		},
	}))
	defer srv.Close()
	resp, err := srv.Client().Post(srv.URL+"/v1/convert", api.TypeJSON, bytes.NewReader([]byte("{\"source\":\"oci:/no\xff\",\"name\":\"a\"}")))
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body.Close(); resp.StatusCode != 400 {
		t.Errorf("the server answers %s", resp.Status)
	}
}
