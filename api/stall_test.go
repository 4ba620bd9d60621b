package api_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/chunk"
)

// batchLine is a line of the log about a batch.
type batchLine struct {
	Level, Route string
	Status       int
}

// batchLines takes the output of a log, a line at a time, and hands on those about
// batches.
type batchLines chan batchLine

func (l batchLines) Write(p []byte) (int, error) {
	var line batchLine
	if json.Unmarshal(p, &line) == nil && line.Route == "batch_get" {
		l <- line
	}
	return len(p), nil
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
	log := make(batchLines, 10)
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.MaxReads, c.StallTimeout, c.QueueTimeout = 1, 300*time.Millisecond, time.Minute
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
	// It waits for the slot, which is free when the write to the first has timed out.
	if a := ask(t, "GET", srv.URL+"/v1/chunks/"+ds[0].String(), ""); a.StatusCode != 200 {
		t.Errorf("the other client: status %d", a.StatusCode)
	}
	if line := <-log; line.Level != "INFO" || line.Status != 499 {
		t.Errorf("logged as %+v, want INFO with status 499", line)
	}
}
