package nbd

import (
	"bytes"
	"context"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// memoryView shows what it has.
type memoryView []byte

func (m memoryView) Size() int64 { return int64(len(m)) }

func (m memoryView) View(_ context.Context, off int64, n int, fn func(p []byte) error) error {
	return fn(m[off : off+int64(n)])
}

// socketPair returns both ends of a connection.
func socketPair(t *testing.T) (ends [2]net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends
}

// TestClientOnATransmission runs both sides over the socket pair that a kernel is
// given one end of.
func TestClientOnATransmission(t *testing.T) {
	ends := socketPair(t)
	data := make([]byte, 3<<20)
	for i := range data {
		data[i] = byte(i>>12) ^ byte(i*7)
	}
	served := make(chan error, 1)
	tr := &Transmission{Conn: ends[0], Source: memoryView(data)}
	go func() { served <- tr.Serve(t.Context()) }() // ends when the client closes
	c, err := newClient(ends[1], offer{name: "image", size: int64(len(data)), maxPayload: MaxView})
	if err != nil {
		t.Fatal(err)
	}
	for off := 0; off < len(data); off += MaxView {
		err := c.View(t.Context(), int64(off), MaxView, func(p []byte) error {
			if !bytes.Equal(p, data[off:off+MaxView]) {
				t.Errorf("other bytes than the source's at %d", off)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	if err := c.View(t.Context(), 4096, MaxView+4096, func([]byte) error { return nil }); err == nil {
		t.Error("View of more than the connection allows: no error")
	}
	c.Close()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
}
