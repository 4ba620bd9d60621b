package holder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/fdpass"
	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// MaxCall is longer than any call takes of those that have a sandbox stand or run, whatever
// its Sentry does: a command that starts goes before (2 minutes), and a pause that is undone
// (40 s), and then at most a checkpoint or a restore (10 minutes); and as much again for a
// machine that is short of everything. A holder that has not answered by then is of no use.
const MaxCall = 2 * (StartTimeout + pauseTimeout + undoTimeout + resumeTimeout + max(checkpointTimeout, restoreTimeout))

// maxIdle is how many connections a client keeps for its next calls.
const maxIdle = 4

// Client calls the holder of one sandbox. Its methods may be used by many
// goroutines at once. A call that is given up leaves what it began going on, but
// RunHelper.
//
// Every method may return ErrLost, and those that need a running sandbox
// sandbox.ErrEnded once it has ended.
type Client struct {
	dir string

	mu     sync.Mutex // guards what follows
	idle   []*net.UnixConn
	closed bool
}

func newClient(dir string) *Client { return &Client{dir: dir} }

// Connect finds the holder that a daemon before this one started in dir.
func Connect(ctx context.Context, dir string) (*Client, error) {
	c := newClient(dir)
	if _, err := c.State(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close ends the idle connections. The holder goes on.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.idle {
		k.Close()
	}
	c.idle, c.closed = nil, true
}

func (c *Client) take(ctx context.Context) (*net.UnixConn, error) {
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		k := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		return k, nil
	}
	c.mu.Unlock()
	return sentry.Dial(ctx, socketPath(c.dir))
}

func (c *Client) give(k *net.UnixConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle) >= maxIdle {
		k.Close()
		return
	}
	c.idle = append(c.idle, k)
}

// call makes one call and returns its answer, whose error is the error.
func (c *Client) call(ctx context.Context, r request, files ...*os.File) (answer, []*os.File, error) {
	k, err := c.take(ctx)
	if err != nil {
		return answer{}, nil, lostOr(ctx, err)
	}
	a, out, err := exchange(ctx, k, r, files)
	if err != nil {
		k.Close()
		return answer{}, nil, fmt.Errorf("%s: %w", r.Method, lostOr(ctx, err))
	}
	c.give(k)
	if err := a.error(); err != nil {
		fdpass.Close(out)
		return answer{}, nil, err
	}
	return a, out, nil
}

// exchange sends a request and reads its answer; the end of ctx ends it, and the
// connection.
func exchange(ctx context.Context, k *net.UnixConn, r request, files []*os.File) (a answer, out []*os.File, err error) {
	if err := k.SetDeadline(time.Time{}); err != nil {
		return a, nil, err
	}
	stop := context.AfterFunc(ctx, func() { k.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := send(k, marshal(r), files); err != nil {
		return a, nil, err
	}
	body, out, err := receive(k)
	if err != nil {
		return a, nil, err
	}
	// Fields that this program does not know are those of a newer holder.
	if err := json.Unmarshal(body, &a); err != nil {
		fdpass.Close(out)
		return a, nil, fmt.Errorf("%w: %w", errWire, err)
	}
	if !stop() {
		fdpass.Close(out)
		return a, nil, context.Cause(ctx) // the connection has no time left
	}
	return a, out, nil
}

// lostOr makes ErrLost of an error of a holder that is gone.
func lostOr(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for _, lost := range []error{io.EOF, io.ErrUnexpectedEOF, unix.ECONNREFUSED, unix.ENOENT, unix.ECONNRESET, unix.EPIPE} {
		if errors.Is(err, lost) {
			return fmt.Errorf("%w: %w", ErrLost, err)
		}
	}
	return err
}

// State returns what the holder knows.
func (c *Client) State(ctx context.Context) (State, error) {
	a, _, err := c.call(ctx, request{Method: "state"})
	if err != nil {
		return State{}, err
	}
	if a.State == nil {
		return State{}, errWire
	}
	return *a.State, nil
}

// Settled is State once no pause, hibernation or wake is under way.
func (c *Client) Settled(ctx context.Context) (State, error) {
	a, _, err := c.call(ctx, request{Method: "settled"})
	if err != nil {
		return State{}, err
	}
	if a.State == nil {
		return State{}, errWire
	}
	return *a.State, nil
}

// pollEvery bounds one wait at the holder; the client asks again.
const pollEvery = 30 * time.Second

// WaitEnded returns when the sandbox has ended.
func (c *Client) WaitEnded(ctx context.Context) (Ended, error) {
	for {
		a, _, err := c.call(ctx, request{Method: "wait_ended", Wait: pollEvery.Milliseconds()})
		if err != nil {
			return Ended{}, err
		}
		if a.Ended != nil {
			return *a.Ended, nil
		}
	}
}

// End kills the sandbox and returns when its processes are gone.
func (c *Client) End(ctx context.Context) (Ended, error) {
	a, _, err := c.call(ctx, request{Method: "end"})
	if err != nil {
		return Ended{}, err
	}
	if a.Ended == nil {
		return Ended{}, errWire
	}
	return *a.Ended, nil
}

// Release lets the holder of a sandbox that has ended go: what it knew stands in
// ended.json and the records of execs. A holder also goes when its folder is
// removed, or an hour after the end.
func (c *Client) Release(ctx context.Context) error {
	_, _, err := c.call(ctx, request{Method: "release"})
	if errors.Is(err, ErrLost) {
		return nil // it went before its answer
	}
	return err
}

func (c *Client) execCall(ctx context.Context, r request) (sandbox.ExecState, error) {
	a, _, err := c.call(ctx, r)
	if err != nil {
		return sandbox.ExecState{}, err
	}
	if a.Exec == nil {
		return sandbox.ExecState{}, errWire
	}
	return *a.Exec, nil
}

// Exec starts a command, at most once: a second call with the same id and the same
// spec returns the state of the first, and one with another spec is
// sandbox.ErrExecConflict. A program that cannot run is no error, but a state.
// Errors: ErrPaused, sandbox.ErrInvalid, sandbox.ErrCapacity.
func (c *Client) Exec(ctx context.Context, s sandbox.ExecSpec, p Process) (sandbox.ExecState, error) {
	return c.execCall(ctx, request{Method: "exec", Spec: &s, Process: &p})
}

// stateTimeout bounds the question for a state when the caller's time is over.
const stateTimeout = 10 * time.Second

// WaitExec returns when the exec has ended, exited or unknown, or keeps more than
// out and err bytes of output; or, with the state as it is, when ctx ends.
func (c *Client) WaitExec(ctx context.Context, exec string, out, err int64) (sandbox.ExecState, error) {
	for {
		r := request{Method: "wait_exec", Exec: exec, Out: out, Err: err, Wait: pollEvery.Milliseconds()}
		if ctx.Err() == nil {
			st, failed := c.execCall(ctx, r)
			if failed == nil && (st.State == sandbox.ExecExited || st.State == sandbox.ExecUnknown || st.Stdout.Kept > out || st.Stderr.Kept > err) {
				return st, nil
			}
			if failed != nil && ctx.Err() == nil {
				return st, failed
			}
			continue
		}
		r.Wait = 0
		now, cancel := context.WithTimeout(context.WithoutCancel(ctx), stateTimeout)
		defer cancel()
		return c.execCall(now, r)
	}
}

// Execs returns the state of every exec, in order of their start.
func (c *Client) Execs(ctx context.Context) (all []sandbox.ExecState, err error) {
	for {
		a, _, err := c.call(ctx, request{Method: "execs", Offset: int64(len(all))})
		if err != nil {
			return nil, err
		}
		all = append(all, a.Execs...)
		if len(a.Execs) < execsPage {
			return all, nil
		}
	}
}

// stdinWait is how long the holder tries to write in one call: less than a caller
// waits, so that the offset comes back.
const stdinWait = 5 * time.Second

// Stdin gives an exec what follows on its stdin at an offset and returns the next
// offset; end closes it after. Bytes of ExecSpec.Stdin count. It waits while the
// command does not read, until ctx ends: the offset then says how much was taken,
// as far as is known. Errors: sandbox.ErrStdinOffset, sandbox.ErrExecEnded.
func (c *Client) Stdin(ctx context.Context, exec string, offset int64, data []byte, end bool) (int64, error) {
	next := offset
	for {
		part := data[min(next-offset, int64(len(data))):]
		last := len(part) <= MaxStdin
		part = part[:min(len(part), MaxStdin)]
		r := request{Method: "stdin", Exec: exec, Offset: next, Data: part, End: end && last, Wait: stdinWait.Milliseconds()}
		a, _, err := c.call(ctx, r)
		if err != nil {
			if ctx.Err() != nil {
				err = nil
			}
			return next, err
		}
		next = max(next, a.Offset)
		if next >= offset+int64(len(data)) && (last || !end) {
			return next, nil
		}
	}
}

// Signal sends a signal to the process group of an exec, or to what runs in front on
// its terminal; SIGKILL goes to all of its processes.
func (c *Client) Signal(ctx context.Context, exec string, signal int) error {
	_, _, err := c.call(ctx, request{Method: "signal", Exec: exec, Signal: signal})
	return err
}

// Resize gives the terminal of an exec another size.
func (c *Client) Resize(ctx context.Context, exec string, w sandbox.Window) error {
	_, _, err := c.call(ctx, request{Method: "resize", Exec: exec, Window: &w})
	return err
}

// Blame notes why the node may be to blame for how an exec ended: see ExecState.Infra.
func (c *Client) Blame(ctx context.Context, exec, why string) error {
	_, _, err := c.call(ctx, request{Method: "blame", Exec: exec, Path: why})
	return err
}

// Pause stops the guest. It is ErrBusy while an exec of role tool or a helper runs,
// unless force is set, and when the guest does not stop within a moment; it runs
// on then. A paused sandbox stays so: that is no error.
func (c *Client) Pause(ctx context.Context, force bool) error {
	_, _, err := c.call(ctx, request{Method: "pause", Force: force})
	return err
}

// Resume lets a paused guest go on. One that is not paused stays so: that is no
// error.
func (c *Client) Resume(ctx context.Context) error {
	_, _, err := c.call(ctx, request{Method: "resume"})
	return err
}

// Hibernate puts a paused sandbox to disk and returns how many bytes that takes there;
// nothing of it runs then. One that is hibernated stays so: that is no error. Refused, it
// stays paused. Errors: ErrNotHibernated, which says why.
func (c *Client) Hibernate(ctx context.Context) (int64, error) {
	a, _, err := c.call(ctx, request{Method: "hibernate"})
	return a.Bytes, err
}

// Wake restores a hibernated sandbox, which runs then, with no pause left. One that is
// not hibernated stays as it is: that is no error. Errors: ErrNoRoom, after which it is
// hibernated still; ErrNotRestored, after which the sandbox has ended.
func (c *Client) Wake(ctx context.Context) error {
	_, _, err := c.call(ctx, request{Method: "wake"})
	return err
}

// RunHelper runs a program of the host in the guest and returns its exit status
// when it has ended. It is killed when ctx ends. The streams stay the caller's: to
// see the end of a pipe that the helper writes to, close the own end of it when
// RunHelper has returned.
func (c *Client) RunHelper(ctx context.Context, h Helper) (sentry.Status, error) {
	r := request{Method: "helper", Process: &h.Process}
	var files []*os.File
	for fd, f := range []*os.File{h.Stdin, h.Stdout, h.Stderr} {
		if f != nil {
			r.Streams, files = append(r.Streams, fd), append(files, f)
		}
	}
	if h.Program == nil {
		return sentry.Status{}, fmt.Errorf("%w: a helper without a program", sandbox.ErrInvalid)
	}
	a, _, err := c.call(ctx, r, append(files, h.Program)...)
	if err != nil {
		return sentry.Status{}, err
	}
	if a.Status == nil {
		return sentry.Status{}, errWire
	}
	return *a.Status, nil
}

// Cat writes a file of the guest to out, without a task of the guest: it works in
// a paused sandbox. It follows links and waits at a fifo until ctx ends; out is to
// be closed then.
func (c *Client) Cat(ctx context.Context, path string, out *os.File) error {
	_, _, err := c.call(ctx, request{Method: "cat", Path: path}, out)
	return err
}

// Mount mounts an image of plain EROFS at a folder or file of the guest, read-only.
func (c *Client) Mount(ctx context.Context, image *os.File, target string) error {
	_, _, err := c.call(ctx, request{Method: "mount", Path: target}, image)
	return err
}

// Processes lists those of the guest.
func (c *Client) Processes(ctx context.Context) ([]sentry.Process, error) {
	a, _, err := c.call(ctx, request{Method: "processes"})
	return a.Processes, err
}

// Usage returns what the Sentry counts.
func (c *Client) Usage(ctx context.Context) (sentry.Usage, error) {
	a, _, err := c.call(ctx, request{Method: "usage"})
	if err != nil {
		return sentry.Usage{}, err
	}
	if a.Usage == nil {
		return sentry.Usage{}, errWire
	}
	return *a.Usage, nil
}

// MemoryFile returns the guest's memory as a file: a right to all that is in it.
func (c *Client) MemoryFile(ctx context.Context) (*os.File, error) {
	_, files, err := c.call(ctx, request{Method: "memory"})
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		fdpass.Close(files)
		return nil, errWire
	}
	return files[0], nil
}

// Reduce makes the Sentry give back memory that it can do without.
func (c *Client) Reduce(ctx context.Context) error {
	_, _, err := c.call(ctx, request{Method: "reduce"})
	return err
}
