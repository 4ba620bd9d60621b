package holder

import (
	"context"
	"os"
	"time"

	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// Client calls the holder of one sandbox. Its methods may be used by many
// goroutines at once. A call that is given up leaves what it began going on.
//
// Every method may return ErrLost, and those that need a running sandbox
// sandbox.ErrEnded once it has ended.
type Client struct{ dir string }

// Start starts a holder, which starts the sandbox, and returns when its first
// process runs. When it does not, nothing of it is left but the folder's files,
// and the error is sandbox.ErrRuntime with what runsc said.
func Start(ctx context.Context, c Config) (*Client, Timings, error) {
	return nil, Timings{}, sandbox.ErrUnsupported
}

// Connect finds the holder that a daemon before this one started in dir.
func Connect(ctx context.Context, dir string) (*Client, error) { return nil, sandbox.ErrUnsupported }

// Close ends the connections. The holder goes on.
func (c *Client) Close() {}

// State returns what the holder knows.
func (c *Client) State(ctx context.Context) (State, error) { return State{}, sandbox.ErrUnsupported }

// WaitEnded returns when the sandbox has ended.
func (c *Client) WaitEnded(ctx context.Context) (Ended, error) {
	return Ended{}, sandbox.ErrUnsupported
}

// End kills the sandbox and returns when its processes are gone.
func (c *Client) End(ctx context.Context) (Ended, error) { return Ended{}, sandbox.ErrUnsupported }

// Release lets the holder of a sandbox that has ended go: what it knew stands in
// ended.json and the records of execs. A holder also goes when its folder is
// removed, or an hour after the end.
func (c *Client) Release(ctx context.Context) error { return sandbox.ErrUnsupported }

// ReadEnded reads how a sandbox ended from its folder. It is ErrLost when nothing
// was written: the holder was killed.
func ReadEnded(dir string) (Ended, error) { return Ended{}, sandbox.ErrUnsupported }

// ReadExecs reads the records of a sandbox's execs from its folder. One that had
// not ended when its holder was lost is ExecUnknown.
func ReadExecs(dir string) ([]sandbox.ExecState, error) { return nil, sandbox.ErrUnsupported }

// Exec starts a command, at most once: a second call with the same id and the same
// spec returns the state of the first, and one with another spec is
// sandbox.ErrExecConflict. A program that cannot run is no error, but a state.
// Errors: ErrPaused, sandbox.ErrInvalid, sandbox.ErrCapacity.
func (c *Client) Exec(ctx context.Context, s sandbox.ExecSpec, p Process) (sandbox.ExecState, error) {
	return sandbox.ExecState{}, sandbox.ErrUnsupported
}

// WaitExec returns when the exec is Done or has more than out and err bytes of
// output, kept and dropped; or, with the state as it is, when ctx ends.
func (c *Client) WaitExec(ctx context.Context, exec string, out, err int64) (sandbox.ExecState, error) {
	return sandbox.ExecState{}, sandbox.ErrUnsupported
}

// Execs returns the state of every exec, in order of their start.
func (c *Client) Execs(ctx context.Context) ([]sandbox.ExecState, error) {
	return nil, sandbox.ErrUnsupported
}

// Stdin gives an exec what follows on its stdin at an offset and returns the next
// offset; end closes it after. It waits while the command does not read, until ctx
// ends: the offset then says how much was taken. Errors: sandbox.ErrStdinOffset,
// sandbox.ErrExecEnded.
func (c *Client) Stdin(ctx context.Context, exec string, offset int64, data []byte, end bool) (int64, error) {
	return 0, sandbox.ErrUnsupported
}

// Signal sends a signal to the process group of an exec; SIGKILL goes to all of its
// processes.
func (c *Client) Signal(ctx context.Context, exec string, signal int) error {
	return sandbox.ErrUnsupported
}

// Resize gives the terminal of an exec another size.
func (c *Client) Resize(ctx context.Context, exec string, w sandbox.Window) error {
	return sandbox.ErrUnsupported
}

// Pause stops the guest. It is ErrBusy while an exec of role tool runs, unless
// force is set, and when the guest does not stop within a moment; it runs on
// then. A paused sandbox stays so: that is no error.
func (c *Client) Pause(ctx context.Context, force bool) error { return sandbox.ErrUnsupported }

// Resume lets a paused guest go on. One that is not paused stays so: that is no
// error.
func (c *Client) Resume(ctx context.Context) error { return sandbox.ErrUnsupported }

// RunHelper runs a program of the host in the guest and returns its exit status
// when it has ended. It is killed when ctx ends.
func (c *Client) RunHelper(ctx context.Context, h Helper) (sentry.Status, error) {
	return sentry.Status{}, sandbox.ErrUnsupported
}

// Cat writes a file of the guest to out, without a task of the guest: it works in
// a paused sandbox. It follows links and waits at a fifo until ctx ends; out is to
// be closed then.
func (c *Client) Cat(ctx context.Context, path string, out *os.File) error {
	return sandbox.ErrUnsupported
}

// Processes lists those of the guest.
func (c *Client) Processes(ctx context.Context) ([]sentry.Process, error) {
	return nil, sandbox.ErrUnsupported
}

// Usage returns what the Sentry counts.
func (c *Client) Usage(ctx context.Context) (sentry.Usage, error) {
	return sentry.Usage{}, sandbox.ErrUnsupported
}

// MemoryFile returns the guest's memory as a file: a right to all that is in it.
func (c *Client) MemoryFile(ctx context.Context) (*os.File, error) {
	return nil, sandbox.ErrUnsupported
}

// Reduce makes the Sentry give back memory that it can do without.
func (c *Client) Reduce(ctx context.Context) error { return sandbox.ErrUnsupported }

// pollEvery bounds one wait at the holder; the client asks again.
const pollEvery = 30 * time.Second
