package e2e_test

import (
	"context"
	"os"

	"github.com/rogpeppe/go-internal/testscript"

	"quarry/e2e/lab"
)

// metrics writes what the reader of a worker folder answers to GET /metrics to a
// file: metrics DIR FILE.
func metrics(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: metrics DIR FILE")
	}
	text, err := lab.ReaderMetrics(context.Background(), ts.MkAbs(args[0]))
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(text), 0o644))
}
