package nbd_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"quarry/nbd"
)

// shown is a Viewer whose answers a test can hold back or fail.
type shown struct {
	data []byte
	gate func(ctx context.Context, off int64) error // called first when set
}

func (s *shown) Size() int64 { return int64(len(s.data)) }

func (s *shown) View(ctx context.Context, off int64, n int, fn func(p []byte) error) error {
	if s.gate != nil {
		if err := s.gate(ctx, off); err != nil {
			return err
		}
	}
	return fn(s.data[off : off+int64(n)])
}

// stalled holds back every read until its context ends.
func stalled(ctx context.Context, _ int64) error {
	<-ctx.Done()
	return ctx.Err()
}

const (
	cmdRead  = 0
	cmdWrite = 1
	cmdDisc  = 2
)

// kernel is the other side of a Transmission: it says what a kernel, or a broken
// one, could say.
type kernel struct {
	*rawClient
	served chan error
	eio    atomic.Int64
}

func transmit(t *testing.T, ctx context.Context, tr *nbd.Transmission) *kernel {
	ours, kernels := net.Pipe()
	k := &kernel{rawClient: &rawClient{t, kernels}, served: make(chan error, 1)}
	tr.Conn = ours
	tr.OnEIO = func(context.Context, error) { k.eio.Add(1) }
	go func() { k.served <- tr.Serve(ctx) }() // ends with the connection
	t.Cleanup(func() { kernels.Close() })
	return k
}

// ask sends a request.
func (k *kernel) ask(flags, typ uint16, cookie, off uint64, length uint32) {
	k.t.Helper()
	k.send(uint32(0x25609513), flags, typ, cookie, off, length)
}

// answer reads a reply's header.
func (k *kernel) answer() (cookie uint64, errno uint32) {
	k.t.Helper()
	h := k.read(16)
	if m := binary.BigEndian.Uint32(h); m != 0x67446698 {
		k.t.Fatalf("reply has magic %#x", m)
	}
	return binary.BigEndian.Uint64(h[8:]), binary.BigEndian.Uint32(h[4:])
}

func (k *kernel) wantAnswer(cookie uint64, errno uint32) {
	k.t.Helper()
	if c, e := k.answer(); c != cookie || e != errno {
		k.t.Fatalf("reply to %d with error %d, want to %d with %d", c, e, cookie, errno)
	}
}

func TestTransmissionAnswersReadsAndRefusesTheRest(t *testing.T) {
	data := pattern(4 << 20)
	k := transmit(t, t.Context(), &nbd.Transmission{Source: &shown{data: data}})
	size := uint64(len(data))
	for cookie, tc := range []struct {
		name   string
		flags  uint16
		typ    uint16
		off    uint64
		length uint32
		errno  uint32
	}{
		{"a read", 0, cmdRead, 4096, 8192, 0},
		{"the last block", 0, cmdRead, size - 4096, 4096, 0},
		{"the longest read", 0, cmdRead, 0, nbd.MaxView, 0},
		{"a longer read", 0, cmdRead, 0, nbd.MaxView + 4096, 22},
		{"a read across the end", 0, cmdRead, size - 4096, 8192, 22},
		{"a read behind the end", 0, cmdRead, size, 4096, 22},
		{"a read near 2^63", 0, cmdRead, 1<<63 - 4096, 4096, 22},
		{"a read that wraps around", 0, cmdRead, 1<<64 - 4096, 8192, 22},
		{"a read of nothing", 0, cmdRead, size, 0, 0},
		{"a read with flags", 1, cmdRead, 0, 4096, 22},
		{"a write", 0, cmdWrite, 0, 3, 1},
		{"a flush", 0, 3, 0, 0, 22},
		{"a trim", 0, 4, 0, 4096, 1},
		{"a cache", 0, 5, 0, 4096, 22},
		{"zeroes", 0, 6, 0, 4096, 1},
		{"a command that is none", 0, 77, 0, 4096, 22},
	} {
		k.ask(tc.flags, tc.typ, uint64(cookie), tc.off, tc.length)
		if tc.typ == cmdWrite {
			k.send("abc") // is skipped
		}
		if c, e := k.answer(); c != uint64(cookie) || e != tc.errno {
			t.Fatalf("%s: reply to %d with error %d, want to %d with %d", tc.name, c, e, cookie, tc.errno)
		}
		if tc.errno == 0 && tc.typ == cmdRead {
			if got := k.read(int(tc.length)); !bytes.Equal(got, data[tc.off:tc.off+uint64(tc.length)]) {
				t.Errorf("%s: other bytes than the source's", tc.name)
			}
		}
	}
	k.ask(0, cmdDisc, 99, 0, 0)
	if err := <-k.served; err != nil {
		t.Errorf("Serve after DISC: %v", err)
	}
	if n := k.eio.Load(); n != 0 {
		t.Errorf("%d reads counted as answered with EIO, want none", n)
	}
}

func TestTransmissionStalledReadsHoldUpNoOther(t *testing.T) {
	data := pattern(4 << 20)
	release := make(chan struct{})
	src := &shown{data: data, gate: func(ctx context.Context, off int64) error {
		if off == 0 {
			return nil
		}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}}
	k := transmit(t, t.Context(), &nbd.Transmission{Source: src})
	const reads = 128 // as many as a kernel has open
	for i := range reads - 1 {
		k.ask(0, cmdRead, uint64(i), 4096*uint64(i+1), 4096)
	}
	k.ask(0, cmdRead, reads, 0, 4096)
	k.wantAnswer(reads, 0)
	k.read(4096)
	close(release)
	seen := map[uint64]bool{}
	for range reads - 1 {
		cookie, errno := k.answer()
		off := 4096 * (cookie + 1)
		if errno != 0 || seen[cookie] || !bytes.Equal(k.read(4096), data[off:off+4096]) {
			t.Fatalf("reply to %d: error %d, or seen before, or other bytes", cookie, errno)
		}
		seen[cookie] = true
	}
}

func TestTransmissionDeadlineRunsFromTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := transmit(t, t.Context(), &nbd.Transmission{Source: &shown{data: pattern(8192), gate: stalled}, Deadline: 270 * time.Second})
		asked := time.Now()
		k.ask(0, cmdRead, 1, 0, 4096)
		k.wantAnswer(1, 5)
		if d := time.Since(asked); d != 270*time.Second {
			t.Errorf("EIO after %v, want 270 s", d)
		}
		if n := k.eio.Load(); n != 1 {
			t.Errorf("%d reads counted as answered with EIO, want 1", n)
		}
		k.Close()
		<-k.served
	})
}

func TestTransmissionGivesEIOWhenItsContextHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		k := transmit(t, ctx, &nbd.Transmission{Source: &shown{data: pattern(8192), gate: stalled}})
		k.ask(0, cmdRead, 1, 0, 4096)
		synctest.Wait()
		cancel()
		k.wantAnswer(1, 5)
		k.ask(0, cmdRead, 2, 4096, 4096)
		k.wantAnswer(2, 5)
		k.Close()
		if err := <-k.served; err != nil {
			t.Error(err)
		}
	})
}

// TestTransmissionEndsItsReadsWithTheConnection shows that nothing waits for an
// answer that nobody can get.
func TestTransmissionEndsItsReadsWithTheConnection(t *testing.T) {
	for name, end := range map[string]func(k *kernel){
		"DISC":                 func(k *kernel) { k.ask(0, cmdDisc, 9, 0, 0) },
		"the connection lost":  func(k *kernel) { k.Close() },
		"a request cut":        func(k *kernel) { k.send("\x25\x60\x95\x13\x00"); k.Close() },
		"another magic":        func(k *kernel) { k.send(uint32(0x12345678), make([]byte, 24)) },
		"a write of 1 GiB":     func(k *kernel) { k.ask(0, cmdWrite, 9, 0, 1<<30) },
		"an answer not wanted": func(k *kernel) { k.ask(0, 3, 9, 0, 0); k.Close() },
		"too many reads": func(k *kernel) {
			for i := range 300 {
				if binary.Write(k, binary.BigEndian, struct {
					Magic      uint32
					Flags, Typ uint16
					Cookie     uint64
					Off        uint64
					Length     uint32
				}{0x25609513, 0, cmdRead, uint64(i), 0, 4096}) != nil {
					return // it ends the connection
				}
			}
			k.t.Error("300 reads under way are accepted")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := transmit(t, t.Context(), &nbd.Transmission{Source: &shown{data: pattern(8192), gate: stalled}})
				for i := range 3 {
					k.ask(0, cmdRead, uint64(i), 0, 4096)
				}
				end(k)
				err := <-k.served
				broken := name != "DISC" && name != "the connection lost" && name != "an answer not wanted"
				if broken != (err != nil) && !errors.Is(err, io.ErrClosedPipe) {
					t.Errorf("Serve: %v", err)
				}
			})
		})
	}
}
