package nbd_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// rawClient speaks the protocol byte by byte, to say what no client would.
type rawClient struct {
	t *testing.T
	net.Conn
}

func dialRaw(t *testing.T, sock string) *rawClient {
	t.Helper()
	c, err := net.Dial("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	r := &rawClient{t, c}
	r.want("NBDMAGIC" + "IHAVEOPT" + "\x00\x03")
	r.send(uint32(3))
	return r
}

// send writes numbers big-endian and strings as they are.
func (r *rawClient) send(vs ...any) {
	r.t.Helper()
	var b bytes.Buffer
	for _, v := range vs {
		if s, ok := v.(string); ok {
			b.WriteString(s)
		} else if err := binary.Write(&b, binary.BigEndian, v); err != nil {
			r.t.Fatal(err)
		}
	}
	if _, err := r.Write(b.Bytes()); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rawClient) read(n int) []byte {
	r.t.Helper()
	p := make([]byte, n)
	if _, err := io.ReadFull(r, p); err != nil {
		r.t.Fatalf("read %d bytes: %v", n, err)
	}
	return p
}

func (r *rawClient) want(s string) {
	r.t.Helper()
	if got := r.read(len(s)); string(got) != s {
		r.t.Fatalf("server sent %q, want %q", got, s)
	}
}

func (r *rawClient) wantClosed() {
	r.t.Helper()
	if n, err := io.Copy(io.Discard, r); err != nil || n != 0 {
		r.t.Errorf("server sent %d more bytes (%v), want the end", n, err)
	}
}

func (r *rawClient) option(opt uint32, data string) {
	r.t.Helper()
	r.send("IHAVEOPT", opt, uint32(len(data)), data)
}

// optionReply returns the type and data of one reply.
func (r *rawClient) optionReply(opt uint32) (uint32, string) {
	r.t.Helper()
	h := r.read(20)
	if binary.BigEndian.Uint64(h) != 0x3e889045565a9 || binary.BigEndian.Uint32(h[8:]) != opt {
		r.t.Fatalf("option reply begins with %x", h)
	}
	return binary.BigEndian.Uint32(h[12:]), string(r.read(int(binary.BigEndian.Uint32(h[16:]))))
}

func (r *rawClient) request(flags, typ uint16, cookie, off uint64, length uint32) {
	r.t.Helper()
	r.send(uint32(0x25609513), flags, typ, cookie, off, length)
}

// simpleReply returns the error number of the reply to cookie.
func (r *rawClient) simpleReply(cookie uint64) uint32 {
	r.t.Helper()
	h := r.read(16)
	if binary.BigEndian.Uint32(h) != 0x67446698 || binary.BigEndian.Uint64(h[8:]) != cookie {
		r.t.Fatalf("reply begins with %x", h)
	}
	return binary.BigEndian.Uint32(h[4:])
}

// structuredReply returns type and data of the one piece that answers cookie.
func (r *rawClient) structuredReply(cookie uint64) (uint16, []byte) {
	r.t.Helper()
	h := r.read(20)
	if binary.BigEndian.Uint32(h) != 0x668e33ef || binary.BigEndian.Uint16(h[4:]) != 1 || binary.BigEndian.Uint64(h[8:]) != cookie {
		r.t.Fatalf("reply begins with %x", h)
	}
	return binary.BigEndian.Uint16(h[6:]), r.read(int(binary.BigEndian.Uint32(h[16:])))
}

const (
	repAck, repErrUnsup, repErrInvalid, repErrUnknown, repErrTooBig = 1, 1<<31 + 1, 1<<31 + 3, 1<<31 + 6, 1<<31 + 9
	eperm, eio, einval                                              = 1, 5, 22
)

func TestOptionsAreAnsweredAsTheProtocolSays(t *testing.T) {
	sock := serve(t, &memory{data: pattern(8192)})
	r := dialRaw(t, sock)
	for _, tc := range []struct {
		name string
		opt  uint32
		data string
		want uint32
	}{
		{"STARTTLS", 5, "", repErrUnsup},
		{"PEEK_EXPORT", 4, "", repErrUnsup},
		{"LIST_META_CONTEXT", 9, "\x00\x00\x00\x00\x00\x00\x00\x00", repErrUnsup},
		{"EXTENDED_HEADERS", 11, "", repErrUnsup},
		{"an option that does not exist", 4711, "xyz", repErrUnsup},
		{"LIST", 3, "", repAck},
		{"LIST with data", 3, "x", repErrInvalid},
		{"STRUCTURED_REPLY with data", 8, "x", repErrInvalid},
		{"GO for another name", 7, "\x00\x00\x00\x05other\x00\x00", repErrUnknown},
		{"GO without data", 7, "", repErrInvalid},
		{"GO with a name longer than its data", 7, "\x00\x00\x00\xffimage\x00\x00", repErrInvalid},
		{"GO with a count longer than its data", 7, "\x00\x00\x00\x05image\x00\x09", repErrInvalid},
		{"GO with a trailing byte", 7, "\x00\x00\x00\x05image\x00\x00!", repErrInvalid},
		{"GO with 20 KiB", 7, string(make([]byte, 20<<10)), repErrTooBig},
		{"ABORT", 2, "", repAck},
	} {
		r.option(tc.opt, tc.data)
		if got, msg := r.optionReply(tc.opt); got != tc.want {
			t.Errorf("%s: got reply %#x %q, want %#x", tc.name, got, msg, tc.want)
		}
	}
	r.wantClosed()
}

func TestExportName(t *testing.T) {
	sock := serve(t, &memory{data: pattern(8192)})
	r := dialRaw(t, sock)
	r.option(1, "image")
	if got := r.read(10); binary.BigEndian.Uint64(got) != 8192 || binary.BigEndian.Uint16(got[8:]) != 1<<0|1<<1|1<<8|1<<10 {
		t.Errorf("export information is %x", got)
	}
	r.request(0, 0, 1, 0, 5)
	if errno := r.simpleReply(1); errno != 0 {
		t.Errorf("read answered %d", errno)
	}
	r.want(string(pattern(5)))

	r = dialRaw(t, sock)
	r.option(1, "other")
	r.wantClosed()
}

func TestHagglingWithoutEndIsEnded(t *testing.T) {
	r := dialRaw(t, serve(t, &memory{data: pattern(8192)}))
	for range 64 {
		r.option(3, "")
		r.optionReply(3)
	}
	r.wantClosed()
}

// choose brings a raw client to transmission.
func (r *rawClient) choose(structured bool) {
	r.t.Helper()
	if structured {
		r.option(8, "")
		if got, _ := r.optionReply(8); got != repAck {
			r.t.Fatalf("STRUCTURED_REPLY answered %#x", got)
		}
	}
	r.option(7, "\x00\x00\x00\x05image\x00\x00")
	for {
		if typ, msg := r.optionReply(7); typ == repAck {
			return
		} else if typ&(1<<31) != 0 {
			r.t.Fatalf("GO refused: %#x %q", typ, msg)
		}
	}
}

var requests = []struct {
	name       string
	flags, typ uint16
	off        uint64
	length     uint32
	data       string
	want       uint32
}{
	{"read of all", 0, 0, 0, 1 << 20, "", 0},
	{"unaligned read", 0, 0, 4095, 3, "", 0},
	{"read of nothing", 0, 0, 5, 0, "", 0},
	{"read of the last byte", 0, 0, 1<<20 - 1, 1, "", 0},
	{"read across the end", 0, 0, 1<<20 - 1, 2, "", einval},
	{"read behind the end", 0, 0, 1 << 20, 1, "", einval},
	{"read near 2^63", 0, 0, 1<<63 - 1, 4096, "", einval},
	{"read near 2^64", 0, 0, 1<<64 - 1, 4096, "", einval},
	{"read of more than 32 MiB", 0, 0, 0, 32<<20 + 1, "", einval},
	{"read with an unknown flag", 1 << 9, 0, 0, 1, "", einval},
	{"read that fails", 0, 0, 1 << 19, 1, "", eio},
	{"write", 0, 1, 0, 7, "payload", eperm},
	{"trim", 0, 4, 0, 4096, "", eperm},
	{"write zeroes", 0, 6, 0, 4096, "", eperm},
	{"flush, which is not offered", 0, 3, 0, 0, "", einval},
	{"cache", 0, 5, 0, 1 << 18, "", 0},
	{"cache of what fails", 0, 5, 1 << 19, 1, "", eio},
	{"cache across the end", 0, 5, 1<<20 - 1, 2, "", einval},
	{"block status", 0, 7, 0, 4096, "", einval},
	{"unknown command", 0, 99, 0, 0, "", einval},
}

// serveFailing serves 1 MiB whose upper half's first byte cannot be read.
func serveFailing(t *testing.T) string {
	return serve(t, &memory{data: pattern(1 << 20), gate: func(_ context.Context, off int64) error {
		if off == 1<<19 {
			return errors.New("chunk sha256:abc is damaged")
		}
		return nil
	}})
}

func TestRequestsAreAnsweredSimply(t *testing.T) {
	r := dialRaw(t, serveFailing(t))
	r.choose(false)
	for i, tc := range requests {
		r.request(tc.flags, tc.typ, uint64(i), tc.off, tc.length)
		r.send(tc.data)
		if got := r.simpleReply(uint64(i)); got != tc.want {
			t.Errorf("%s: got error %d, want %d", tc.name, got, tc.want)
		} else if got == 0 && tc.typ == 0 {
			r.want(string(pattern(1 << 20)[tc.off:][:tc.length]))
		}
	}
	r.request(1<<2, 0, 99, 0, 1)
	if got := r.simpleReply(99); got != einval {
		t.Errorf("DF without structured replies: got error %d, want EINVAL", got)
	}
	r.request(0, 2, 0, 0, 0)
	r.wantClosed()
}

func TestRequestsAreAnsweredInStructure(t *testing.T) {
	r := dialRaw(t, serveFailing(t))
	r.choose(true)
	for i, tc := range requests {
		flags := tc.flags
		if tc.typ == 0 {
			flags |= 1 << 2 // DF
		}
		r.request(flags, tc.typ, uint64(i), tc.off, tc.length)
		r.send(tc.data)
		typ, data := r.structuredReply(uint64(i))
		switch {
		case tc.want != 0:
			if typ != 1<<15+1 || binary.BigEndian.Uint32(data) != tc.want || int(binary.BigEndian.Uint16(data[4:])) != len(data)-6 {
				t.Errorf("%s: got reply %#x %q, want error %d with a message", tc.name, typ, data, tc.want)
			}
		case tc.typ == 0 && tc.length > 0:
			if typ != 1 || binary.BigEndian.Uint64(data) != tc.off || !bytes.Equal(data[8:], pattern(1 << 20)[tc.off:][:tc.length]) {
				t.Errorf("%s: reply %#x at %x has other bytes", tc.name, typ, data[:8])
			}
		case typ != 0 || len(data) != 0:
			t.Errorf("%s: got reply %#x with %d bytes, want NONE", tc.name, typ, len(data))
		}
	}
}

func TestServerEndsAtAMalformedRequest(t *testing.T) {
	r := dialRaw(t, serveFailing(t))
	r.choose(false)
	r.send(string(make([]byte, 28)))
	r.wantClosed()

	r = dialRaw(t, serveFailing(t))
	r.choose(false)
	r.request(0, 1, 1, 0, 1<<30) // a write whose data would take for ever to skip
	r.wantClosed()
}

// TestDisconnectWaitsForReads sends DISC behind a read that is under way.
func TestDisconnectWaitsForReads(t *testing.T) {
	data := pattern(1 << 20)
	r := dialRaw(t, serve(t, &memory{data: data, gate: func(ctx context.Context, _ int64) error {
		time.Sleep(50 * time.Millisecond)
		return ctx.Err()
	}}))
	r.choose(false)
	r.request(0, 0, 7, 0, 4096)
	r.request(0, 2, 0, 0, 0)
	if errno := r.simpleReply(7); errno != 0 {
		t.Errorf("read before DISC answered %d", errno)
	}
	r.want(string(data[:4096]))
	r.wantClosed()
}

// TestLostClientEndsItsReads closes a connection in mid-read.
func TestLostClientEndsItsReads(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	r := dialRaw(t, serve(t, &memory{data: pattern(4096), gate: func(ctx context.Context, _ int64) error {
		close(started)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	}}))
	r.choose(false)
	r.request(0, 0, 7, 0, 1)
	<-started
	r.Close()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the read of a lost client goes on")
	}
}
