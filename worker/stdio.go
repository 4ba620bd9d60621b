package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// stdio connects a command's standard streams. They are pipes, or one pty: runsc
// writes a regular file at an offset of its own, so two writers to one file
// would overwrite each other.
type stdio struct {
	c       Command
	console *net.UnixListener // where runsc sends the pty's master, nil without one
	master  *os.File
	guest   []*os.File // the guest's ends of stdin, stdout, stderr
	stdin   *os.File   // our ends
	outputs []*os.File
}

func newStdio(dir string, c Command) (*stdio, error) {
	s := &stdio{c: c}
	if c.Terminal {
		return s, s.listenConsole(dir)
	}
	for fd := range 3 {
		r, w, err := os.Pipe()
		if err != nil {
			s.close()
			return nil, err
		}
		if fd == 0 {
			s.stdin, s.guest = w, append(s.guest, r)
			continue
		}
		s.outputs, s.guest = append(s.outputs, r), append(s.guest, w)
	}
	return s, nil
}

func (s *stdio) listenConsole(dir string) (err error) {
	s.console, err = net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "tty"), Net: "unix"})
	return err
}

func (s *stdio) runArgs() []string {
	if s.console == nil {
		return nil
	}
	return []string{"--console-socket", s.console.Addr().String()}
}

// guestFiles returns what runsc gets as its own streams: they become the guest's.
func (s *stdio) guestFiles() (stdin io.Reader, stdout, stderr io.Writer) {
	if s.console != nil {
		return nil, nil, nil
	}
	return s.guest[0], s.guest[1], s.guest[2]
}

// connect starts to feed the command's stdin. The copy is not waited for: it may
// be blocked in a read of our own stdin, which nothing can interrupt; it ends
// with its next write after close, or with this process.
func (s *stdio) connect() {
	if s.console != nil {
		return
	}
	go func() {
		if s.c.Stdin != nil {
			io.Copy(s.stdin, s.c.Stdin)
		}
		s.stdin.Close()
	}()
}

// closeGuest closes our copies of the guest's ends, so that its end is seen.
func (s *stdio) closeGuest() {
	for _, f := range s.guest {
		f.Close()
	}
	s.guest = nil
}

// attach finishes the connection once runsc has started the command.
func (s *stdio) attach(ctx context.Context) error {
	if s.console == nil {
		return nil
	}
	deadline := time.Now().Add(5 * time.Second)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	s.console.SetDeadline(deadline)
	conn, err := s.console.AcceptUnix()
	if err != nil {
		return fmt.Errorf("runsc did not hand over the pty: %w", err)
	}
	defer conn.Close()
	s.master, err = receiveFile(conn)
	return err
}

// receiveFile reads the one descriptor that a console socket message carries.
func receiveFile(conn *net.UnixConn) (*os.File, error) {
	name, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(name, oob)
	if err != nil {
		return nil, fmt.Errorf("receive the pty: %w", err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		return nil, fmt.Errorf("receive the pty: %d control messages: %w", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("receive the pty: %d descriptors: %w", len(fds), err)
	}
	unix.CloseOnExec(fds[0])
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pty"), nil
}

// copyOutput copies until the command and all its children have closed their
// output.
func (s *stdio) copyOutput() error {
	if s.console != nil {
		return s.copyTerminal()
	}
	var g errgroup.Group
	for i, w := range []io.Writer{s.c.Stdout, s.c.Stderr} {
		g.Go(func() error {
			_, err := io.Copy(w, s.outputs[i])
			if err != nil {
				// Nobody reads any more: the command gets SIGPIPE, as in a shell.
				s.outputs[i].Close()
			}
			if errors.Is(err, syscall.EPIPE) {
				return nil
			}
			return err
		})
	}
	return g.Wait()
}

func (s *stdio) copyTerminal() error {
	tty, ok := s.c.Stdin.(*os.File)
	if ok && term.IsTerminal(int(tty.Fd())) {
		old, err := term.MakeRaw(int(tty.Fd()))
		if err != nil {
			return err
		}
		defer term.Restore(int(tty.Fd()), old)
		resized := make(chan os.Signal, 1)
		signal.Notify(resized, syscall.SIGWINCH)
		defer signal.Stop(resized)
		resized <- syscall.SIGWINCH
		go func() { // ends with this process: signal.Stop leaves the channel open
			for range resized {
				pty.InheritSize(tty, s.master)
			}
		}()
	}
	if s.c.Stdin != nil {
		go io.Copy(s.master, s.c.Stdin) // ends as in connect
	}
	_, err := io.Copy(s.c.Stdout, s.master)
	if errors.Is(err, syscall.EIO) { // how a pty says that the other side is closed
		return nil
	}
	return err
}

func (s *stdio) close() {
	s.closeGuest()
	if s.console != nil {
		s.console.Close()
	}
	for _, f := range append(s.outputs, s.stdin, s.master) {
		if f != nil {
			f.Close()
		}
	}
}
