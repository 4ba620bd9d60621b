package nbd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"quarry/nbd"
)

// memory is a Device whose reads a test can hold back or fail.
type memory struct {
	data []byte
	gate func(ctx context.Context, off int64) error // called first when set
}

func (m *memory) Size() int64 { return int64(len(m.data)) }

func (m *memory) ReadAt(ctx context.Context, p []byte, off int64) error {
	if m.gate != nil {
		if err := m.gate(ctx, off); err != nil {
			return err
		}
	}
	copy(p, m.data[off:])
	return nil
}

// pattern fills n bytes so that every block differs.
func pattern(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i>>12) ^ byte(i*7)
	}
	return p
}

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// serve serves dev as the export "image" and returns the socket.
func serve(t testing.TB, dev nbd.Device, configure ...func(*nbd.Server)) string {
	t.Helper()
	sock := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	s := &nbd.Server{Exports: func(_ context.Context, name string) (nbd.Device, error) {
		if name != "image" {
			return nil, fmt.Errorf("%w: no image %q", nbd.ErrUnknownExport, name)
		}
		return dev, nil
	}}
	for _, f := range configure {
		f(s)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }() // ends with ctx, in the cleanup
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Serve: %v", err)
			}
		case <-time.After(time.Minute):
			t.Error("Serve did not return when its context ended")
		}
	})
	return sock
}

func dial(t testing.TB, sock string) *nbd.Client {
	t.Helper()
	c, err := nbd.Dial(testContext(t), "unix", sock, "image")
	if err != nil {
		t.Fatalf("Dial: %v", err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// readAt fills p.
func readAt(ctx context.Context, c *nbd.Client, p []byte, off int64) error {
	return c.View(ctx, off, len(p), func(got []byte) error {
		copy(p, got)
		return nil
	})
}

func TestClientReadsWhatTheServerHas(t *testing.T) {
	data := pattern(3 << 20)
	c := dial(t, serve(t, &memory{data: data}))
	if c.Size() != int64(len(data)) || c.Export() != "image" {
		t.Errorf("export %q of %d bytes, want image of %d", c.Export(), c.Size(), len(data))
	}
	for _, r := range [][2]int{{0, 1}, {1, 4095}, {4096, 4096}, {5, 131072}, {len(data) - 1, 1}, {0, len(data)}, {7, 0}, {len(data), 0}} {
		off, n := r[0], r[1]
		err := c.View(testContext(t), int64(off), n, func(p []byte) error {
			if !bytes.Equal(p, data[off:off+n]) {
				t.Errorf("view of %d at %d shows other bytes", n, off)
			}
			return nil
		})
		if err != nil {
			t.Errorf("view of %d at %d: %v", n, off, err)
		}
	}
	for _, r := range [][2]int64{{int64(len(data)), 1}, {-1, 1}, {0, int64(len(data)) + 1}, {1<<63 - 1, 1}} {
		if err := readAt(testContext(t), c, make([]byte, r[1]), r[0]); err == nil {
			t.Errorf("read of %d at %d succeeded", r[1], r[0])
		}
	}
}

func TestAReadIsNoLongerThanARequest(t *testing.T) {
	data := pattern(nbd.MaxPayload + 12288)
	c := dial(t, serve(t, &memory{data: data}))
	p := make([]byte, nbd.MaxPayload)
	if err := readAt(testContext(t), c, p, 12288); err != nil || !bytes.Equal(p, data[12288:]) {
		t.Errorf("the longest read: %v, or other bytes", err)
	}
	if err := readAt(testContext(t), c, make([]byte, len(p)+1), 0); err == nil {
		t.Error("a read longer than a request succeeded")
	}
}

func TestUnknownExportIsTyped(t *testing.T) {
	sock := serve(t, &memory{data: pattern(4096)})
	_, err := nbd.Dial(testContext(t), "unix", sock, "other")
	var refused *nbd.RefusedError
	if !errors.Is(err, nbd.ErrUnknownExport) || !errors.As(err, &refused) || !strings.Contains(refused.Message, `"other"`) {
		t.Errorf("got %v, want ErrUnknownExport with the server's words", err)
	}
}

func TestReadErrorIsTypedAndTheConnectionLives(t *testing.T) {
	data := pattern(1 << 20)
	c := dial(t, serve(t, &memory{data: data, gate: func(_ context.Context, off int64) error {
		if off == 4096 {
			return errors.New("chunk is damaged")
		}
		return nil
	}}))
	err := readAt(testContext(t), c, make([]byte, 10), 4096)
	var reply *nbd.ReplyError
	if !errors.As(err, &reply) || !errors.Is(err, syscall.EIO) {
		t.Errorf("got %v, want a ReplyError of EIO", err)
	}
	p := make([]byte, 10)
	if err := readAt(testContext(t), c, p, 0); err != nil || !bytes.Equal(p, data[:10]) {
		t.Errorf("read after an error: %v, or other bytes", err)
	}
}

func TestRepliesComeInAnyOrder(t *testing.T) {
	const readers = 200
	data := pattern(readers * 4096)
	arrived := make(chan struct{}, readers)
	release := make(chan struct{})
	c := dial(t, serve(t, &memory{data: data, gate: func(context.Context, int64) error {
		arrived <- struct{}{}
		<-release
		return nil
	}}))
	var wg sync.WaitGroup
	for i := range readers {
		wg.Go(func() {
			p := make([]byte, 4096)
			if err := readAt(testContext(t), c, p, int64(i)*4096); err != nil || !bytes.Equal(p, data[i*4096:][:4096]) {
				t.Errorf("reader %d: %v, or other bytes", i, err)
			}
		})
	}
	for range readers { // all are in flight at once
		<-arrived
	}
	close(release)
	wg.Wait()
}

func TestCancelledReadLeavesOthersWorking(t *testing.T) {
	data := pattern(1 << 20)
	release := make(chan struct{})
	c := dial(t, serve(t, &memory{data: data, gate: func(_ context.Context, off int64) error {
		if off == 0 {
			<-release
		}
		return nil
	}}))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := readAt(ctx, c, make([]byte, 4096), 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stalled read: got %v, want its deadline", err)
	}
	close(release) // its late reply must not disturb the next ones
	for off := int64(4096); off < 1<<20; off += 4096 {
		p := make([]byte, 4096)
		if err := readAt(testContext(t), c, p, off); err != nil || !bytes.Equal(p, data[off:off+4096]) {
			t.Fatalf("read at %d after a cancelled one: %v, or other bytes", off, err)
		}
	}
}

func TestLostConnectionFailsAllReadsTyped(t *testing.T) {
	const readers = 20
	arrived := make(chan struct{}, readers)
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	s := &nbd.Server{Exports: func(context.Context, string) (nbd.Device, error) {
		return &memory{data: pattern(1 << 20), gate: func(ctx context.Context, _ int64) error {
			arrived <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}}, nil
	}}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }() // ends with ctx, below
	c := dial(t, l.Addr().String())
	errs := make(chan error, readers)
	for range readers {
		go func() { errs <- readAt(testContext(t), c, make([]byte, 4096), 0) }() // ends with the connection
	}
	for range readers {
		<-arrived
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
	for range readers {
		var lost *nbd.ConnError
		if err := <-errs; !errors.As(err, &lost) {
			t.Errorf("got %v, want a ConnError", err)
		}
	}
	<-c.Done()
	var lost *nbd.ConnError
	if err := readAt(testContext(t), c, make([]byte, 1), 0); !errors.As(err, &lost) || !errors.As(c.Err(), &lost) {
		t.Errorf("read after the loss: got %v, want a ConnError", err)
	}
}

// TestInFlightBytesAreBounded holds every read back and counts how many the
// server takes on: 32 MiB of 1 MiB reads.
func TestInFlightBytesAreBounded(t *testing.T) {
	const size = 1 << 20
	release := make(chan struct{})
	var mu sync.Mutex
	inFlight, most := 0, 0
	dev := &memory{data: pattern(size), gate: func(context.Context, int64) error {
		mu.Lock()
		inFlight++
		most = max(most, inFlight)
		mu.Unlock()
		<-release
		mu.Lock()
		inFlight--
		mu.Unlock()
		return nil
	}}
	c := dial(t, serve(t, dev, func(s *nbd.Server) { s.InFlight = nbd.MaxPayload }))
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if err := c.View(testContext(t), 0, size, func([]byte) error { return nil }); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(200 * time.Millisecond)
	close(release)
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	if most > nbd.MaxPayload/size {
		t.Errorf("%d reads of 1 MiB were under way at once, want at most %d", most, nbd.MaxPayload/size)
	}
}

func TestClosedClientFailsItsReads(t *testing.T) {
	c := dial(t, serve(t, &memory{data: pattern(4096), gate: func(ctx context.Context, _ int64) error {
		<-ctx.Done()
		return ctx.Err()
	}}))
	errs := make(chan error, 1)
	go func() { errs <- readAt(testContext(t), c, make([]byte, 1), 0) }() // ends by Close
	time.Sleep(10 * time.Millisecond)
	c.Close()
	if err := <-errs; !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v, want net.ErrClosed", err)
	}
}

func TestConnectionsBeyondTheLimitAreClosed(t *testing.T) {
	sock := serve(t, &memory{data: pattern(4096)}, func(s *nbd.Server) { s.Conns = 1 })
	dial(t, sock)
	if _, err := nbd.Dial(testContext(t), "unix", sock, "image"); err == nil {
		t.Error("a second connection was served")
	}
}

func TestDialGivesUpWithItsContext(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // never accepts
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := nbd.Dial(ctx, "unix", l.Addr().String(), "image"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the deadline", err)
	}
}

// TestClientEndsAtALyingServer plays servers that break the protocol after a
// good handshake: each must end the connection, not the process.
func TestClientEndsAtALyingServer(t *testing.T) {
	for name, reply := range map[string]string{
		"another magic":      "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01",
		"an unknown cookie":  "\x67\x44\x66\x98\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x09",
		"a short payload":    "\x67\x44\x66\x98\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01abc",
		"nothing but an end": "",
	} {
		t.Run(name, func(t *testing.T) {
			sock := lyingServer(t, reply)
			c := dial(t, sock)
			err := readAt(testContext(t), c, make([]byte, 4096), 0)
			var lost *nbd.ConnError
			if !errors.As(err, &lost) {
				t.Errorf("got %v, want a ConnError", err)
			}
		})
	}
}

// lyingServer lets a real server do the handshake and answers the first request
// with raw bytes.
func lyingServer(t *testing.T, reply string) string {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	good := serve(t, &memory{data: pattern(4096)})
	go func() { // ends with the client's connection
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		up, err := net.Dial("unix", good)
		if err != nil {
			return
		}
		defer up.Close()
		go io.Copy(c, up) // ends when up is closed
		// flags 4, option header 16, data 4+5+2+4: then a request of 28
		io.CopyN(up, c, 4+16+15)
		io.CopyN(io.Discard, c, 28)
		io.WriteString(c, reply)
	}()
	return l.Addr().String()
}

func TestConnectionsAreCounted(t *testing.T) {
	counts := make(chan int, 4)
	sock := serve(t, &memory{data: pattern(4096)}, func(s *nbd.Server) { s.Connected = func(delta int) { counts <- delta } })
	first, second := dial(t, sock), dial(t, sock)
	for _, c := range []*nbd.Client{first, second} {
		if err := readAt(t.Context(), c, make([]byte, 4096), 0); err != nil {
			t.Fatal(err)
		}
		if n := <-counts; n != 1 {
			t.Fatalf("counted %d for a connection that is used", n)
		}
	}
	select {
	case n := <-counts:
		t.Fatalf("counted %d while both connections stand", n)
	default:
	}
	first.Close()
	if n := <-counts; n != -1 {
		t.Fatalf("counted %d for one that is closed", n)
	}
}
