package e2e_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"

	"github.com/rogpeppe/go-internal/testscript"
)

// metrics writes what the reader of a worker folder answers to GET /metrics to a
// file: metrics DIR FILE.
func metrics(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: metrics DIR FILE")
	}
	socket := filepath.Join(ts.MkAbs(args[0]), "reader.http")
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	c := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	resp, err := c.Get("http://reader/metrics")
	ts.Check(err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), text, 0o644))
}
