package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"quarry/api/sandboxes"
	"quarry/worker/sandbox"
)

// Exec runs a command and waits for its end.
func (c *Client) Exec(ctx context.Context, id string, e sandboxes.ExecRequest) (sandboxes.ExecAnswer, error) {
	return call[sandboxes.ExecAnswer](ctx, c, request{method: http.MethodPost, path: at(id, "exec")}, e)
}

// Start runs a command and returns when it runs.
func (c *Client) Start(ctx context.Context, id string, e sandbox.ExecSpec) (sandbox.ExecState, error) {
	return call[sandbox.ExecState](ctx, c, request{method: http.MethodPost, path: at(id, "exec")}, sandboxes.ExecRequest{ExecSpec: e, Detach: true})
}

// ExecState returns an exec as it is, or when it has ended within wait.
func (c *Client) ExecState(ctx context.Context, id, exec string, wait time.Duration) (sandbox.ExecState, error) {
	q := url.Values{"wait_ms": {strconv.FormatInt(wait.Milliseconds(), 10)}}
	return call[sandbox.ExecState](ctx, c, request{method: http.MethodGet, path: at(id, "exec", exec), query: q}, nil)
}

// Execs lists the execs of a sandbox.
func (c *Client) Execs(ctx context.Context, id string) ([]sandbox.ExecState, error) {
	page, err := call[sandboxes.ExecsPage](ctx, c, request{method: http.MethodGet, path: at(id, "exec")}, nil)
	return page.Execs, err
}

// Follow copies the outputs of an exec from offsets on until it has ended, and returns
// its state. When the connection is lost, the offsets say where to go on; Errors:
// ErrCutOff, and sandbox.ErrEnded when the sandbox ends under it.
func (c *Client) Follow(ctx context.Context, id, exec string, out, errOff *int64, stdout, stderr io.Writer) (sandbox.ExecState, error) {
	q := url.Values{"stdout": {strconv.FormatInt(*out, 10)}, "stderr": {strconv.FormatInt(*errOff, 10)}}
	resp, err := c.do(ctx, request{method: http.MethodGet, path: at(id, "exec", exec, "stream"), query: q})
	if err != nil {
		return sandbox.ExecState{}, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20) // a frame is 256 KiB, in base64
	for lines.Scan() {
		var f sandboxes.Frame
		if err := json.Unmarshal(lines.Bytes(), &f); err != nil {
			return sandbox.ExecState{}, fmt.Errorf("%w: %w", ErrCutOff, err)
		}
		switch f.T {
		case "out":
			err = take(f, out, stdout)
		case "err":
			err = take(f, errOff, stderr)
		case "exit":
			if f.State == nil {
				return sandbox.ExecState{}, ErrCutOff
			}
			return *f.State, nil
		case "error":
			if f.Error == nil {
				return sandbox.ExecState{}, ErrCutOff
			}
			return sandbox.ExecState{}, withEnd(f.Error)
		}
		if err != nil {
			return sandbox.ExecState{}, err
		}
	}
	return sandbox.ExecState{}, errors.Join(ErrCutOff, lines.Err())
}

// take writes what is new in a frame.
func take(f sandboxes.Frame, at *int64, w io.Writer) error {
	if f.Offset != *at {
		return fmt.Errorf("%w: bytes from %d on where %d was to come", ErrCutOff, f.Offset, *at)
	}
	n, err := w.Write(f.Data)
	*at += int64(n)
	return err
}

// Output copies what is kept of a stream from an offset on, and returns the next one,
// after an error too. Errors: ErrCutOff, and what the worker says that failed.
func (c *Client) Output(ctx context.Context, id, exec, stream string, offset int64, w io.Writer) (int64, error) {
	q := url.Values{"stream": {stream}, "offset": {strconv.FormatInt(offset, 10)}}
	resp, err := c.do(ctx, request{method: http.MethodGet, path: at(id, "exec", exec, "output"), query: q})
	if err != nil {
		return offset, err
	}
	defer resp.Body.Close()
	n, err := io.Copy(w, body{resp.Body})
	if err == nil {
		err = failed(resp)
	}
	if next := resp.Header.Get(sandboxes.HeaderNext); err == nil && next != strconv.FormatInt(offset+n, 10) {
		err = fmt.Errorf("%w: it ends at %d, where the worker says %q", ErrCutOff, offset+n, next)
	}
	return offset + n, err
}

// Stdin gives an exec what follows on its stdin.
func (c *Client) Stdin(ctx context.Context, id, exec string, offset int64, r io.Reader, end bool) (int64, error) {
	q := url.Values{"offset": {strconv.FormatInt(offset, 10)}, "end": {strconv.FormatBool(end)}}
	a, err := call[sandboxes.StdinAnswer](ctx, c, request{method: http.MethodPost, path: at(id, "exec", exec, "stdin"), query: q, body: r, size: -1}, nil)
	return a.Next, err
}

// Signal sends a signal to the processes of an exec.
func (c *Client) Signal(ctx context.Context, id, exec string, signal int) error {
	_, err := call[struct{}](ctx, c, request{method: http.MethodPost, path: at(id, "exec", exec, "signal")}, sandboxes.SignalRequest{Signal: signal})
	return err
}

// Resize changes the size of an exec's terminal.
func (c *Client) Resize(ctx context.Context, id, exec string, w sandbox.Window) error {
	_, err := call[struct{}](ctx, c, request{method: http.MethodPost, path: at(id, "exec", exec, "resize")}, w)
	return err
}

// Events calls fn with each event after a sequence number until ctx or the worker ends.
// Errors: ErrCutOff, and what the worker says when it ends the stream.
func (c *Client) Events(ctx context.Context, after uint64, id string, fn func(sandbox.Event) error) error {
	q := url.Values{"after": {strconv.FormatUint(after, 10)}}
	set(q, "sandbox", id)
	resp, err := c.do(ctx, request{method: http.MethodGet, path: "/v1/events", query: q})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	kind := ""
	for lines.Scan() {
		if name, ok := cutPrefix(lines.Bytes(), "event: "); ok {
			kind = string(name)
		}
		data, ok := cutPrefix(lines.Bytes(), "data: ")
		if !ok {
			continue
		}
		if kind == sandboxes.EventError {
			return told(data)
		}
		var e sandbox.Event
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("%w: %w", ErrCutOff, err)
		}
		if err := fn(e); err != nil {
			return err
		}
	}
	return errors.Join(ErrCutOff, lines.Err())
}

func cutPrefix(b []byte, prefix string) ([]byte, bool) {
	if len(b) < len(prefix) || string(b[:len(prefix)]) != prefix {
		return nil, false
	}
	return b[len(prefix):], true
}
