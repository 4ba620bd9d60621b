package api_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"quarry/api"
)

// A request that is refused has a body that nobody reads, and its client need not send it:
// it gets its answer all the same, and holds the connection no longer than who reads one.
func TestTheBodyOfARefusedRequestIsGivenUp(t *testing.T) {
	srv := serveLimited(t, 10, func(c *api.Config) {
		c.BodyTimeout = 50 * time.Millisecond
		c.V2 = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	})
	for line, want := range map[string]int{
		"POST /v1/nothing":              http.StatusNotFound,
		"DELETE /v1/chunks:batchGet":    http.StatusMethodNotAllowed,
		"POST /v2/a/blobs/uploads/":     http.StatusUnauthorized,
		"PUT /v2/a/manifests/v1":        http.StatusUnauthorized,
		"GET /v1/images/%2e%2e/tooeasy": http.StatusBadRequest,
	} {
		for _, length := range []string{"Content-Length: 1000000000", "Transfer-Encoding: chunked"} {
			conn := open(t, srv, fmt.Sprintf("%s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n3\r\nabc\r\n", line, length))
			r := bufio.NewReader(conn)
			resp, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Errorf("%s, %s: %v", line, length, err)
				continue
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != want {
				t.Errorf("%s, %s: %s, %v; want %d", line, length, resp.Status, err, want)
			}
			resp.Body.Close()
			if b, err := r.ReadByte(); err == nil || isTimeout(err) {
				t.Errorf("%s, %s: then %q, %v; want the end of the connection", line, length, b, err)
			}
		}
	}
}

func isTimeout(err error) bool {
	t, ok := err.(interface{ Timeout() bool })
	return ok && t.Timeout()
}
