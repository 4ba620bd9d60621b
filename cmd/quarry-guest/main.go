// Command quarry-guest runs in a sandbox for one call of package guest and ends. It
// reads a request from stdin and answers on stdout, in the frames of package wire. It
// is in no image: the worker starts it by an open file. Its other role is an agent of
// quarry bench agents.
package main

import (
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		os.Stderr.WriteString(runAgent(os.Args[2:]).Error() + "\n") // it has no end of its own
		unix.Exit(1)
	}
	h := &helper{in: wire.NewReader(fdReader(0)), buf: make([]byte, 0, outBuffer)}
	err := h.run()
	if err != nil && h.out == nil {
		h.sendError(err)
	}
	h.flush()
	if err != nil || h.out != nil {
		unix.Exit(1)
	}
	unix.Exit(0)
}

// outBuffer gathers small frames: many files of a list are one write.
const outBuffer = 64 << 10

// helper is one call.
type helper struct {
	in   *wire.Reader
	q    wire.Request
	buf  []byte
	data []byte // of files on their way
	out  error  // of stdout: nobody listens any more
}

func (h *helper) run() error {
	k, p, err := h.in.Next()
	if err != nil || k != wire.KindRequest {
		return code(wire.CodeProtocol, "no request")
	}
	if h.q, err = wire.DecodeRequest(p); err != nil {
		return code(wire.CodeProtocol, "request")
	}
	switch h.q.Op {
	case wire.OpStat:
		return h.stat()
	case wire.OpList:
		return h.list()
	case wire.OpRead:
		return h.read()
	case wire.OpWrite:
		return h.write()
	case wire.OpRemove:
		return h.remove()
	case wire.OpTarDown:
		return h.tarDown()
	case wire.OpTarUp:
		return h.tarUp()
	case wire.OpTarget:
		return h.target()
	case wire.OpUnmount:
		return h.unmount()
	case wire.OpUnblock:
		return h.unblock()
	}
	return code(wire.CodeProtocol, "op")
}

// failure is an error with the number that goes over the wire.
type failure struct {
	number uint32
	what   string
}

func (f *failure) Error() string { return f.what }

func code(n uint32, what string) error { return &failure{n, what} }

// fail names what an errno was of; nil stays nil.
func fail(err error, what string) error {
	if err == nil {
		return nil
	}
	if f, ok := err.(*failure); ok {
		return f
	}
	if e, ok := err.(unix.Errno); ok && e != 0 {
		return &failure{uint32(e), what}
	}
	return &failure{uint32(unix.EIO), what}
}

func (h *helper) sendError(err error) {
	f, ok := fail(err, h.q.Path).(*failure)
	if !ok {
		return
	}
	h.send(wire.KindError, wire.Error{Errno: f.number, Message: f.what}.Encode())
}

// send gathers a frame, and sends what is gathered when it is much.
func (h *helper) send(k wire.Kind, payload []byte) {
	if len(h.buf)+len(payload)+8 > cap(h.buf) {
		h.flush()
	}
	h.buf = wire.AppendFrame(h.buf, k, payload)
}

// flush sends what is gathered. Its error is kept: it means that nobody listens.
func (h *helper) flush() {
	b := h.buf
	for len(b) > 0 && h.out == nil {
		n, err := unix.Write(1, b)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			wait(1, unix.POLLOUT)
		case err != nil:
			h.out = err
		default:
			b = b[n:]
		}
	}
	h.buf = h.buf[:0]
}

// fdReader reads a descriptor.
type fdReader int

func (f fdReader) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(f), p)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			wait(int(f), unix.POLLIN)
		case err != nil:
			return 0, err
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// wait is for pipes that the host had set not to block.
func wait(fd int, events int16) {
	unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, -1)
}

// split cuts a path before its last element; slashes after it are not of it.
func split(p string) (dir, base string, slash bool) {
	bare := strings.TrimRight(p, "/")
	slash = len(bare) < len(p)
	i := strings.LastIndexByte(bare, '/')
	if i < 0 {
		return ".", bare, slash
	}
	dir = strings.TrimRight(bare[:i], "/")
	if dir == "" {
		dir = "/"
	}
	return dir, bare[i+1:], slash
}
