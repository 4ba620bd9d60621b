package nbd_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"quarry/nbd"
)

// ready is a memory that has its bytes at hand, but for those at a held offset.
type ready struct {
	*memory
	held int64
}

// TryReadAt implements nbd.ReadyDevice.
func (r ready) TryReadAt(p []byte, off int64) bool {
	if off == r.held {
		return false
	}
	copy(p, r.data[off:])
	return true
}

func TestStartedReadsEndOnce(t *testing.T) {
	const calls, size = 10_000, 512
	data := pattern(calls * size)
	c := dial(t, serve(t, ready{&memory{data: data}, -1}))
	var ended sync.WaitGroup
	for i := range calls {
		ended.Add(1)
		k := &nbd.Call{Off: int64(i) * size, N: size}
		k.End = func(p []byte, err error) {
			if err != nil || !bytes.Equal(p, data[k.Off:][:k.N]) {
				t.Errorf("call %d: %v, or other bytes", i, err)
			}
			ended.Done()
		}
		c.Start(k)
	}
	ended.Wait()
}

// TestACallIsStartedAgainByItsEnd keeps one call going: the client is done with it
// when End is called.
func TestACallIsStartedAgainByItsEnd(t *testing.T) {
	data := pattern(1 << 20)
	c := dial(t, serve(t, ready{&memory{data: data}, -1}))
	done := make(chan error, 1)
	k := &nbd.Call{N: 1000}
	k.End = func(p []byte, err error) {
		switch {
		case err != nil:
			done <- err
		case !bytes.Equal(p, data[k.Off:][:k.N]):
			done <- errors.New("other bytes")
		case k.Off > 900_000:
			done <- nil
		default:
			// Lengths on both sides of the receive buffer.
			k.Off, k.N = k.Off+997, (k.N*7)%40_000+1
			c.Start(k)
		}
	}
	c.Start(k)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestAReadThatWaitsHoldsUpNoReadyOne(t *testing.T) {
	data := pattern(1 << 20)
	release := make(chan struct{})
	c := dial(t, serve(t, ready{&memory{data: data, gate: func(context.Context, int64) error {
		<-release
		return nil
	}}, 4096}))
	held := make(chan error, 1)
	go func() { held <- readAt(testContext(t), c, make([]byte, 10), 4096) }() // ends by release
	for off := int64(8192); off < 1<<20; off += 4096 {
		p := make([]byte, 4096)
		if err := readAt(testContext(t), c, p, off); err != nil || !bytes.Equal(p, data[off:off+4096]) {
			t.Fatalf("read at %d: %v, or other bytes", off, err)
		}
	}
	close(release)
	if err := <-held; err != nil {
		t.Error(err)
	}
}

func TestAbandonedCallDoesNotEnd(t *testing.T) {
	reached, release := make(chan struct{}), make(chan struct{})
	c := dial(t, serve(t, &memory{data: pattern(1 << 20), gate: func(_ context.Context, off int64) error {
		if off == 0 {
			close(reached)
			<-release
		}
		return nil
	}}))
	k := &nbd.Call{N: 4096, End: func([]byte, error) { t.Error("an abandoned call ended") }}
	c.Start(k)
	<-reached
	if !c.Abandon(k) {
		t.Error("a call that waits cannot be abandoned")
	}
	if c.Abandon(k) {
		t.Error("a call was abandoned twice")
	}
	close(release)
	// Its reply comes before the next one's, or after it; neither is disturbed.
	for range 10 {
		if err := readAt(testContext(t), c, make([]byte, 4096), 4096); err != nil {
			t.Fatal(err)
		}
	}
}

// TestServerThatTakesNoRequests accepts, shakes hands, and reads nothing more:
// starting a read must not wait for it.
func TestServerThatTakesNoRequests(t *testing.T) {
	c := dial(t, deafServer(t))
	ends := make(chan error, 1<<16)
	for range cap(ends) {
		c.Start(&nbd.Call{N: 1, End: func(_ []byte, err error) { ends <- err }})
	}
	if n := len(ends); n > 0 {
		t.Errorf("%d reads ended without a server", n)
	}
	c.Close()
	for range cap(ends) {
		if err := <-ends; !errors.Is(err, net.ErrClosed) {
			t.Fatalf("got %v, want net.ErrClosed", err)
		}
	}
}

// deafServer lets a real server do the handshake, and then does nothing until the
// client leaves.
func deafServer(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	good := serve(t, &memory{data: pattern(4096)})
	ended := make(chan struct{})
	var work sync.WaitGroup
	t.Cleanup(func() {
		close(ended)
		l.Close()
		work.Wait()
	})
	work.Go(func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		up, err := net.Dial("unix", good)
		if err != nil {
			t.Error(err)
			return
		}
		defer up.Close()
		work.Go(func() { io.Copy(c, up) })
		io.CopyN(up, c, 4+16+15) // flags, option header, option
		<-ended
	})
	return l.Addr().String()
}

func TestReadsOutsideTheExportAreRefusedHere(t *testing.T) {
	c := dial(t, serve(t, &memory{data: pattern(4096)}))
	for _, k := range []nbd.Call{{Off: -1, N: 1}, {Off: 4096, N: 1}, {Off: 0, N: 4097}, {Off: 0, N: -1}} {
		var got error
		k.End = func(_ []byte, err error) { got = err }
		c.Start(&k)
		if got == nil || errors.Is(got, syscall.EINVAL) {
			t.Errorf("read of %d at %d: got %v, want an error of the client's own", k.N, k.Off, got)
		}
	}
}
