package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/e2e/lab/proxy"
)

func TestRecordedExchanges(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/missing" {
			w.WriteHeader(http.StatusNotFound)
		}
		for i := range 3 { // of unknown length
			fmt.Fprintf(w, "%s%d ", p, i)
			w.(http.Flusher).Flush()
		}
	}))
	defer server.Close()
	p, err := proxy.New(proxy.Config{Target: server.Listener.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	client := &http.Client{Transport: &http.Transport{}}
	post := func(path, body string) {
		t.Helper()
		res, err := client.Post(p.URL()+path, "text/plain", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	post("/before", "x")
	client.CloseIdleConnections() // Record is for connections that come after it
	p.Record()
	post("/a", "ask")
	post("/missing", "")
	got, err := p.Exchanges()
	if err != nil {
		t.Fatal(err)
	}
	want := []proxy.Exchange{
		{Method: "POST", Path: "/a", Status: 200, Request: []byte("ask"), Answer: []byte("ask0 ask1 ask2 ")},
		{Method: "POST", Path: "/missing", Status: 404, Request: []byte{}, Answer: []byte("0 1 2 ")},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	client.CloseIdleConnections()
	post("/after", "x")
	if got, err := p.Exchanges(); len(got) > 0 || err != nil {
		t.Errorf("after the end of the record: %v, %v", got, err)
	}
}
