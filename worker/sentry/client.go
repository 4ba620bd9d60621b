// Package sentry is a client of the control socket of one runsc sandbox. A call
// there takes about a millisecond; runsc as a process takes fifty.
package sentry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrGone says that no Sentry answers at the socket, or that it ended during the
// call. Whether the call had an effect is not known then.
var ErrGone = errors.New("the sandbox's kernel does not answer")

// RemoteError is a refusal: the Sentry answered that the call failed.
type RemoteError struct {
	Method  string
	Message string // of the Sentry, at most 4 KiB
}

func (e *RemoteError) Error() string { return e.Method + ": " + e.Message }

// What a refusal may be about. The Sentry sends its errors as text, which is read here
// alone, and of the pinned version: a RemoteError is one of these by errors.Is.
var (
	// ErrProcesses says that the guest is at its limit of processes: EAGAIN.
	ErrProcesses = errors.New("the guest is at its limit of processes")
	// ErrNoFile says that there is no such file, program or folder.
	ErrNoFile = errors.New("no such file in the guest")
)

// Is tells what the refusal is about.
func (e *RemoteError) Is(target error) bool {
	switch target {
	case ErrProcesses:
		return strings.HasSuffix(e.Message, "try again")
	case ErrNoFile:
		if strings.Contains(e.Message, "permission denied") {
			return false
		}
		for _, words := range []string{"no such file or directory", "not a directory", "error finding executable"} {
			if strings.Contains(e.Message, words) {
				return true
			}
		}
	}
	return false
}

// maxIdle is how many connections are kept for the next call. An exec needs one
// from its start to its end.
const maxIdle = 4

// Client calls the Sentry of one container. Its methods may be used by many
// goroutines at once; every call has a connection of its own. A call ends with its
// ctx, but the Sentry goes on with what it has begun.
type Client struct {
	container string

	mu     sync.Mutex // guards what follows
	socket string
	moves  int // how often Move was called
	idle   []*conn
	closed bool
}

// New returns a client for the container whose Sentry listens at socket. It
// connects with the first call.
func New(socket, container string) *Client { return &Client{socket: socket, container: container} }

// Move has the next calls go to another Sentry of the same container: one that was
// restored in the place of the first, which has ended.
func (c *Client) Move(socket string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.idle {
		k.c.Close()
	}
	c.idle, c.socket = nil, socket
	c.moves++
}

// Close ends the idle connections; those of calls under way end with the calls.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.idle {
		k.c.Close()
	}
	c.idle, c.closed = nil, true
}

// take returns a connection that no call uses. The Sentry closes one only at its own
// end, so that an idle one is as good as a new one.
func (c *Client) take(ctx context.Context) (*conn, error) {
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		k := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		return k, nil
	}
	socket, moves := c.socket, c.moves
	c.mu.Unlock()
	k, err := Dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	return &conn{c: k, moves: moves}, nil
}

func (c *Client) give(k *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle) >= maxIdle || k.moves != c.moves {
		k.c.Close()
		return
	}
	c.idle = append(c.idle, k)
}

// call makes one call on a connection of its own.
func (c *Client) call(ctx context.Context, method string, arg, result any, send ...*os.File) ([]*os.File, error) {
	if len(send) > maxSent {
		return nil, fmt.Errorf("%s: %d files, at most %d can be given", method, len(send), maxSent)
	}
	k, err := c.take(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", method, gone(ctx, err))
	}
	files, err := k.call(ctx, method, arg, result, send)
	if err == nil {
		c.give(k)
		return files, nil
	}
	var refused *RemoteError
	if errors.As(err, &refused) {
		c.give(k)
		return nil, err
	}
	k.c.Close()
	return nil, fmt.Errorf("%s: %w", method, gone(ctx, err))
}

// gone makes an error of a connection that was lost ErrGone.
func gone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, lost := range []error{io.EOF, io.ErrUnexpectedEOF, unix.ECONNREFUSED, unix.ENOENT, unix.ECONNRESET, unix.EPIPE} {
		if errors.Is(err, lost) {
			return fmt.Errorf("%w: %w", ErrGone, err)
		}
	}
	return err
}
