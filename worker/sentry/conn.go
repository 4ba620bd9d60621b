package sentry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/fdpass"
)

const (
	// maxReply bounds an answer of the Sentry, which is not trusted. A list of 10,000
	// processes is 2 MiB.
	maxReply = 8 << 20
	// maxFiles bounds the descriptors of one answer; the Sentry itself takes 128.
	maxFiles = 8
	// maxSent is how many descriptors the Sentry takes with one call.
	maxSent = 128
	// maxMessage bounds the text of an error that is passed on.
	maxMessage = 4 << 10
)

// conn is one connection; it carries one call at a time.
type conn struct {
	c     *net.UnixConn
	moves int // of the client when it was made
}

// dialPoll is how soon a socket with a full queue is tried again.
const dialPoll = time.Millisecond

// Dial connects to a socket whose path may be longer than an address can be. Who
// listens there may be slow: the kernel refuses a connection when a few wait to be
// accepted, so Dial asks again until ctx ends.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	name, done, err := shortName(path)
	if err != nil {
		return nil, err
	}
	defer done()
	var d net.Dialer
	for {
		c, err := d.DialContext(ctx, "unix", name)
		if err == nil {
			return c.(*net.UnixConn), nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(dialPoll):
		}
	}
}

// maxSocketPath is what sun_path holds, without the NUL.
const maxSocketPath = 107

// shortName returns a name of the socket that an address has room for.
func shortName(path string) (name string, done func(), err error) {
	if len(path) <= maxSocketPath {
		return path, func() {}, nil
	}
	f, err := os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d", f.Fd()), func() { f.Close() }, nil
}

type request struct {
	Method string `json:"method"`
	Arg    any    `json:"arg"`
}

type reply struct {
	Success bool            `json:"success"`
	Err     string          `json:"err"`
	Result  json.RawMessage `json:"result"`
}

// call sends one request with descriptors and reads its answer into result, which
// may be nil. The end of ctx ends the wait; the connection cannot be used again
// after any error that is not a RemoteError.
func (c *conn) call(ctx context.Context, method string, arg, result any, send []*os.File) ([]*os.File, error) {
	b, err := json.Marshal(request{method, arg})
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline() // the zero time is none
	if err := c.c.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := fdpass.Write(c.c, b, send); err != nil {
		return nil, orDone(ctx, err)
	}
	r, files, err := c.read()
	if err == nil {
		err = decode(method, r, result)
	}
	if err != nil {
		fdpass.Close(files)
		return nil, orDone(ctx, err)
	}
	return files, nil
}

// short cuts a text in its middle: the Sentry says last what went wrong, behind a name
// that may be as long as a guest can have it.
func short(text string) string {
	if len(text) <= maxMessage {
		return text
	}
	return text[:maxMessage/2] + text[len(text)-maxMessage/2:]
}

func decode(method string, r reply, result any) error {
	if !r.Success {
		return &RemoteError{Method: method, Message: short(r.Err)}
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(r.Result, result); err != nil {
		return fmt.Errorf("%w: %w", errAnswer, err)
	}
	return nil
}

// errAnswer says that the Sentry's answer was not one.
var errAnswer = errors.New("not an answer")

// orDone puts the reason why ctx ended in the place of what that caused.
func orDone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) { // the connection's timer was first
		return context.DeadlineExceeded
	}
	return err
}

// read reads one answer. Its descriptors come with the first byte.
func (c *conn) read() (r reply, files []*os.File, err error) {
	first := make([]byte, 512)
	n, files, all, err := fdpass.Read(c.c, first, maxFiles)
	if err != nil {
		return r, files, err
	}
	if !all {
		return r, files, fmt.Errorf("%w: more than %d descriptors", errAnswer, maxFiles)
	}
	if n == 0 {
		return r, files, io.EOF
	}
	limited := io.LimitedReader{R: c.c, N: maxReply - int64(n)}
	dec := json.NewDecoder(io.MultiReader(bytes.NewReader(first[:n]), &limited))
	if err := dec.Decode(&r); err != nil {
		if limited.N <= 0 {
			err = fmt.Errorf("%w: it has more than %d bytes", errAnswer, maxReply)
		}
		return r, files, err
	}
	if rest, _ := io.ReadAll(dec.Buffered()); len(rest) > 0 {
		return r, files, fmt.Errorf("%w: %d bytes follow it", errAnswer, len(rest))
	}
	return r, files, nil
}
