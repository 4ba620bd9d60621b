package holder

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/fdpass"
	"quarry/internal/strictjson"
	"quarry/worker/sandbox"
)

// abortTimeout is how long a holder that is not wanted any more may take to undo
// what it began, before it is killed.
const abortTimeout = 20 * time.Second

// Start starts a holder, which starts the sandbox, and returns when its first
// process runs. When it does not, nothing of it is left but the folder's files,
// and the error is sandbox.ErrRuntime with what runsc said; an end of ctx is that
// too, and a sandbox that was begun is killed first.
func Start(ctx context.Context, c Config) (*Client, Timings, error) {
	cmd, stdin, stdout, err := spawn(c)
	if err != nil {
		return nil, Timings{}, fmt.Errorf("%w: start the holder: %w", sandbox.ErrRuntime, err)
	}
	defer stdin.Close()
	defer stdout.Close()
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }() // ends with the holder, which this process then has waited for
	answered := make(chan answeredStart, 1)
	go func() { answered <- readStarted(stdout) }() // ends with the line, or the holder
	var a answeredStart
	select {
	case a = <-answered:
	case <-ctx.Done():
		return nil, Timings{}, errors.Join(context.Cause(ctx), giveUp(c.Dir, cmd, stdin, answered, exited))
	}
	if a.err != nil {
		return nil, Timings{}, fmt.Errorf("%w: the holder did not start the sandbox: %w: %s", sandbox.ErrRuntime, a.err, logged(c.Dir))
	}
	if err := (answer{Code: a.Code, Message: a.Message}).error(); err != nil {
		<-exited
		return nil, Timings{}, err
	}
	t := Timings{Spawn: time.Duration(a.Spawn) * time.Microsecond, Runsc: time.Duration(a.Runsc) * time.Microsecond}
	return newClient(c.Dir), t, nil
}

// giveUp tells a holder that nobody wants its sandbox any more, and waits until it has
// gone.
func giveUp(dir string, cmd *exec.Cmd, stdin io.Writer, answered <-chan answeredStart, exited <-chan error) (err error) {
	stdin.Write([]byte{abort}) // it may be gone
	late := time.After(abortTimeout)
	select {
	case a := <-answered:
		if a.err == nil && a.Code == "" { // too late
			err = endUnwanted(dir)
		}
	case <-late:
	}
	select {
	case <-exited:
	case <-late:
		err = errors.Join(err, fmt.Errorf("the holder of %s does not end", dir), cmd.Process.Kill())
	}
	return err
}

// endUnwanted ends a sandbox that ran just when it was not wanted any more.
func endUnwanted(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), abortTimeout)
	defer cancel()
	cl := newClient(dir)
	defer cl.Close()
	_, err := cl.End(ctx)
	return errors.Join(err, cl.Release(ctx))
}

type answeredStart struct {
	started
	err error
}

func readStarted(r io.Reader) (a answeredStart) {
	line, err := bufio.NewReaderSize(r, maxConfig).ReadSlice('\n')
	if err != nil {
		return answeredStart{err: fmt.Errorf("it ended: %w", err)}
	}
	a.started, a.err = strictjson.Decode[started](line[:len(line)-1], maxConfig)
	if a.err == nil && a.Format != startedFormat {
		a.err = fmt.Errorf("%w: format %q", errVersion, plain(a.Format))
	}
	return a
}

// spawn starts the process in a session of its own: nothing that ends this one
// reaches it.
func spawn(c Config) (cmd *exec.Cmd, stdin, stdout *os.File, err error) {
	if len(c.Shim) == 0 || len(c.Runsc) == 0 || !filepath.IsAbs(c.Dir) || c.ID == "" {
		return nil, nil, nil, errors.New("a holder needs Shim, Runsc, an absolute Dir and an ID")
	}
	if c.MaxOutput < 0 || c.MaxOutput > MaxOutput {
		return nil, nil, nil, fmt.Errorf("a stream cannot keep %d bytes, at most %d", c.MaxOutput, MaxOutput)
	}
	if c.MaxKept != 0 && c.MaxKept < MinKept {
		return nil, nil, nil, fmt.Errorf("a sandbox cannot keep %d bytes of output, at least %d", c.MaxKept, MinKept)
	}
	log, err := os.OpenFile(logPath(c.Dir), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, nil, err
	}
	defer log.Close()
	var open []*os.File
	defer func() {
		if err != nil {
			fdpass.Close(open)
		}
	}()
	pipe := func() (r, w *os.File, err error) {
		if r, w, err = os.Pipe(); err == nil {
			open = append(open, r, w)
		}
		return r, w, err
	}
	in, stdin, err := pipe()
	if err != nil {
		return nil, nil, nil, err
	}
	stdout, out, err := pipe()
	if err != nil {
		return nil, nil, nil, err
	}
	// The folder is named for those who look for what is left of a sandbox.
	cmd = exec.Command(c.Shim[0], append(append([]string{}, c.Shim[1:]...), Role, c.Dir+"/")...)
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, log
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	cmd.Env = append(os.Environ(), keepVariable+"=")
	if c.Keep != nil {
		cmd.ExtraFiles = []*os.File{c.Keep}
		cmd.Env = append(os.Environ(), keepVariable+"=1")
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, nil, err
	}
	in.Close()
	out.Close()
	line := append(marshal(config{configFormat, c.Dir, c.ID, c.Runsc, c.Entrypoint, c.MaxOutput, c.MaxKept}), '\n')
	if len(line) > maxConfig {
		line = nil // the holder says that it had no config
	}
	stdin.Write(line) // a holder that is gone already is seen by its stdout
	return cmd, stdin, stdout, nil
}

func logPath(dir string) string { return filepath.Join(dir, "holder.log") }

// logged returns the end of the holder's log.
func logged(dir string) string {
	const last = 1 << 10
	b, err := readTail(logPath(dir))
	if err != nil {
		return "it left no log"
	}
	return plain(string(b[max(0, len(b)-last):]))
}
