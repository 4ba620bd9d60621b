package sentry

import (
	"context"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// FuzzAnswer lets a Sentry answer any bytes: every call ends, and takes no more than
// it may.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte(`{"success":true,"err":"","result":7}`))
	f.Add([]byte(`{"success":false,"err":"no such process","result":null}`))
	f.Add([]byte(`{"success":true,"err":"","result":[{"uid":0,"pid":1,"ppid":0,"pgid":1,"threads":[1],"c":0,"tty":"?","stime":"21:09","time":"0s","cmd":"x"}]}`))
	f.Add([]byte(`{"success":true,"err":"","result":{"event":{"type":"stats","id":"x","data":{"memory":{"usage":{"usage":1}}}},"containerUsage":{"x":1}}}`))
	f.Add([]byte(`{"success":true}{"success":true}`))
	f.Add([]byte(`[[[[`))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, call := range []func(context.Context, *Client) error{
			func(ctx context.Context, c *Client) error {
				_, err := c.Execute(ctx, Exec{Argv: []string{"x"}})
				return err
			},
			func(ctx context.Context, c *Client) error { _, err := c.Processes(ctx); return err },
			func(ctx context.Context, c *Client) error { _, err := c.Usage(ctx); return err },
			func(ctx context.Context, c *Client) error { _, err := c.MemoryFile(ctx); return err },
			func(ctx context.Context, c *Client) error { _, err := c.WaitPID(ctx, 1); return err },
		} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			err := call(ctx, answering(t, b))
			cancel()
			if ctx.Err() == context.DeadlineExceeded {
				t.Errorf("a call ended by its time: %v", err)
			}
		}
	})
}

// answering returns a client whose Sentry says so and goes.
func answering(t *testing.T, b []byte) *Client {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
	}
	go func() {
		ends[0].Write(b)
		ends[0].Close()
	}()
	return &Client{container: "x", idle: []*conn{{c: ends[1]}}, closed: true}
}

// A Sentry that is slow to accept is waited for: its queue is short.
func TestAFullQueue(t *testing.T) {
	path := t.TempDir() + "/socket"
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 1); err != nil {
		t.Fatal(err)
	}
	const callers = 8
	dialled := make(chan error, callers)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range callers {
		go func() {
			c, err := Dial(ctx, path)
			if err == nil {
				defer c.Close()
			}
			dialled <- err
		}()
	}
	time.Sleep(20 * time.Millisecond)
	for range callers {
		c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(c)
	}
	for range callers {
		if err := <-dialled; err != nil {
			t.Error(err)
		}
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	for range 3 {
		if _, err = Dial(short, path); err != nil {
			break
		}
	}
	if err == nil {
		t.Error("a queue that stays full takes all")
	}
}
