package api_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/chunk"
)

// logLines is the output of a log, for tests that wait for it.
type logLines struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// batch returns the line about a batch, once there is one.
func (l *logLines) batch() (line struct {
	Level, Route string
	Status       int
}, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for raw := range bytes.Lines(l.buf.Bytes()) {
		if json.Unmarshal(raw, &line) == nil && line.Route == "batch_get" {
			return line, true
		}
	}
	return line, false
}

// Clients that ask and do not read must not keep the others out, and are no
// fault of the server.
func TestAClientThatDoesNotReadLosesItsSlot(t *testing.T) {
	w := apitest.New(t)
	var ds []chunk.Digest
	random := rand.NewChaCha8([32]byte{})
	for range 64 { // 16 MiB: more than the socket buffers take
		p := make([]byte, chunk.DefaultSize)
		random.Read(p)
		ds = append(ds, w.PutChunk(t, p))
	}
	log := &logLines{}
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.MaxReads, c.StallTimeout, c.QueueTimeout = 1, 300*time.Millisecond, 10*time.Second
		c.Log = slog.New(slog.NewJSONHandler(log, nil))
	})
	conn, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := api.EncodeDigests(ds)
	fmt.Fprintf(conn, "POST /v1/chunks:batchGet HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", api.TypeDigests, len(body), body)
	one := make([]byte, 1)
	if _, err := conn.Read(one); err != nil { // it has the slot
		t.Fatal(err)
	}
	start := time.Now()
	if a := ask(t, "GET", srv.URL+"/v1/chunks/"+ds[0].String(), ""); a.StatusCode != 200 {
		t.Errorf("the other client: status %d", a.StatusCode)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("the other client waited %v", took)
	}
	for range 100 {
		if line, ok := log.batch(); ok {
			if line.Level != "INFO" || line.Status != 499 {
				t.Errorf("logged as %+v, want INFO with status 499", line)
			}
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the stalled request was not logged")
}
