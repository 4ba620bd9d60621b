package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// run is Runner.Run, or Mounter.RunAdmin.
type run func(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (int, error)

// call is one helper at work.
type call struct {
	ctx    context.Context
	op     wire.Op
	idle   time.Duration
	in     *os.File // what it reads
	out    *os.File // what it answers
	frames *wire.Reader
	buf    []byte
	cancel context.CancelFunc
	done   chan struct{} // closed when Run has returned; then err and exit are set
	err    error
	exit   int
	guest  [3]*os.File // its ends, open until it has ended
}

// pipeSize is that of a helper's pipes: 16 frames of data on their way.
const pipeSize = 16 * wire.MaxData

// stopGrace is how long a helper that is given up has to end by itself, so that it
// removes the file that it was making.
const stopGrace = time.Second

// start runs the helper with a request. The caller ends the call, whatever happens.
func (f *Files) start(ctx context.Context, r run, q wire.Request) (*call, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if q.Op != wire.OpUnblock {
		f.free(ctx)
	}
	c := &call{ctx: ctx, op: q.Op, idle: f.c.Limits.Idle, done: make(chan struct{})}
	if err := c.pipes(); err != nil {
		c.closeAll()
		return nil, fmt.Errorf("pipes of the helper: %w", err)
	}
	c.frames = wire.NewReader(c)
	// The helper outlives ctx for a moment, see end.
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	// It ends with the helper, or when end cancels it.
	go func() {
		defer close(c.done)
		c.exit, c.err = r(runCtx, []string{Program}, c.guest[0], c.guest[1], c.guest[2])
		// Only now is the end of its answers the end for whoever reads them here.
		for _, p := range c.guest {
			p.Close()
		}
	}()
	if err := c.send(wire.KindRequest, q.Encode()); err != nil && !errors.Is(err, errGone) {
		c.end()
		return nil, err
	}
	return c, nil
}

func (c *call) pipes() error {
	var err error
	if c.guest[0], c.in, err = os.Pipe(); err != nil {
		return err
	}
	if c.out, c.guest[1], err = os.Pipe(); err != nil {
		return err
	}
	// What the Go runtime of the helper says when it ends badly is of no use to a caller.
	if c.guest[2], err = os.OpenFile(os.DevNull, os.O_WRONLY, 0); err != nil {
		return err
	}
	for _, p := range []*os.File{c.in, c.out} {
		grow(p)
	}
	return nil
}

// grow gives a pipe room; where a user's pipes have it all, it stays as it is.
func grow(p *os.File) {
	if rc, err := p.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) })
	}
}

func (c *call) closeAll() {
	for _, p := range append(c.guest[:], c.in, c.out) {
		if p != nil {
			p.Close()
		}
	}
}

// end stops the helper and waits for it. One that is writing gets SIGPIPE; one that
// makes a file finds that no more comes, and removes it.
func (c *call) end() {
	c.in.Close()
	c.out.Close()
	t := time.NewTimer(stopGrace)
	defer t.Stop()
	select {
	case <-c.done:
	case <-t.C:
	}
	c.cancel()
	<-c.done
}

// errGone is a helper that does not read any more. Why it says in its last frame.
var errGone = errors.New("the helper does not read")

// guard bounds one read or write of a pipe: by an idle time and by the caller's context.
func guard(ctx context.Context, idle time.Duration, set func(time.Time) error, do func() (int, error)) (int, error) {
	if err := set(time.Now().Add(idle)); err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { _ = set(time.Unix(1, 0)) })
	n, err := do()
	stop()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		if cerr := ctx.Err(); cerr != nil {
			return n, cerr
		}
		return n, fmt.Errorf("%w: nothing came of it for %v", sandbox.ErrFileStuck, idle)
	}
	return n, err
}

// Read reads what the helper answers, for package wire.
func (c *call) Read(p []byte) (int, error) {
	return guard(c.ctx, c.idle, c.out.SetReadDeadline, func() (int, error) { return c.out.Read(p) })
}

// send sends a frame.
func (c *call) send(k wire.Kind, payload []byte) error {
	c.buf = wire.AppendFrame(c.buf[:0], k, payload)
	_, err := guard(c.ctx, c.idle, c.in.SetWriteDeadline, func() (int, error) { return c.in.Write(c.buf) })
	if errors.Is(err, unix.EPIPE) || errors.Is(err, os.ErrClosed) {
		return errGone
	}
	return err
}

// next returns the helper's next frame, which is of one of the kinds. What it gave up
// with is the error.
func (c *call) next(kinds ...wire.Kind) (wire.Kind, []byte, error) {
	k, p, err := c.frames.Next()
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, wire.ErrFrame):
		return 0, nil, c.early(err)
	case err != nil:
		return 0, nil, err
	case k == wire.KindError:
		return 0, nil, refused(c.op, p)
	}
	for _, want := range kinds {
		if k == want {
			return k, p, nil
		}
	}
	return 0, nil, broken(fmt.Sprintf("frame %q out of turn", byte(k)))
}

// early says why a helper has ended before it said so.
func (c *call) early(err error) error {
	if err == io.EOF {
		<-c.done // only its end closes the pipe
		if c.err != nil {
			return c.err
		}
		return broken(fmt.Sprintf("it ended early, with exit status %d", c.exit))
	}
	return broken("a frame that cannot be")
}

// entry returns the next frame, which is an entry.
func (c *call) entry() (wire.Entry, error) {
	_, p, err := c.next(wire.KindEntry)
	if err != nil {
		return wire.Entry{}, err
	}
	return decodeEntry(p)
}

func decodeEntry(p []byte) (wire.Entry, error) {
	e, err := wire.DecodeEntry(p)
	if err != nil {
		return wire.Entry{}, broken("an entry that cannot be")
	}
	return e, nil
}

// ask is a call of one request and one answer.
func (f *Files) ask(ctx context.Context, r run, q wire.Request, want wire.Kind) ([]byte, error) {
	c, err := f.start(ctx, r, q)
	if err != nil {
		return nil, err
	}
	defer c.end()
	_, p, err := c.next(want)
	return p, err
}
