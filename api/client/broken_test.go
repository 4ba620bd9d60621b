package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"quarry/api"
	"quarry/api/client"
	"quarry/store/chunk"
)

// dropping serves a unix socket and drops the first connections unanswered, as
// a background server does that ends.
func dropping(t *testing.T, drops int32, h http.HandlerFunc) *client.Client {
	t.Helper()
	var seen atomic.Int32 // each connection has a goroutine of its own
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if seen.Add(1) <= drops {
			panic(http.ErrAbortHandler)
		}
		h(w, r)
	})}
	go srv.Serve(l) // ends with Close
	t.Cleanup(func() { srv.Close() })
	return connect(t, client.Config{Socket: socket, Attempts: 4})
}

func TestAJobIsSentAgainWhenItsServerEndedBeforeAnAnswer(t *testing.T) {
	result := func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"type":"result","result":{"name":"a:b","source":%q,"image_id":%q,"bootstrap":%q}}`, chunk.Sum(nil), chunk.Sum(nil), chunk.Sum(nil))
	}
	req := api.ConvertRequest{Source: "oci:x", Name: "a:b"}
	c := dropping(t, 1, result)
	if res, err := c.Convert(t.Context(), req, nil); err != nil || res.Name != "a:b" {
		t.Errorf("got %+v, error %v", res, err)
	}
	c = dropping(t, 2, result)
	_, err := c.Convert(t.Context(), req, nil)
	if err == nil || c.Stats().Requests != 2 || !strings.Contains(err.Error(), "ended the connection") {
		t.Errorf("dropped twice: %d requests, error %v", c.Stats().Requests, err)
	}
	c = dropping(t, 0, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, `{"type":"alive"}`)
		http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	if _, err := c.Convert(t.Context(), req, nil); err == nil || c.Stats().Requests != 1 {
		t.Errorf("a job that has begun: %d requests, error %v", c.Stats().Requests, err)
	}
}

func TestErrorsDoNotNameMadeUpAddresses(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "none")
	c := connect(t, client.Config{Socket: socket, Attempts: 1})
	_, err := c.Names(t.Context())
	if err == nil || strings.Contains(err.Error(), "http://quarry") || !strings.Contains(err.Error(), socket) {
		t.Errorf("no socket: error %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	l.Close()
	_, err = connect(t, client.Config{URL: url, Attempts: 1}).Names(t.Context())
	if !errors.Is(err, syscall.ECONNREFUSED) || !strings.HasPrefix(err.Error(), "store "+url+": ") {
		t.Errorf("no server: error %v", err)
	}
}

// dialer connects to an address that is looked up for each connection.
func dialer(addr func(context.Context) (string, error)) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		to, err := addr(ctx)
		if err != nil {
			return nil, err
		}
		return new(net.Dialer).DialContext(ctx, network, to)
	}
}
