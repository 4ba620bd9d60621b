package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

type execOptions struct {
	node     nodeTarget
	sandbox  string
	spec     sandbox.ExecSpec
	timeout  time.Duration
	grace    time.Duration
	stdin    bool
	terminal bool
	detach   bool
}

func newExec() *cobra.Command {
	var o execOptions
	c := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] COMMAND [ARG…]",
		Short: "run a command in a sandbox of a worker",
		Long: `exec runs a command and copies its output; with -i it passes stdin on, with -t it gives the command a
terminal. When the connection to the worker is lost the command goes on, and exec takes its output up again.

Exit code: the command's own; 128+n when signal n ended it; 127 the sandbox has no such command; 126 it cannot
be executed; 125 quarry itself failed, or the command's --timeout was over.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) < 2 {
				return runError{usage(c, errors.New("give SANDBOX and COMMAND"))}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			o.sandbox, o.spec.Argv = args[0], args[1:]
			if args[1] == "--" {
				o.spec.Argv = args[2:]
			}
			err := runExec(c.Context(), o, c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr())
			if err != nil && !errors.As(err, new(exitStatus)) {
				return runError{err}
			}
			return err
		},
	}
	o.node.flags(c)
	f := c.Flags()
	f.SetInterspersed(false)
	f.StringVar(&o.spec.ID, "id", "", "id of the exec: the same id runs at most once (default a new one)")
	f.StringArrayVarP(&o.spec.Env, "env", "e", nil, "set K=V; may be repeated")
	f.StringVarP(&o.spec.WorkDir, "workdir", "w", "", "working directory")
	f.StringVarP(&o.spec.User, "user", "u", "", "USER[:GROUP], names or numbers, looked up in the sandbox's image")
	f.StringVar(&o.spec.Session, "session", "", "run COMMAND's words as one line of this bash session, which keeps its folder and variables")
	f.StringVar(&o.spec.Role, "role", "", "tool (default), or agent, which may be paused while it waits for its model")
	f.DurationVar(&o.timeout, "timeout", 0, "end the command after this time, pauses not counted")
	f.DurationVar(&o.grace, "kill-grace", 0, "and first ask it to, with SIGTERM, this time before")
	f.Int64Var(&o.spec.MaxOutput, "max-output", 0, "bytes of each output stream that are kept")
	f.BoolVarP(&o.stdin, "interactive", "i", false, "pass stdin on")
	f.BoolVarP(&o.terminal, "tty", "t", false, "give the command a terminal")
	f.BoolVarP(&o.detach, "detach", "d", false, "print the id of the exec and leave it")
	return c
}

// fill turns flags into the spec.
func (o *execOptions) fill(stdin io.Reader) error {
	s := &o.spec
	if s.ID == "" {
		s.ID = strings.ToLower(rand.Text()[:16])
	}
	var err error
	if s.Timeout, err = units("timeout", o.timeout, time.Millisecond); err != nil {
		return err
	}
	if s.KillGrace, err = units("kill-grace", o.grace, time.Millisecond); err != nil {
		return err
	}
	s.OpenStdin = o.stdin
	if s.Session != "" {
		s.Shell, s.Argv = strings.Join(s.Argv, " "), nil
	}
	if !o.terminal {
		return nil
	}
	tty, ok := stdin.(*os.File)
	if !ok || !term.IsTerminal(int(tty.Fd())) {
		return fmt.Errorf("%w: -t needs a terminal on stdin", errUsage)
	}
	cols, rows, err := term.GetSize(int(tty.Fd()))
	if err != nil {
		return err
	}
	s.PTY = &sandbox.Window{Rows: rows, Cols: cols}
	return nil
}

func runExec(ctx context.Context, o execOptions, stdin io.Reader, stdout, stderr io.Writer) error {
	if err := o.fill(stdin); err != nil {
		return err
	}
	c, err := o.node.dial()
	if err != nil {
		return err
	}
	if _, err := c.Start(ctx, o.sandbox, o.spec); err != nil {
		return err
	}
	if o.detach {
		_, err := fmt.Fprintln(stdout, o.spec.ID)
		return err
	}
	e := running{client: c, sandbox: o.sandbox, exec: o.spec.ID}
	// Signals are the command's: this one ends when that does.
	ctx = context.WithoutCancel(ctx)
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH)
	defer signal.Stop(signals)
	if o.terminal {
		old, err := term.MakeRaw(int(stdin.(*os.File).Fd()))
		if err != nil {
			return err
		}
		defer term.Restore(int(stdin.(*os.File).Fd()), old)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go e.pass(ctx, signals, stdin) // ends with ctx
	if o.stdin {
		go e.feed(ctx, stdin) // ends with its next read after the command's end, or with this process
	}
	st, err := e.follow(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	lost := tellDropped(st, stderr)
	if st.Message != "" {
		fmt.Fprintf(stderr, "quarry: %s\n", oneLine(st.Message))
	}
	if st.Infra != "" {
		return fmt.Errorf("%w: %s", errInfra, oneLine(st.Infra))
	}
	if err := execStatus(st); err != nil || lost == nil {
		return err
	}
	return lost
}

// errInfra says that how a command ended is not its own doing.
var errInfra = errors.New("the worker may be to blame for how the command ended, which does not count")

// tellDropped says which output is lost, and why. It returns an error when that is
// the node's doing: such a command is not as good as its exit status says.
func tellDropped(st sandbox.ExecState, stderr io.Writer) (lost error) {
	for _, s := range []struct {
		name string
		sandbox.Output
	}{{"stdout", st.Stdout}, {"stderr", st.Stderr}} {
		if s.Dropped == 0 {
			continue
		}
		why := "came after what is kept: --max-output BYTES keeps more of each stream"
		switch s.DroppedBy {
		case sandbox.DroppedSandbox:
			why = "came after what is kept of all commands of the sandbox: --output-mb at its create keeps more"
		case sandbox.DroppedOld:
			why = "were kept until later commands needed the room: --output-mb at the sandbox's create keeps more"
		case sandbox.DroppedDisk:
			why = "could not be written by the node: " + oneLine(s.Error)
			lost = fmt.Errorf("output of the command was lost by the node: %s", oneLine(s.Error))
		}
		fmt.Fprintf(stderr, "quarry: %d bytes of %s are lost, they %s\n", s.Dropped, s.name, why)
	}
	return lost
}

// execStatus is the exit code of exec for how a command ended.
func execStatus(st sandbox.ExecState) error {
	switch st.Reason {
	case sandbox.ExecReasonExited, sandbox.ExecReasonSignaled, sandbox.ExecReasonKilled, sandbox.ExecReasonNotFound, sandbox.ExecReasonNoExec, sandbox.ExecReasonSyntax:
	default:
		return fmt.Errorf("the command ended by %s after %v", st.Reason, time.Duration(st.Ran)*time.Millisecond)
	}
	if st.ExitCode == nil {
		return fmt.Errorf("the command has no exit status: %s %s", st.Reason, st.Message)
	}
	if *st.ExitCode == 0 {
		return nil
	}
	return exitStatus(*st.ExitCode)
}

// running is a command of a worker as a terminal follows it.
type running struct {
	client        *client.Client
	sandbox, exec string
}

// patience is how long a worker that is lost is looked for again.
const patience = 30 * time.Second

// follow copies the outputs until the command has ended, over as many connections as
// it takes.
func (e running) follow(ctx context.Context, stdout, stderr io.Writer) (sandbox.ExecState, error) {
	var out, errOff int64
	lost := time.Time{}
	for {
		before := out + errOff
		st, err := e.client.Follow(ctx, e.sandbox, e.exec, &out, &errOff, stdout, stderr)
		var refused *sandboxes.Error
		if err == nil || errors.As(err, &refused) && !refused.Retryable || isAny(err, sandbox.ErrEnded, syscall.EPIPE) {
			return st, err
		}
		if out+errOff > before || lost.IsZero() {
			lost = time.Now()
		}
		if time.Since(lost) > patience {
			return st, fmt.Errorf("the worker does not answer: %w; the command goes on as exec %s", err, e.exec)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// pass forwards signals, and the terminal's size when that is what changed.
func (e running) pass(ctx context.Context, signals <-chan os.Signal, stdin io.Reader) {
	for {
		select {
		case <-ctx.Done():
			return
		case sig := <-signals:
			if sig == syscall.SIGWINCH {
				if tty, ok := stdin.(*os.File); ok {
					if cols, rows, err := term.GetSize(int(tty.Fd())); err == nil {
						_ = e.client.Resize(ctx, e.sandbox, e.exec, sandbox.Window{Rows: rows, Cols: cols})
					}
				}
				continue
			}
			_ = e.client.Signal(ctx, e.sandbox, e.exec, int(sig.(syscall.Signal))) // it may just have ended
		}
	}
}

// feed gives the command what comes on stdin, a piece each call, so that none waits
// for somebody who types.
func (e running) feed(ctx context.Context, stdin io.Reader) {
	offset := int64(0)
	buf := make([]byte, 64<<10)
	for {
		n, err := stdin.Read(buf)
		if n > 0 || err != nil {
			next, sendErr := e.client.Stdin(ctx, e.sandbox, e.exec, offset, strings.NewReader(string(buf[:n])), err != nil)
			if sendErr != nil {
				return // the command has ended, or takes no more
			}
			offset = next
		}
		if err != nil {
			return
		}
	}
}
