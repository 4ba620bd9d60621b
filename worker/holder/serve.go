package holder

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/fdpass"
	"quarry/worker/sandbox"
)

const (
	// maxConns bounds the daemon's connections. Each waiting call has one.
	maxConns = 1024
	// writeTimeout bounds how long an answer may wait for its reader.
	writeTimeout = time.Minute
	// lingerTimeout is how long a holder waits for Release after the end.
	lingerTimeout = time.Hour
	// folderPoll is how often it looks then whether its folder is still there.
	folderPoll = time.Second
)

// server answers on holder.sock.
type server struct {
	box      *box
	released chan struct{}
	once     sync.Once
	conns    chan struct{} // an element a connection
}

// socketPath is where a holder listens.
func socketPath(dir string) string { return filepath.Join(dir, "holder.sock") }

// listen makes the socket, however long the folder's path is.
func listen(dir string) (*net.UnixListener, error) {
	f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	name := fmt.Sprintf("/proc/self/fd/%d/holder.sock", f.Fd())
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // by a name that is of this moment
	return l, os.Chmod(name, 0o600)
}

// serve accepts until the listener is closed.
func (s *server) serve(l *net.UnixListener, log *slog.Logger) {
	for {
		c, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			log.Warn("connection not accepted", "err", err)
			time.Sleep(folderPoll / 10) // no descriptors: some will be free
			continue
		}
		select {
		case s.conns <- struct{}{}:
			go func() { // ends with the connection
				defer func() { <-s.conns }()
				defer c.Close()
				s.talk(c)
			}()
		default:
			c.Close()
		}
	}
}

type incoming struct {
	body  []byte
	files []*os.File
}

// talk answers one call after another. The next one is read while one is answered,
// so that a caller that hangs up is seen.
func (s *server) talk(c *net.UnixConn) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	calls := make(chan incoming)
	go func() { // ends with the connection, which talk closes
		defer close(calls)
		defer cancel()
		for {
			body, files, err := receive(c)
			if err != nil {
				return
			}
			select {
			case calls <- incoming{body, files}:
			case <-ctx.Done():
				fdpass.Close(files)
				return
			}
		}
	}()
	defer c.Close()
	for in := range calls {
		a, out := s.answer(ctx, in)
		fdpass.Close(in.files)
		c.SetWriteDeadline(time.Now().Add(writeTimeout))
		err := send(c, marshal(a), out)
		fdpass.Close(out)
		if err != nil || ctx.Err() != nil {
			return
		}
	}
}

func (s *server) answer(ctx context.Context, in incoming) (answer, []*os.File) {
	r, err := decodeRequest(in.body)
	if err != nil {
		return refuse(fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)), nil
	}
	a, out, err := s.call(ctx, r, in.files)
	if err != nil {
		return refuse(err), nil
	}
	return a, out
}

// waiting bounds a call that waits by what its caller said.
func waiting(ctx context.Context, r request) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Duration(min(max(r.Wait, 0), maxWait.Milliseconds()))*time.Millisecond)
}

// maxWait bounds one wait at the holder; the client asks again.
const maxWait = time.Minute

func (s *server) call(ctx context.Context, r request, files []*os.File) (a answer, out []*os.File, err error) {
	b := s.box
	switch r.Method {
	case "state":
		st := b.current()
		a.State = &st
	case "settled":
		if err := b.gate.close(ctx); err != nil {
			return a, nil, err
		}
		st := b.current()
		b.gate.open()
		a.State = &st
	case "wait_ended":
		ctx, cancel := waiting(ctx, r)
		defer cancel()
		if e, err := b.waitEnded(ctx); err == nil {
			a.Ended = &e
		}
	case "end":
		e, err := b.stop(ctx)
		return answer{Ended: &e}, nil, err
	case "release":
		return a, nil, s.release()
	case "pause":
		err = b.pause(ctx, r.Force)
	case "resume":
		err = b.resume(ctx)
	case "hibernate":
		a.Bytes, err = b.hibernate(ctx)
	case "wake":
		err = b.wake(ctx)
	case "helper":
		a.Status, err = b.helper(ctx, r, files)
	default:
		if r.Exec != "" || r.Spec != nil || r.Method == "execs" {
			return b.execCall(ctx, r)
		}
		return b.sentryCall(ctx, r, files)
	}
	return a, nil, err
}

// release lets the process go once the sandbox has ended.
func (s *server) release() error {
	select {
	case <-s.box.ended:
		s.once.Do(func() { close(s.released) })
		return nil
	default:
		return fmt.Errorf("%w: the sandbox has not ended", sandbox.ErrInvalid)
	}
}

// execsPage is how many execs are told at once.
const execsPage = 1000

// execCall answers what is about execs.
func (b *box) execCall(ctx context.Context, r request) (a answer, _ []*os.File, err error) {
	switch r.Method {
	case "exec":
		if r.Spec == nil || r.Process == nil {
			return a, nil, fmt.Errorf("%w: no command", sandbox.ErrInvalid)
		}
		st, err := b.exec(ctx, *r.Spec, *r.Process)
		return answer{Exec: &st}, nil, err
	case "execs":
		b.mu.Lock()
		order := b.order
		b.mu.Unlock()
		order = order[min(max(r.Offset, 0), int64(len(order))):]
		for _, x := range order[:min(len(order), execsPage)] {
			st, _ := x.snapshot()
			a.Execs = append(a.Execs, st)
		}
		return a, nil, nil
	}
	x, err := b.find(r.Exec)
	if err != nil {
		return a, nil, err
	}
	switch r.Method {
	case "wait_exec":
		ctx, cancel := waiting(ctx, r)
		defer cancel()
		st := x.await(ctx, r.Out, r.Err)
		a.Exec = &st
	case "stdin":
		ctx, cancel := waiting(ctx, r)
		defer cancel()
		a.Offset, err = x.give(ctx, r.Offset, r.Data, r.End)
	case "signal":
		err = x.signal(ctx, r.Signal)
	case "resize":
		err = x.resize(ctx, r.Window)
	case "blame":
		x.blame(r.Path)
	default:
		err = fmt.Errorf("%w: no method %q", sandbox.ErrInvalid, plain(r.Method))
	}
	return a, nil, err
}

// await returns when the exec has ended or has more output than out and err.
func (x *execution) await(ctx context.Context, out, err int64) sandbox.ExecState {
	for {
		st, changed := x.snapshot()
		if st.State == sandbox.ExecExited || st.State == sandbox.ExecUnknown || st.Stdout.Kept > out || st.Stderr.Kept > err {
			return st
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return st
		}
	}
}

// give writes to the exec's stdin.
func (x *execution) give(ctx context.Context, offset int64, data []byte, end bool) (int64, error) {
	select {
	case <-x.started:
	case <-ctx.Done():
		return offset, nil
	}
	if x.stdin == nil {
		return 0, fmt.Errorf("%w: it has no stdin: start it with open_stdin", sandbox.ErrExecEnded)
	}
	return x.stdin.write(ctx, offset, data, end)
}

func (x *execution) resize(ctx context.Context, w *sandbox.Window) error {
	if w == nil || x.spec.PTY == nil {
		return fmt.Errorf("%w: it has no terminal: start it with pty", sandbox.ErrInvalid)
	}
	select {
	case <-x.started:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	x.mu.Lock()
	over, pid := x.final(), x.state.PID
	x.mu.Unlock()
	if over {
		return sandbox.ErrExecEnded
	}
	if err := resize(x.terminal, *w); err != nil {
		return err
	}
	return x.deliver(ctx, pid, int(unix.SIGWINCH)) // the host has nobody to send it to
}

// sentryCall passes on what only the Sentry knows.
func (b *box) sentryCall(ctx context.Context, r request, files []*os.File) (a answer, out []*os.File, err error) {
	done, err := b.asking()
	if err != nil {
		return a, nil, err
	}
	defer done()
	switch r.Method {
	case "processes":
		a.Processes, err = b.sentry.Processes(ctx)
		a.Processes = a.Processes[:min(len(a.Processes), maxProcesses)]
	case "usage":
		u, failed := b.sentry.Usage(ctx)
		a.Usage, err = &u, failed
	case "reduce":
		err = b.sentry.Reduce(ctx, true)
	case "memory":
		f, failed := b.sentry.MemoryFile(ctx)
		if failed == nil {
			out = []*os.File{f}
		}
		err = failed
	case "cat":
		if len(files) != 1 {
			return a, nil, fmt.Errorf("%w: cat needs one file", sandbox.ErrInvalid)
		}
		err = b.cat(ctx, r.Path, files[0])
	case "mount":
		if len(files) != 1 {
			return a, nil, fmt.Errorf("%w: a mount needs one image", sandbox.ErrInvalid)
		}
		err = b.sentry.Mount(ctx, r.Path, files[0])
	default:
		return a, nil, fmt.Errorf("%w: no method %q", sandbox.ErrInvalid, plain(r.Method))
	}
	if err != nil {
		err = b.sentryError(err)
	}
	return a, out, err
}

// maxProcesses is how many are told of: a list has to fit a message.
const maxProcesses = 20_000
