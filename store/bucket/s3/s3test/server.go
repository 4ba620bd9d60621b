// Package s3test offers a real S3 server to tests, and the faults of a network
// and of other servers in front of it.
package s3test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
)

const (
	accessKey = "quarry-test"
	// Secret is the secret key of all servers of tests: nothing may ever print it.
	Secret = "s3test-secret-Aeph7oo"
	region = "us-east-1"
	// startTime bounds the start of a server, which takes a third of a second.
	startTime = 30 * time.Second
)

// Env is what a program needs to speak to a server of this package.
func Env() []string {
	return []string{
		"AWS_ACCESS_KEY_ID=" + accessKey, "AWS_SECRET_ACCESS_KEY=" + Secret, "AWS_EC2_METADATA_DISABLED=true",
		"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null", "AWS_REGION=", "AWS_PROFILE=", "AWS_SESSION_TOKEN=",
	}
}

// Server is versitygw over a folder of its own.
type Server struct {
	// URL is its endpoint, the same after a Stop and a Start.
	URL  string
	path string
	root string
	addr string
	log  *output
	cmd  *exec.Cmd
	made atomic.Int64 // buckets
}

// New starts a server that ends with the test, and gives this process its
// credentials.
func New(t testing.TB) *Server {
	t.Helper()
	for _, v := range Env() {
		name, value, _ := strings.Cut(v, "=")
		t.Setenv(name, value)
	}
	s, err := Start(need.Tool(t, "versitygw"), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// Start starts the program at path, which keeps its buckets in the folder root.
func Start(path, root string) (*Server, error) {
	var err error
	for range 5 { // another process may take the port that was free
		var l net.Listener
		if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return nil, err
		}
		s := &Server{path: path, root: root, addr: l.Addr().String(), URL: "http://" + l.Addr().String()}
		l.Close()
		if err = s.Start(); err == nil {
			return s, nil
		}
	}
	return nil, err
}

// Start starts a server again that was stopped.
func (s *Server) Start() error {
	s.log = &output{}
	s.cmd = exec.Command(s.path, "--quiet", "--access", accessKey, "--secret", Secret, "--region", region, "--port", s.addr, "posix", s.root)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return err
	}
	for end := time.Now().Add(startTime); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if conn, err := net.Dial("tcp", s.addr); err == nil {
			conn.Close()
			return nil
		}
		if err := s.cmd.Process.Signal(syscall.Signal(0)); errors.Is(err, os.ErrProcessDone) {
			break
		}
	}
	s.Stop()
	return fmt.Errorf("versitygw does not listen on %s: %s", s.addr, s.log)
}

// Stop kills the server; what it stored stays.
func (s *Server) Stop() {
	if s.cmd != nil {
		s.cmd.Process.Kill()
		s.cmd.Wait()
		s.cmd = nil
	}
}

// Bucket makes a new bucket and returns its name.
func (s *Server) Bucket(t testing.TB) string {
	t.Helper()
	name, err := s.NewBucket()
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// NewBucket is Bucket for callers that have no test.
func (s *Server) NewBucket() (string, error) {
	name := fmt.Sprintf("bucket-%d", s.made.Add(1))
	return name, os.Mkdir(s.Folder(name), 0o700)
}

// Folder returns where the server has the objects of a bucket.
func (s *Server) Folder(bucket string) string { return filepath.Join(s.root, bucket) }

// output is what a server printed.
type output struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}
