package api_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/chunk"
)

// serveLimited is apitest's Serve with a limit of connections.
func serveLimited(t *testing.T, limit int, change func(*api.Config)) *httptest.Server {
	t.Helper()
	w := apitest.New(t)
	cfg := api.Config{Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket}
	if change != nil {
		change(&cfg)
	}
	h := api.NewHandler(cfg)
	srv := httptest.NewUnstartedServer(h)
	srv.Config = api.NewServer(h)
	srv.Listener = h.Listen(srv.Listener, limit)
	srv.Start()
	t.Cleanup(srv.Close)
	return srv
}

// open connects and sends what is given.
func open(t *testing.T, srv *httptest.Server, request string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil { // of a test that hangs
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	return conn
}

// read reads one answer of a connection.
func read(t *testing.T, conn net.Conn) answer {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	p, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp, p}
}

const health = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"

// metricsOf asks over a connection that is there already.
func metricsOf(t *testing.T, conn net.Conn) string {
	t.Helper()
	if _, err := io.WriteString(conn, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return string(read(t, conn).body)
}

// waitMetric waits until a line is among the metrics.
func waitMetric(t *testing.T, conn net.Conn, line string) {
	t.Helper()
	var got string
	for range 6000 { // a minute and more
		if got = metricsOf(t, conn); strings.Contains(got, line+"\n") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("metrics have no line %q: %s", line, got)
}

func TestOneConnectionTooManyIsToldSo(t *testing.T) {
	srv := serveLimited(t, 2, nil)
	first, second := open(t, srv, health), open(t, srv, health)
	if a := read(t, first); a.StatusCode != 200 {
		t.Fatalf("first connection: %s", a.Status)
	}
	if a := read(t, second); a.StatusCode != 200 {
		t.Fatalf("second connection: %s", a.Status)
	}
	a := read(t, open(t, srv, health))
	wantError(t, a, 503, "too_many_connections")
	if a.Header.Get("Retry-After") == "" || !a.Close {
		t.Errorf("headers %v, want Retry-After and Connection: close", a.Header)
	}
	waitMetric(t, first, "quarry_api_connections 2")
	waitMetric(t, first, `quarry_api_refusals_total{reason="too_many_connections"} 1`)

	second.Close()
	waitMetric(t, first, "quarry_api_connections 1")
	if a := read(t, open(t, srv, health)); a.StatusCode != 200 {
		t.Errorf("a connection after another went: %s", a.Status)
	}
}

// What is refused has a bound too: connections that do not even ask are closed.
func TestConnectionsThatSayNothingAreClosedBeyondTheLimit(t *testing.T) {
	srv := serveLimited(t, 1, nil)
	first := open(t, srv, health)
	read(t, first)
	for range 64 { // maxRefusing
		open(t, srv, "")
	}
	if n, err := open(t, srv, "").Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes, want a closed connection", n)
	}
	waitMetric(t, first, `quarry_api_refusals_total{reason="too_many_connections"} 1`)
}

func TestAThousandIdleConnectionsCostLittle(t *testing.T) {
	const conns = 1000
	srv := serveLimited(t, conns+1, nil)
	first := open(t, srv, health)
	read(t, first)
	before := memory()
	for range conns {
		read(t, open(t, srv, health))
	}
	waitMetric(t, first, fmt.Sprintf("quarry_api_connections %d", conns+1))
	each := (memory() - before) / conns
	t.Logf("%d bytes a connection, both ends", each)
	if each > 128<<10 {
		t.Errorf("an idle connection has %d bytes, want at most 128 KiB", each)
	}
}

// memory is what this process has in use.
func memory() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

func TestASlowRequestBodyIsGivenUp(t *testing.T) {
	srv := serveLimited(t, 10, func(c *api.Config) { c.BodyTimeout = 50 * time.Millisecond })
	a := read(t, open(t, srv, "POST /v1/chunks:batchGet HTTP/1.1\r\nHost: x\r\nContent-Type: "+api.TypeDigests+"\r\nContent-Length: 64\r\n\r\nabc"))
	wantError(t, a, 408, "slow_body")
	if a.Header.Get("Retry-After") == "" {
		t.Errorf("headers %v, want Retry-After", a.Header)
	}
	waitMetric(t, open(t, srv, ""), `quarry_api_refusals_total{reason="slow_body"} 1`)
}

func TestAFloodOfHeadersIsRefused(t *testing.T) {
	srv := serveLimited(t, 10, nil)
	line := "X-Flood: " + strings.Repeat("x", 1000) + "\r\n"
	conn := open(t, srv, "GET /healthz HTTP/1.1\r\nHost: x\r\n"+strings.Repeat(line, 40)+"\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("got %s, want 431", resp.Status)
	}
	waitMetric(t, open(t, srv, ""), `quarry_api_refusals_total{reason="bad_request_head"} 1`)
}

// Whatever is refused is counted, by the code that the client got.
func TestRefusalsAreCountedByReason(t *testing.T) {
	srv := serveLimited(t, 100, nil)
	many := api.EncodeDigests(make([]chunk.Digest, api.MaxBatch+1))
	huge := bytes.Repeat([]byte{0}, 1<<20)
	post := func(kind string, body []byte) string {
		return fmt.Sprintf("POST /v1/chunks:batchGet HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", kind, len(body), body)
	}
	for _, c := range []struct {
		name, request string
		status        int
		code          string
	}{
		{"too many digests", post(api.TypeDigests, many), 413, "too_many_digests"},
		{"a huge body", post(api.TypeDigests, huge), 413, "too_large"},
		{"half a digest", post(api.TypeDigests, huge[:33]), 400, "bad_request"},
		{"a digest that is none", "GET /v1/chunks/sha256:xyz HTTP/1.1\r\nHost: x\r\n\r\n", 400, "bad_request"},
		{"dots in a path", "GET /v1/chunks/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 400, "bad_request"},
		{"an escaped slash", "GET /v1/images/a%2fb HTTP/1.1\r\nHost: x\r\n\r\n", 400, "bad_request"},
		{"a path that is none", "GET /passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404, "no_route"},
	} {
		t.Run(c.name, func(t *testing.T) { wantError(t, read(t, open(t, srv, c.request)), c.status, c.code) })
	}
	conn := open(t, srv, "")
	for line, n := range map[string]int{"too_many_digests": 1, "too_large": 1, "bad_request": 4, "no_route": 1} {
		waitMetric(t, conn, fmt.Sprintf("quarry_api_refusals_total{reason=%q} %d", line, n))
	}
}

// Where the store keeps its files is the business of its machine alone.
func TestErrorsHaveNoPathsOfTheServer(t *testing.T) {
	for _, test := range []struct {
		err    syscall.Errno
		status int
		code   string
	}{{syscall.ENOSPC, 507, "disk_full"}, {syscall.EIO, 500, "internal"}} {
		h := api.NewHandler(api.Config{Local: true, Stats: func(context.Context) (api.StoreStats, error) {
			return api.StoreStats{}, &fs.PathError{Op: "write", Path: "/srv/quarry/index", Err: test.err}
		}})
		for local, want := range map[bool]bool{true: true, false: false} {
			w := httptest.NewRecorder()
			h.WithLocal(local).ServeHTTP(w, httptest.NewRequest("GET", "/v1/stats", nil))
			body := w.Body.String()
			if w.Code != test.status || !strings.Contains(body, test.code) || strings.Contains(body, "/srv/") != want {
				t.Errorf("%v, local %t: got %d %s", test.err, local, w.Code, body)
			}
		}
	}
}
