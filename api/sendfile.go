package api

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// fileRange reads [off, end) of a file, and lets a conn send it without reading it.
// It moves no offset of the file, which others use too.
type fileRange struct {
	f        *os.File
	off, end int64
}

// fileError is an error of the file rather than of whoever it is sent to.
type fileError struct{ error }

func (e fileError) Unwrap() error { return e.error }

// Read implements io.Reader.
func (r *fileRange) Read(p []byte) (int, error) {
	if r.off == r.end {
		return 0, io.EOF
	}
	n, err := r.f.ReadAt(p[:min(int64(len(p)), r.end-r.off)], r.off)
	r.off += int64(n)
	switch {
	case n > 0:
		return n, nil
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	}
	return 0, fileError{err}
}

// maxSendfile bounds one system call, which an int32 holds.
const maxSendfile = 1 << 30

// sendTo has the kernel send the range, until the connection takes no more before
// its deadline.
func (r *fileRange) sendTo(to syscall.RawConn) error {
	from, err := r.f.SyscallConn()
	if err != nil {
		return fileError{err}
	}
	var sent, waited error
	err = from.Control(func(src uintptr) {
		waited = to.Write(func(dst uintptr) (done bool) {
			done, sent = r.send(int(dst), int(src))
			return done
		})
	})
	if err != nil {
		return fileError{err}
	}
	return errors.Join(waited, sent)
}

// send sends what the socket takes now, and says whether there is no more to wait for.
func (r *fileRange) send(dst, src int) (done bool, err error) {
	for r.off < r.end {
		n, err := syscall.Sendfile(dst, src, &r.off, int(min(r.end-r.off, maxSendfile)))
		switch {
		case err == syscall.EAGAIN:
			return false, nil
		case err == syscall.EINTR:
		case err == syscall.EIO:
			return true, fileError{err}
		case err != nil:
			return true, err
		case n == 0:
			return true, fileError{io.ErrUnexpectedEOF}
		}
	}
	return true, nil
}

// ReadFrom implements io.ReaderFrom, for net/http: a file goes past this process. As
// with Write, the client has the same time for each writeStep.
func (c *conn) ReadFrom(r io.Reader) (int64, error) {
	file, ok := r.(*fileRange)
	tcp, isTCP := c.Conn.(*net.TCPConn)
	if !ok || !isTCP {
		return io.Copy(struct{ io.Writer }{c}, r)
	}
	to, err := tcp.SyscallConn()
	if err != nil {
		return 0, err
	}
	began := file.off
	for {
		step := file.off
		_ = tcp.SetWriteDeadline(time.Now().Add(c.listener.shared.cfg.StallTimeout)) // fails as the write will
		err := file.sendTo(to)
		if file.off-step < writeStep || !errors.Is(err, os.ErrDeadlineExceeded) {
			return file.off - began, err
		}
	}
}

// sendFile sends the range.
func (w *response) sendFile(r *fileRange) error {
	size := r.end - r.off
	n, err := io.Copy(w.ResponseWriter, r)
	w.bytes += n
	switch {
	case errors.As(err, new(fileError)):
		return fmt.Errorf("send %s at %d: %w", r.f.Name(), r.off, err)
	case err != nil:
		return unsent(err)
	case n != size:
		return fmt.Errorf("%d bytes of a file were sent, want %d", n, size)
	}
	return nil
}
