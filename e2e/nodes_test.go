package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"

	"github.com/rogpeppe/go-internal/testscript"

	"quarry/store/bucket/s3/s3test"
)

// startNode runs quarry serve on the data folder $B/NAME beside other nodes, and does not
// wait for it: node NAME [FLAG…]. NAME.out, NAME.log and NAME.pid are what it says and
// its number, and NAME.exit is there, with its exit code, when it has ended.
func startNode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: node NAME [FLAG…]")
	}
	path := func(kind string) string { return ts.MkAbs(args[0] + kind) }
	os.Remove(path(".exit"))
	out, err := os.Create(path(".out"))
	ts.Check(err)
	defer out.Close()
	log, err := os.Create(path(".log"))
	ts.Check(err)
	defer log.Close()
	flags := append([]string{"serve", "--data", filepath.Join(ts.Getenv("B"), args[0]), "--listen", "127.0.0.1:0", "--no-auth"}, args[1:]...)
	cmd := exec.Command(filepath.Join(os.Getenv("QUARRY_BIN"), "quarry"), flags...)
	cmd.Stdout, cmd.Stderr = out, log
	if storyOf(ts).s3 != nil {
		cmd.Env = append(os.Environ(), s3test.Env()...)
	}
	ts.Check(cmd.Start())
	ended := make(chan struct{})
	go func() { // ends with the process, which the story ends
		defer close(ended)
		cmd.Wait()
		os.WriteFile(path(".exit"), []byte(strconv.Itoa(cmd.ProcessState.ExitCode())+"\n"), 0o644)
	}()
	ts.Defer(func() {
		cmd.Process.Kill()
		<-ended
	})
	ts.Check(os.WriteFile(path(".pid"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o644))
}

var listening = regexp.MustCompile(`listening on (\S+)\n`)

// serving waits until nodes serve, and sets URL_NAME for each to where:
// serving NAME….
func serving(ts *testscript.TestScript, neg bool, args []string) {
	for _, name := range args {
		waitFor(ts, false, []string{name + ".out", "listening on"})
		raw, err := os.ReadFile(ts.MkAbs(name + ".out"))
		ts.Check(err)
		m := listening.FindSubmatch(raw)
		if neg || m == nil {
			ts.Fatalf("serving %s: it says %q", name, raw)
		}
		ts.Setenv("URL_"+name, string(m[1]))
	}
}
