package client_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"quarry/api/sandboxes"
	"quarry/worker/sandbox"
)

// serveHTTP2 starts a worker over n that speaks HTTP/2, and asks for no token.
func serveHTTP2(t *testing.T, n sandbox.Node) *httptest.Server {
	t.Helper()
	h := sandboxes.NewHandler(sandboxes.Config{Node: n})
	srv := httptest.NewUnstartedServer(h)
	srv.Config = sandboxes.NewServer(h)
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(func() { h.Stop(); srv.Close() })
	return srv
}

// A refusal over HTTP/2 ends one stream, and the connection goes on.
func TestARefusedUploadOverHTTP2(t *testing.T) {
	n := newFake()
	n.err = fmt.Errorf("%w: it is paused", sandbox.ErrNotReady)
	srv := serveHTTP2(t, n)
	for range 3 {
		body := strings.NewReader(strings.Repeat("x", 16<<20))
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, srv.URL+"/v1/sandboxes/s1/files?path=/x", body)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusConflict || resp.ProtoMajor != 2 {
			t.Errorf("%s over %s", resp.Status, resp.Proto)
		}
	}
}
