package client_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/chunk"
)

// syncBuffer is a log that several goroutines write.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestCredentialsReachTheConversionAndNothingElse(t *testing.T) {
	const hidden = "hidden-word"
	w := apitest.New(t)
	log := &syncBuffer{}
	logger := slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var got api.ConvertRequest
	h := api.NewHandler(api.Config{
		Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket, Local: true, Log: logger,
		Convert: func(_ context.Context, req api.ConvertRequest, _ func(api.Progress)) (api.ConvertResult, error) {
			got = req
			if req.Name == "fail:1" {
				return api.ConvertResult{}, fmt.Errorf("%w: no answer for %v %v", api.ErrSource, *req.Credentials, req.Credentials.Password)
			}
			return api.ConvertResult{Name: req.Name, Source: chunk.Sum(nil)}, nil
		},
	})
	c, socket := local(t, h)

	want := api.Credentials{Username: "u", Password: hidden, IdentityToken: hidden, RegistryToken: hidden}
	req := api.ConvertRequest{Source: "registry://127.0.0.1:1/x", Name: "a:b", Credentials: &want}
	if _, err := c.Convert(t.Context(), req, nil); err != nil || got.Credentials == nil || *got.Credentials != want {
		t.Fatalf("the conversion got %v, error %v", got.Credentials, err)
	}
	req.Name = "fail:1"
	_, err := c.Convert(t.Context(), req, nil)
	if err == nil || strings.Contains(err.Error(), hidden) || !strings.Contains(err.Error(), "[redacted]") {
		t.Errorf("error %v", err)
	}
	logger.Info("all of it", "password", want.Password, "credentials", fmt.Sprintf("%+v %#v", want, want))

	unix := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	for _, body := range []string{
		`{"source":1,"name":"a","credentials":{"password":"` + hidden + `"}}`,
		`{"source":"x","name":"a","credentials":{"pass":"` + hidden + `"}}`,
		`{"source":"x","name":"a","credentials":"` + hidden + `"}`,
		`{"source":"x","name":"a","credentials":{"password":"` + hidden,
		`{"source":"","name":"","credentials":{"password":"` + hidden + `"}}`,
	} {
		resp, err := unix.Post("http://local/v1/convert", api.TypeJSON, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusBadRequest || strings.Contains(string(answer), hidden) {
			t.Errorf("%s: %s: %s", body, resp.Status, answer)
		}
	}
	if strings.Contains(log.String(), hidden) {
		t.Errorf("the log shows it: %s", log.String())
	}
}
