package client_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

// raw sends a head and then all of a body, as clients do that look for no answer
// before, and returns the status of what is answered.
func raw(t *testing.T, url, head string, body io.Reader) (int, error) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, head+"\r\n\r\n"); err != nil {
		return 0, err
	}
	if _, err := io.Copy(conn, body); err != nil {
		return 0, fmt.Errorf("send the body: %w", err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, fmt.Errorf("read the answer: %w", err)
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// A client that sends all of a large body before it reads sees why it is refused,
// whichever way: by its token, its route, or the sandbox.
func TestARefusedUploadIsToldWhy(t *testing.T) {
	n := newFake()
	n.err = fmt.Errorf("%w: it is paused", sandbox.ErrNotReady)
	url := serve(t, n)
	const size = 64 << 20
	for want, request := range map[int]string{
		http.StatusConflict:  "PUT /v1/sandboxes/s1/files?path=/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer run",
		http.StatusForbidden: "PUT /v1/sandboxes/s1/files?path=/x HTTP/1.1\r\nHost: x",
		http.StatusNotFound:  "PUT /v2/none HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer run",
	} {
		got, err := raw(t, url, fmt.Sprintf("%s\r\nContent-Length: %d", request, size), strings.NewReader(strings.Repeat("x", size)))
		if err != nil || got != want {
			t.Errorf("%d for %s: %d, %v", want, request, got, err)
		}
	}
	chunks := strings.Repeat("8000\r\n"+strings.Repeat("x", 0x8000)+"\r\n", size>>15) + "0\r\n\r\n"
	got, err := raw(t, url, "PUT /v1/sandboxes/s1/files?path=/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer run\r\nTransfer-Encoding: chunked", strings.NewReader(chunks))
	if err != nil || got != http.StatusConflict {
		t.Errorf("in chunks: %d, %v", got, err)
	}
	// One that asks first is answered and not waited for.
	got, err = raw(t, url, fmt.Sprintf("PUT /v1/sandboxes/s1/files?path=/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer run\r\nExpect: 100-continue\r\nContent-Length: %d", size), strings.NewReader(""))
	if err != nil || got != http.StatusConflict {
		t.Errorf("asked first: %d, %v", got, err)
	}
}

// What is wrong with a body is its sender's fault, whatever reads it.
func TestABodyThatCannotBeReadIsItsSenders(t *testing.T) {
	url := serve(t, newFake())
	const head = " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer run\r\n"
	for name, tt := range map[string]struct {
		request, body string
		want          int
	}{
		"bad chunk":         {"PUT /v1/sandboxes/s/files?path=/x" + head + "Transfer-Encoding: chunked", "3\r\nabc\r\nzz\r\n", http.StatusBadRequest},
		"bad chunk of JSON": {"POST /v1/sandboxes" + head + "Transfer-Encoding: chunked", "zz\r\n", http.StatusBadRequest},
		"compressed":        {"PUT /v1/sandboxes/s/files?path=/x" + head + "Content-Encoding: gzip\r\nContent-Length: 1", "x", http.StatusUnsupportedMediaType},
		"named as it is":    {"PUT /v1/sandboxes/s/files?path=/x" + head + "Content-Encoding: identity\r\nContent-Length: 1", "x", http.StatusOK},
	} {
		if got, err := raw(t, url, tt.request, strings.NewReader(tt.body)); err != nil || got != tt.want {
			t.Errorf("%s: %d, %v, want %d", name, got, err, tt.want)
		}
	}
}

// A stream is not taken up behind what has come; it is where output was forgotten.
func TestAStreamBeginsWithinWhatHasCome(t *testing.T) {
	n := newFake()
	n.exec.ID = "e"
	n.print("hello", true)
	c := connect(t, n, "run")
	var none int64
	for from, want := range map[int64]error{5: nil, 6: sandbox.ErrInvalid} {
		if _, err := c.Follow(t.Context(), "s", "e", &from, &none, io.Discard, io.Discard); !errors.Is(err, want) {
			t.Errorf("from %d: %v", from, err)
		}
	}
	n.change(func() { n.exec.Stdout.Dropped, n.exec.Stdout.Kept = 5, 0 })
	at := int64(5)
	if _, err := c.Follow(t.Context(), "s", "e", &at, &none, io.Discard, io.Discard); err != nil {
		t.Errorf("behind what is forgotten: %v", err)
	}
}

// The message of a refusal has an end, whatever was asked.
func TestAMessageIsShort(t *testing.T) {
	n := newFake()
	n.err = fmt.Errorf("%w: %s: the reason", sandbox.ErrInvalid, strings.Repeat("x", 1<<20))
	_, err := connect(t, n, "run").Get(t.Context(), "s")
	if !errors.Is(err, sandbox.ErrInvalid) || len(err.Error()) > sandbox.MaxMessage || !strings.HasSuffix(err.Error(), "the reason") {
		t.Errorf("%d bytes: %.100s", len(fmt.Sprint(err)), err)
	}
}

// The client of quarry sends nothing of a large body that is not wanted.
func TestTheClientAsksBeforeALargeBody(t *testing.T) {
	n := newFake()
	patient := &http.Transport{ExpectContinueTimeout: time.Minute} // however slow the machine is
	t.Cleanup(patient.CloseIdleConnections)
	c, err := client.New(client.Config{URL: serve(t, n), Token: "run", HTTP: &http.Client{Transport: patient}})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int64{2 << 20, -1} {
		body := &counted{r: strings.NewReader(strings.Repeat("x", 2<<20))}
		if _, err := c.WriteFile(t.Context(), "s1", "/x", sandbox.WriteOptions{Size: size}, body); err != nil || body.n.Load() != 2<<20 {
			t.Errorf("size %d: %d bytes sent, %v", size, body.n.Load(), err)
		}
	}
	n.err = fmt.Errorf("%w: it is paused", sandbox.ErrNotReady)
	for _, size := range []int64{2 << 20, -1} {
		body := &counted{r: strings.NewReader(strings.Repeat("x", 2<<20))}
		if _, err := c.WriteFile(t.Context(), "s1", "/x", sandbox.WriteOptions{Size: size}, body); !errors.Is(err, sandbox.ErrNotReady) || body.n.Load() > 0 {
			t.Errorf("refused, size %d: %d bytes sent, %v", size, body.n.Load(), err)
		}
	}
}

type counted struct {
	r io.Reader
	n atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	return n, err
}
