package e2e_test

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"

	"quarry/store/bucket/s3/s3test"
)

// s3Server starts an S3 server: s3server. s3server stop kills it, and s3server start
// has it back, with all that it has. S3 becomes the URL of a new bucket of it, S3FOLDER
// the folder that the bucket is in, and FAULTY the URL of another bucket behind a
// proxy at which every sixth request goes wrong.
func s3Server(ts *testscript.TestScript, neg bool, args []string) {
	if old := storyOf(ts).s3; len(args) == 1 && old != nil && !neg {
		switch args[0] {
		case "stop":
			old.Stop()
			return
		case "start":
			ts.Check(old.Start())
			return
		}
	}
	if neg || len(args) != 0 {
		ts.Fatalf("usage: s3server [stop|start]")
	}
	program, err := exec.LookPath("versitygw")
	ts.Check(err)
	root, err := os.MkdirTemp("", "s3")
	ts.Check(err)
	ts.Defer(func() { os.RemoveAll(root) })
	server, err := s3test.Start(program, root)
	ts.Check(err)
	ts.Defer(server.Stop)
	proxy, end, err := s3test.StartProxy(server.URL)
	ts.Check(err)
	ts.Defer(end)
	proxy.Rule(s3test.Every(6, s3test.SlowDown, s3test.Reset, s3test.ResetApplied, s3test.FailApplied,
		s3test.ErrorIn200, s3test.ErrorIn200Applied, s3test.Truncate))
	bucketURL := func(endpoint string) (at, folder string) {
		name, err := server.NewBucket()
		ts.Check(err)
		return fmt.Sprintf("s3://%s?endpoint=%s", name, url.QueryEscape(endpoint)), server.Folder(name)
	}
	at, folder := bucketURL(server.URL)
	ts.Setenv("S3", at)
	ts.Setenv("S3FOLDER", folder)
	at, _ = bucketURL(proxy.URL)
	ts.Setenv("FAULTY", at)
	for _, v := range s3test.Env() {
		name, value, _ := strings.Cut(v, "=")
		ts.Setenv(name, value)
	}
	storyOf(ts).s3 = server
}
