package sandboxes_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"quarry/api/sandboxes"
)

// limited is a server of three connections, whose /wait answers when go is closed.
type limited struct {
	*testing.T
	*httptest.Server
	secure bool
	waits  chan struct{} // one for each request that waits
	idle   chan struct{} // one for each time that a connection is noted to be idle
	leave  chan struct{}
}

func newLimited(t *testing.T, secure bool) *limited {
	t.Helper()
	s := &limited{T: t, secure: secure, waits: make(chan struct{}, 10), idle: make(chan struct{}, 100), leave: make(chan struct{})}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			s.waits <- struct{}{}
			select {
			case <-s.leave:
			case <-r.Context().Done():
			}
		}
		io.WriteString(w, "here")
	}))
	s.Listener = sandboxes.Limit(s.Listener, s.Config, 3)
	note := s.Config.ConnState
	s.Config.ConnState = func(c net.Conn, state http.ConnState) {
		note(c, state)
		if state == http.StateIdle {
			s.idle <- struct{}{}
		}
	}
	if secure {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

// caller is a connection that is kept.
type caller struct {
	*limited
	net.Conn
	from *bufio.Reader
}

func (s *limited) dial() *caller {
	s.Helper()
	c, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		s.Fatal(err)
	}
	if s.secure {
		c = tls.Client(c, &tls.Config{InsecureSkipVerify: true})
	}
	s.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	return &caller{s, c, bufio.NewReader(c)}
}

func (c *caller) ask(path string) {
	c.Helper()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: s\r\n\r\n", path); err != nil {
		c.Fatal(err)
	}
}

func (c *caller) answered() {
	c.Helper()
	resp, err := http.ReadResponse(c.from, nil)
	if err != nil {
		c.Fatal(err)
	}
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "here" {
		c.Fatalf("%q, %v", body, err)
	}
}

func (c *caller) call(path string) *caller {
	c.Helper()
	c.ask(path)
	c.answered()
	<-c.idle
	return c
}

// One that comes when all connections are taken has the place of the one that has been
// idle for longest; requests that run, and what was idle for less long, stay.
func TestWhoComesHasThePlaceOfOneThatIsIdle(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "TLS": true} {
		t.Run(name, func(t *testing.T) {
			s := newLimited(t, secure)
			runs := s.dial()
			runs.ask("/wait")
			<-s.waits
			first, second := s.dial().call("/"), s.dial().call("/")
			first.call("/") // so that the second one is idle for longer
			third := s.dial().call("/")
			if n, err := second.from.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("the one that was idle for longest: %d, %v", n, err)
			}
			first.call("/")
			third.call("/")
			close(s.leave)
			runs.answered()
		})
	}
}

// Who connects and says nothing keeps nobody out.
func TestWhoComesHasThePlaceOfOneThatIsSilent(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "TLS": true} {
		t.Run(name, func(t *testing.T) {
			s := newLimited(t, secure)
			silent, err := net.Dial("tcp", s.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer silent.Close()
			second, third := s.dial(), s.dial()
			s.dial().call("/")
			silent.SetDeadline(time.Now().Add(time.Minute))
			if n, err := silent.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("the one that was silent for longest: %d, %v", n, err)
			}
			second.call("/")
			third.call("/")
		})
	}
}

// fill has a request wait on each connection that there may be.
func (s *limited) fill() (run []*caller) {
	for range 3 {
		c := s.dial()
		c.ask("/wait")
		<-s.waits
		run = append(run, c)
	}
	return run
}

// Where all have requests, one more waits for the end of one of them.
func TestWhoComesWaitsForRequestsThatRun(t *testing.T) {
	s := newLimited(t, false)
	run := s.fill()
	more := s.dial()
	more.ask("/wait")
	select {
	case <-s.waits:
		t.Error("a fourth connection is served")
	case <-time.After(50 * time.Millisecond): // not too soon, as far as that can be seen
	}
	run[1].Close()
	close(s.leave)
	<-s.waits
	more.answered()
	run[0].answered()
	run[2].answered()
}

// A server ends while one waits.
func TestAServerEndsThatIsFull(t *testing.T) {
	s := newLimited(t, false)
	run := s.fill()
	more := s.dial()
	more.ask("/")
	ended := make(chan error, 1)
	go func() { ended <- s.Config.Shutdown(context.Background()) }() // ends with the requests
	if _, err := more.from.ReadByte(); err == nil {
		t.Error("one that waited is answered by a server that has ended")
	}
	close(s.leave)
	for _, c := range run {
		c.answered()
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
