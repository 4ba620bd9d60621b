package attach

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
)

// TestIsolatedThreadsServeTheRuntime lets collections, timers and the network
// poller run on isolated threads.
func TestIsolatedThreadsServeTheRuntime(t *testing.T) {
	need.Root(t)
	defer debug.SetGCPercent(debug.SetGCPercent(1))
	payload := make([]byte, 1000)
	stop := make(chan struct{})
	var ended []<-chan struct{}
	var conns []net.Conn
	start := func(fn func()) {
		done := make(chan struct{})
		ended = append(ended, done)
		go func() { // ends with stop
			defer close(done)
			for {
				select {
				case <-stop:
					return
				default:
					fn()
				}
			}
		}()
	}
	for range 3 {
		a, b := connect(t)
		conns = append(conns, a, b)
		start(func() { a.Write(payload) })
		start(func() { b.Read(make([]byte, 1000)) })
	}
	start(func() { runtime.GC(); time.Sleep(time.Millisecond) })
	start(func() { time.Sleep(100 * time.Microsecond) })
	n := 0
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); n++ {
		err := isolated(func() error {
			time.AfterFunc(time.Microsecond, func() {})
			if n%16 == 0 {
				runtime.GC()
			}
			if unix.Gettid() == unix.Getpid() {
				return fmt.Errorf("the main thread was isolated")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d isolated threads", n)
	close(stop)
	for _, c := range conns {
		c.Close()
	}
	for _, done := range ended {
		<-done
	}
}

func connect(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{a, b} {
		c.SetDeadline(time.Now().Add(30 * time.Second))
		t.Cleanup(func() { c.Close() })
	}
	return a, b
}

func TestIsolatedThreadHoldsNothingOfTheProcess(t *testing.T) {
	need.Root(t)
	l, err := TakeLock(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	connect(t)
	pipe, _, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fuse)
	var kept []string
	err = isolated(func() error {
		// Not by package os: testing logs what that opens, to a file that this thread
		// does not have.
		to := make([]byte, 256)
		for fd := range 1024 {
			if n, err := unix.Readlink(fmt.Sprintf("%s/%d", descriptorFolder, fd), to); err == nil {
				kept = append(kept, fmt.Sprintf("%d %s", fd, to[:n]))
			}
		}
		return nil
	})
	if err != nil || len(kept) == 0 {
		t.Fatalf("kept %q, %v", kept, err)
	}
	for _, fd := range kept {
		if !strings.HasPrefix(fd, "2 ") && !strings.HasSuffix(fd, "[eventpoll]") && !strings.HasSuffix(fd, "[eventfd]") {
			t.Errorf("an isolated thread holds %s", fd)
		}
	}
}
